"""A small sentence encoder and its tokenizer: the graph of examples/embeddings, with random weights and one layer."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

_BUILD = Path(__file__).resolve().parents[3] / "examples" / "embeddings" / "build.py"
_WORDS = [
    "a", "man", "woman", "is", "eating", "food", "bread", "pasta", "riding", "horse", "playing", "the",
    "in", "on", "and", "of", "to", "my", "how", "do", "i",
]  # fmt: skip
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_LONGEST = 32


def build(folder: Path) -> None:
    """Write minilm.onnx and tokenizer.json, as examples/embeddings/build.py does."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(_example().Encoder(_weights()).model(), folder / "minilm.onnx")
    _write_tokenizer(folder / "tokenizer.json")


def without_pooling(encoder: onnx.ModelProto) -> onnx.ModelProto:
    """Return an encoder of `build` that ends at `last_hidden_state`, the vectors of the tokens."""
    nodes = list(encoder.graph.node)
    last = max(number for number, node in enumerate(nodes) if node.op_type == "LayerNormalization")
    del encoder.graph.node[last + 1 :]
    encoder.graph.node.append(helper.make_node("Identity", nodes[last].output, ["last_hidden_state"]))
    (vectors,) = encoder.graph.output
    hidden = vectors.type.tensor_type.shape.dim[-1].dim_value
    del encoder.graph.output[:]
    encoder.graph.output.append(
        helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "tokens", hidden])
    )
    onnx.checker.check_model(encoder, full_check=True)
    return encoder


def with_logits(encoder: onnx.ModelProto, count: int) -> onnx.ModelProto:
    """Return an encoder of `without_pooling` that ends at `logits`, made of the vector of the first token."""
    (vectors,) = encoder.graph.output
    hidden = vectors.type.tensor_type.shape.dim[-1].dim_value
    weights = np.random.default_rng(2).normal(0, 0.1, (hidden, count)).astype(np.float32)
    encoder.graph.initializer.append(numpy_helper.from_array(weights, "head"))
    encoder.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "first"))
    encoder.graph.node.append(helper.make_node("Gather", ["last_hidden_state", "first"], ["cls"], axis=1))
    encoder.graph.node.append(helper.make_node("MatMul", ["cls", "head"], ["logits"]))
    del encoder.graph.output[:]
    encoder.graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", count]))
    onnx.checker.check_model(encoder, full_check=True)
    return encoder


def _example() -> ModuleType:
    spec = spec_from_file_location("build_sentence_encoder", _BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["LAYERS"] = 1
    return module


def _weights() -> dict[str, npt.NDArray[np.float32]]:
    random = np.random.default_rng(1)
    hidden, inner = 384, 1536
    made: dict[str, npt.NDArray[np.float32]] = {}

    def add(name: str, *shape: int) -> None:
        made[f"{name}.weight"] = random.normal(0, 0.05, shape).astype(np.float32)
        made[f"{name}.bias"] = random.normal(0, 0.05, shape[:1]).astype(np.float32)

    for kind, rows in (("word", len(_SPECIAL) + len(_WORDS)), ("position", 512), ("token_type", 2)):
        add(f"embeddings.{kind}_embeddings", rows, hidden)
    layer = "encoder.layer.0"
    for name in ("embeddings", f"{layer}.attention.output", f"{layer}.output"):
        made[f"{name}.LayerNorm.weight"] = np.ones(hidden, np.float32)
        made[f"{name}.LayerNorm.bias"] = np.zeros(hidden, np.float32)
    for part in ("query", "key", "value"):
        add(f"{layer}.attention.self.{part}", hidden, hidden)
    add(f"{layer}.attention.output.dense", hidden, hidden)
    add(f"{layer}.intermediate.dense", inner, hidden)
    add(f"{layer}.output.dense", hidden, inner)
    return made


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.normalizers import Lowercase
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    vocabulary = {word: number for number, word in enumerate((*_SPECIAL, *_WORDS))}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    made.normalizer = Lowercase()
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    made.enable_truncation(_LONGEST)
    made.save(str(path))
