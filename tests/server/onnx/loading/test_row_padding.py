"""Default padding of an ONNX model: the axis is found in the file, or the log has the reason why there is none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.models import small
from support.server.rig import signature, spec

from tensorferry.batcher import Padding, PadInput
from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.onnx.loading.loading import load_onnx_step
from tensorferry.server.onnx.loading.row_padding import RaggedInput, default_padding
from tensorferry.server.signature import Signature

IDS, MASK = RaggedInput((4, 8), 1), RaggedInput((4, 8), 0)


def model(**dims: tuple[int | str, ...]) -> Signature:
    return signature(
        *(spec(name, "INT64", *each) for name, each in dims.items()), outputs=(spec("y", "FP32", "batch"),)
    )


def test_of_two_functions_the_shorter_lengths_are_used() -> None:
    given = model(ids=("batch", "seq"), mask=("batch", "seq"))
    found = default_padding(given, {"ids": IDS, "mask": RaggedInput((2, 4), 0)})
    assert found == (PadLengths("seq", (2, 4)), (("ids", "1"), ("mask", "0")))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (model(ids=("batch", ""), mask=("batch", "")), "axis 1 of input 'ids' has no name in the file"),
        (model(ids=("batch", 128), mask=("batch", 128)), "input 'ids' has the fixed length 128"),
        (model(ids=("batch",), mask=("batch",)), "axis 1 of input 'ids' has no name"),
        (model(ids=("batch", "a"), mask=("batch", "b")), "axis 1 of its inputs has different names"),
        (model(ids=("batch", "seq", "seq"), mask=("batch", "seq")), "'ids' has the axis 'seq' more than once"),
        (model(ids=("batch", "seq"), mask=("batch", "seq"), types=("batch", "seq")), "input 'types' also has the axis 'seq', and no pad value"),
    ],
)  # fmt: skip
def test_the_reason_is_given_if_there_is_no_padding(given: Signature, reason: str) -> None:
    assert reason in str(default_padding(given, {"ids": IDS, "mask": MASK}))


def test_an_encoder_that_gives_its_attention_has_no_default_padding() -> None:
    attention = spec("attention", "FP32", "batch", "seq", "seq")
    given = signature(spec("ids", "INT64", "batch", "seq"), outputs=(attention,))
    assert "'attention' has the axis 'seq' more than once" in str(default_padding(given, {"ids": IDS}))


def padding_of(path: Path, ragged: dict[str, RaggedInput], config: ServerConfig) -> Padding | None:
    return load_onnx_step(ModelSource("text", path), config, "cpu", None, ragged, moves_axes=False).padding


def test_a_model_is_loaded_with_the_default_padding(tmp_path: Path) -> None:
    path = small.masked_mean(tmp_path / "text.onnx")
    padding = padding_of(path, {"ids": IDS, "mask": MASK}, ServerConfig(()))
    expected = Padding((4, 8), {"ids": PadInput(1, 1), "mask": PadInput(1, 0)}, {"tokens": 1}, steps=8)
    assert padding == expected
    # Declared padding comes first.
    declared = ServerConfig(
        (), pad_lengths=PadLengths("sequence", (6,)), pad_values=(("ids", "0"), ("mask", "0"))
    )
    padding = padding_of(path, {"ids": IDS, "mask": MASK}, declared)
    assert padding is not None
    assert padding.lengths == (6,)


def test_a_model_without_default_padding_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = small.masked_mean(tmp_path / "text.onnx")
    with caplog.at_level(logging.INFO, "tensorferry.server"):
        assert padding_of(path, {"ids": IDS}, ServerConfig(())) is None
    assert "model text is not padded by default" in caplog.text
    assert "input 'mask' also has the axis 'sequence', and no pad value; declare onnx(" in caplog.text
