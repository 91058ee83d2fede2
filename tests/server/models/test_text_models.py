"""Models of text: which pooling and which output an encoder gets, what is refused, and the option --embeddings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime import InferenceSession
from support.models import sentence_encoder
from support.models.declared import Load

from tensorferry.server.errors import StartError
from tensorferry.server.models.repository.embedding_sources import embedding_sources
from tensorferry.server.onnx.graph.rewriting.text_head import NoHead, add_head
from tensorferry.serving import (
    FP32,
    STRING,
    DeclarationError,
    classifier,
    embeddings,
    model,
    pipeline,
    reranker,
    step,
    tokenizer,
)
from tensorferry.serving import onnx as onnx_model
from tensorferry.serving.text_tasks import TextHead

HIDDEN = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3) - 7
MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], np.int64)


def encoder(
    outputs: Mapping[str, Sequence[Any]], opset: int = 17, kind: int = TensorProto.FLOAT, *, mask: bool = True
) -> onnx.ModelProto:
    """Return a graph that gives its input `hidden` as each output, whose axes are given; the mask has no effect."""
    rank = {name: len(dims) for name, dims in outputs.items()}
    inputs = [helper.make_tensor_value_info("hidden", kind, ["n", "t", 3])]
    if mask:
        inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["n", "t"]))
    nodes = [
        helper.make_node("Identity", ["hidden"], [name])
        if rank[name] == 3
        else helper.make_node("Gather", ["hidden", "zero"], [name], axis=1)
        for name in outputs
    ]
    zero = helper.make_tensor("zero", TensorProto.INT64, [], [0])
    given = [helper.make_tensor_value_info(name, kind, dims) for name, dims in outputs.items()]
    graph = helper.make_graph(nodes, "g", inputs, given, [zero])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("opset", [12, 17, 18])
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_padding_is_no_part_of_a_vector(opset: int, pooling: str) -> None:
    changed = encoder({"y": ["n", "t", 3]}, opset)
    add_head(changed, TextHead("embedding", pooling, normalize=True))
    onnx.checker.check_model(changed, full_check=True)
    vectors, tokens = InferenceSession(changed.SerializeToString()).run(
        None, {"hidden": HIDDEN, "attention_mask": MASK}
    )
    lengths = MASK.sum(axis=1)
    rows: Any = {
        "mean": [HIDDEN[at, :length].mean(axis=0) for at, length in enumerate(lengths)],
        "first": HIDDEN[:, 0],
        "last": [HIDDEN[at, length - 1] for at, length in enumerate(lengths)],
    }[pooling]
    expected = np.array(rows) / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert tokens.tolist() == lengths.tolist()


def test_an_encoder_in_fp16_without_a_mask() -> None:
    changed = encoder({"y": ["n", "t", 3]}, kind=TensorProto.FLOAT16, mask=False)
    add_head(changed, TextHead("embedding", "mean"))
    vectors, _ = InferenceSession(changed.SerializeToString()).run(
        None, {"hidden": HIDDEN.astype(np.float16), "attention_mask": MASK}
    )
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors[0], HIDDEN[0, :2].mean(axis=0), atol=1e-3)


@pytest.mark.parametrize(
    ("outputs", "opset", "head", "message"),
    [
        ({"y": ["n", "t", 3]}, 17, TextHead("embedding"), "must be pooled; declare the pooling .* 'mean', 'first', 'last', or None"),
        ({"y": ["n", 3]}, 17, TextHead("embedding", "mean"), "declare pooling=None if it is pooled: it has y .n, 3."),
        ({"a": ["n", 3], "b": ["n", 3]}, 17, TextHead("embedding"), "several outputs have 2 axes; name one by `output`"),
        ({"y": ["n", 3]}, 17, TextHead("rerank"), "has 3 logits for each text, but a reranker has one"),
        ({"y": ["n", "t", 3]}, 17, TextHead("classify"), "no output has 2 axes, logits for each text"),
        ({"y": ["n", 3]}, 17, TextHead("embedding", output="z"), "it has no output 'z' of floats"),
        ({"y": ["n", "t", 3]}, 10, TextHead("embedding", "last"), "version 10, and the pooling 'last' needs 11"),
    ],
)  # fmt: skip
def test_an_output_that_does_not_fit(outputs: Any, opset: int, head: TextHead, message: str) -> None:
    with pytest.raises(NoHead, match=message):
        add_head(encoder(outputs, opset), head)


def test_one_of_several_outputs_is_named() -> None:
    changed = encoder({"a": ["n", 3], "b": ["n", 3]})
    add_head(changed, TextHead("embedding", output="b"))
    assert [each.name for each in changed.graph.output] == ["tensorferry.embedding", "tensorferry.tokens"]


@pytest.fixture
def encoders(tmp_path: Path) -> Path:
    """A directory with encoders of tokens and of sentences, and a tokenizer."""
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    sentence_encoder.build(tmp_path)
    tokens = sentence_encoder.without_pooling(onnx.load(tmp_path / "minilm.onnx"))
    onnx.save(tokens, tmp_path / "tokens.onnx")
    return tmp_path


def declared(folder: Path, file: str = "tokens.onnx", **arguments: Any) -> Any:
    return embeddings("embed", tokenizer(folder / "tokenizer.json"), onnx_model(file), **arguments)


def test_the_pooling_is_that_of_the_files_beside_the_encoder(
    encoders: Path, load_declared: Load, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        StartError, match=r"tokens\.onnx: it gives a vector for each token, which must be pooled"
    ):
        load_declared(declared(encoders))
    # An output with one vector a text is not taken for it.
    both = encoder({"last_hidden_state": ["n", "t", 3], "pooler_output": ["n", 3]})
    onnx.save(both, encoders / "bert.onnx")
    with pytest.raises(StartError, match=r"it has last_hidden_state .n, t, 3., pooler_output"):
        load_declared(declared(encoders, "bert.onnx"))
    pooling = encoders / "1_Pooling" / "config.json"
    pooling.parent.mkdir()
    pooling.write_text(json.dumps({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": False}))
    caplog.set_level("INFO")
    assert load_declared(declared(encoders)).batching_verdict == "tested"
    assert "gives vectors by the pooling 'last', scaled to length 1" in caplog.text
    assert load_declared(declared(encoders, "minilm.onnx")).task is not None
    assert "gives vectors as the file pools them" in caplog.text
    # As newer versions write it.
    pooling.write_text(json.dumps({"embedding_dimension": 8, "pooling_mode": "cls"}))
    assert load_declared(declared(encoders)).task is not None
    assert "gives vectors by the pooling 'first', scaled to length 1" in caplog.text
    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(
        StartError, match="says pooling_mode_max_tokens; supported is one of pooling_mode_mean"
    ):
        load_declared(declared(encoders))
    pooling.write_text("[]")
    with pytest.raises(StartError, match=r"config\.json cannot be read .*; declare `pooling`"):
        load_declared(declared(encoders))


@model(inputs={"text": STRING[-1]}, outputs={"v": FP32[-1, 2], "w": FP32[-1, 2]})
def two_vectors(text: Any) -> Any:
    return (np.zeros((len(text), 2), np.float32),) * 2


@model(inputs={"text": STRING[-1]}, outputs={"v": FP32[-1, "tokens", 2]})
def vectors_without_mask(text: Any) -> Any:
    return np.zeros((len(text), 1, 2), np.float32)


@model(inputs={"text": STRING[-1]}, outputs={"scores": FP32[-1, 2]})
def scores(text: Any) -> Any:
    return np.zeros((len(text), 2), np.float32)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (
            pipeline("p", two_vectors, task="embedding"),
            "needs one output FP32.-1, size., but its outputs are",
        ),
        (
            pipeline("p", vectors_without_mask, task="token_embedding"),
            "needs one output FP32.-1, tokens, size. and the output attention_mask, INT64.-1, tokens., but",
        ),
        (pipeline("p", scores, task="rerank"), "needs 2 input.s. STRING.-1., but its inputs are"),
        (pipeline("p", scores, task="classify", labels=["a"]), "has 1 labels, but its output has 2 classes"),
    ],
)
def test_a_pipeline_that_cannot_do_its_task(load_declared: Load, of: Any, message: str) -> None:
    with pytest.raises(StartError, match=message):
        load_declared(of)


def test_a_task_of_a_pipeline(load_declared: Load) -> None:
    loaded = load_declared(pipeline("p", scores, task="classify", labels=["a", "b"], served_as=["q"]))
    assert loaded.task is not None
    assert (loaded.task.kind, loaded.task.labels, loaded.task.served_as) == ("classify", ("a", "b"), ("q",))


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda a, b: embeddings("e", a, b, pooling="max"), "pooling is 'max'; it must be one of 'mean'"),
        (lambda a, b: embeddings("e", b, a), "the first must be a tokenizer"),
        (lambda a, b: reranker("e", a, step(b, outputs={"y": "z"})), "renames outputs of step"),
        (lambda a, b: classifier("e", a, b, labels=[]), "give a list with the name of each class"),
        (lambda a, b: pipeline("e", a, b, task="chat"), "task is 'chat'; it must be one of embedding"),
        (lambda a, b: pipeline("e", a, b, served_as=["f"]), "served_as without a task"),
        (lambda a, b: pipeline("e", a, b, task="rerank", labels=["a"]), "has no labels"),
        (lambda a, b: pipeline("e", a, b, task="classify"), "give a list with the name of each class"),
        (lambda a, b: pipeline("e", a, b, task="classify", labels="ab"), "labels is 'ab'; it must be a list"),
        (lambda a, b: embeddings("e", a, b, served_as="f"), "served_as is 'f'; it must be a list of names"),
    ],
)
def test_wrong_declarations(declare: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        declare(tokenizer("tokenizer.json"), onnx_model("model.onnx"))


def test_places_of_an_encoder(encoders: Path) -> None:
    source: Any
    with pytest.raises(
        StartError, match=r"has no model.onnx or onnx/model.onnx but \S+, .*; give the path of"
    ):
        embedding_sources([str(encoders)])
    (encoders / "onnx").mkdir()
    (encoders / "tokens.onnx").rename(encoders / "onnx" / "model.onnx")
    (source,) = embedding_sources([str(encoders)])
    assert (source.name, source.path) == (encoders.name, encoders / "onnx" / "model.onnx")
    (source,) = embedding_sources([f"small={encoders / 'minilm.onnx'}"])
    assert (source.name, source.path.name) == ("small", "minilm.onnx")
    alone = encoders / "alone"
    alone.mkdir()
    for name in ("minilm.onnx", "tokenizer.json"):
        (alone / name).symlink_to(encoders / name)
    (source,) = embedding_sources([str(alone)])
    assert (source.name, source.path) == ("alone", alone / "minilm.onnx")
    (source,) = embedding_sources(["hf://org/Some-Encoder@v1"])
    assert source.name == "Some-Encoder"
    first, last = source.declaration.steps
    assert first.model.elsewhere.address == "hf://org/Some-Encoder@v1/tokenizer.json"
    assert last.model.address == "hf://org/Some-Encoder@v1/onnx/model.onnx"
    (source,) = embedding_sources(["hf://org/Some-Encoder/onnx/model_int8.onnx"])
    assert source.declaration.steps[1].model.address.endswith("Encoder/onnx/model_int8.onnx")
    assert source.declaration.task.served_as == ("org/Some-Encoder",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("s3://bucket/encoder", "it must be hf://ORG/REPO"),
        ("hf:///", "is not the address of a model"),
        ("hf://onnx-community/encoder/onnx", "it must be hf://ORG/REPO"),
        ("missing", "missing has no model.onnx or onnx/model.onnx"),
        ("model.onnx", "there is no .*/tokenizer.json, which the encoder"),
        ("a b=hf://org/repo", "the name 'a b' is not allowed"),
    ],
)
def test_wrong_places_of_an_encoder(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError, match=message):
        embedding_sources([given])
