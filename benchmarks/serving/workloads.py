"""Models with seeded weights, and one row of input for each.

`null` computes next to nothing, so that a server's own cost shows. With wider rows the same model
takes messages from 64 bytes to 4 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from serving.transformer import SEQUENCE, VOCABULARY, build_transformer
from serving.weights import Weights

Array = npt.NDArray[Any]

MLP_SIZES = (1024, 2048, 2048, 2048, 1000)
TINY_SIZES = (16, 4)


def build_identity(weights: Weights) -> onnx.GraphProto:
    """Build the identity of [n, width]."""
    del weights
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "width"]) for name in "xy"]
    return helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", value[:1], value[1:])


def build_dense(sizes: tuple[int, ...], weights: Weights) -> onnx.GraphProto:
    """Build dense layers of these sizes, with ReLU after each but the last, or after the only one."""
    nodes, last = [], "x"
    for at, (width, outputs) in enumerate(pairwise(sizes)):
        inputs = [last, weights.normal(f"w{at}", (width, outputs)), weights.normal(f"b{at}", (outputs,))]
        nodes.append(helper.make_node("Gemm", inputs, [last := f"dense{at}"]))
        if at < len(sizes) - 2 or at == 0:
            nodes.append(helper.make_node("Relu", [last], [last := f"relu{at}"]))
    nodes[-1].output[0] = "y"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", sizes[0]])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", sizes[-1]])
    return helper.make_graph(nodes, "dense", [x], [y], weights.tensors)


_BUILDERS: dict[str, Callable[[Weights], onnx.GraphProto]] = {
    "identity": build_identity,
    "tiny": lambda weights: build_dense(TINY_SIZES, weights),
    "mlp": lambda weights: build_dense(MLP_SIZES, weights),
    "transformer": build_transformer,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the width of its rows.

    `function` is the file of a Python function that servers run in place of an ONNX model. The file has the model's name,
    and tensorferry serves the `app.py` beside it.
    """

    name: str
    model: str
    width: int
    meaning: str
    function: Path | None = None

    @property
    def datatype(self) -> str:
        """Datatype of the input, as the protocol names it."""
        return "INT64" if self.model == "transformer" else "FP32"

    @property
    def input_name(self) -> str:
        """Name of the model's only input; its only output is y."""
        return "ids" if self.model == "transformer" else "x"

    def row(self) -> Array:
        """Return the measured row: [1, width]."""
        random = np.random.default_rng(2)
        if self.model == "transformer":
            return random.integers(0, VOCABULARY, (1, self.width))
        return random.standard_normal((1, self.width), np.float32)

    def path(self, folder: Path) -> Path:
        """Return the path of the model, or of the function's file."""
        return self.function or folder / "models" / f"{self.model}.onnx"


NULL = Workload("null", "identity", 16, "Identity of 16 floats")
TINY = Workload("tiny", "tiny", TINY_SIZES[0], "One dense layer, 16 to 4")
MLP = Workload("mlp", "mlp", MLP_SIZES[0], "Dense layers " + "-".join(map(str, MLP_SIZES)))
TRANSFORMER = Workload(
    "transformer", "transformer", SEQUENCE, "Sentence encoder: 6 layers, hidden 384, sequence 32"
)
SIZES = tuple(
    Workload(name, "identity", size // 4, f"Identity of {size:,} bytes")
    for name, size in (
        ("64 B", 64),
        ("1 KiB", 1 << 10),
        ("16 KiB", 1 << 14),
        ("256 KiB", 1 << 18),
        ("4 MiB", 1 << 22),
    )
)
WORKLOADS = {workload.name: workload for workload in (NULL, TINY, MLP, TRANSFORMER, *SIZES)}


def write_models(folder: Path) -> None:
    """Write the models that do not exist yet."""
    (folder / "models").mkdir(parents=True, exist_ok=True)
    for name, build in _BUILDERS.items():
        path = folder / "models" / f"{name}.onnx"
        if not path.exists():
            model = helper.make_model(build(Weights()), opset_imports=[helper.make_opsetid("", 17)])
            model.ir_version = 9  # The newest version that ONNX Runtime 1.20 reads.
            onnx.checker.check_model(model)
            part = path.with_suffix(".part")
            onnx.save(model, str(part))
            part.rename(path)
