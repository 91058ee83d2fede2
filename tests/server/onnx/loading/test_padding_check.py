"""Padding follows from the options and the ONNX file, and is used only if it changes no answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.models import small
from support.server.rig import Array, Load, infer, request, signature, spec

from tensorferry.batcher import Padding, PadInput
from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.errors import InvalidRequestError, StartError
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.onnx.loading.padding_check import padding_dependence, parse_padding
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.signature import Signature

LENGTHS = PadLengths("sequence", (4, 8))
MASKED = {"pad_lengths": LENGTHS, "pad_values": (("ids", "0"), ("mask", "0"))}

TEXT = signature(
    spec("ids", "INT64", "batch", "sequence"),
    spec("mask", "BOOL", "batch", "sequence"),
    spec("scale", "FP32", "batch", "features"),
    outputs=(spec("tokens", "FP32", "batch", 3, "sequence"), spec("pooled", "FP32", "batch", "features")),
)


def test_the_padded_axis_is_found_by_its_name() -> None:
    padding = parse_padding(TEXT, LENGTHS, {"ids": "-5", "mask": "false", "of another model": "7"})
    assert padding == Padding(
        (4, 8), {"ids": PadInput(1, -5), "mask": PadInput(1, False)}, outputs={"tokens": 2}
    )


@pytest.mark.parametrize(
    ("datatype", "text", "value"),
    [
        ("BOOL", "1", True),
        ("BOOL", "False", False),
        ("INT8", "-128", -128),
        ("FP16", "-inf", -np.inf),
        ("FP32", "-1e9", np.float32(-1e9)),
        ("BF16", "-1.5", int(np.asarray(-1.5, ml_dtypes.bfloat16).view(np.uint16))),
        ("BYTES", "[PAD]", "[PAD]"),
    ],
)
def test_pad_values_have_the_datatype_of_the_input(datatype: str, text: str, value: Any) -> None:
    made = signature(spec("x", datatype, "batch", "sequence"))
    padding = parse_padding(made, LENGTHS, {"x": text})
    assert isinstance(padding.inputs, Mapping)
    assert padding.inputs["x"] == (1, value)
    # The batcher can write the value.
    assert padding.plan(("x",), [(DATATYPES[datatype].storage, (1, 3))]) is not None


@pytest.mark.parametrize(
    ("datatype", "text"),
    [
        ("BOOL", "2"),
        ("UINT8", "256"),
        ("INT64", ""),
        ("FP16", "1e6"),
        ("FP32", "1e40"),
        ("BF16", "zero"),
        ("BF16", "1e40"),
    ],
)
def test_pad_values_outside_the_datatype_are_refused(datatype: str, text: str) -> None:
    with pytest.raises(StartError) as caught:
        parse_padding(signature(spec("x", datatype, "batch", "sequence")), LENGTHS, {"x": text})
    expected = f"--pad-values gives {text!r} for the input 'x'; it must be a value of {datatype}"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("made", "values", "message"),
    [
        (
            signature(spec("x", "FP32", "sequence", "time"), spec("y", "FP32", "batch", 3, "")),
            {"x": "0"},
            "--pad-lengths names the axis 'sequence', but no input has it behind the batch axis; "
            "the named dynamic axes of the inputs are: time",
        ),
        (TEXT, {"ids": "0"}, "no pad value for mask: each input with the axis 'sequence' of --pad-lengths needs one: " "--pad-values ids=0,mask=..."),
        (
            TEXT,
            {"ids": "0", "mask": "0", "scale": "0"},
            "--pad-values names the input 'scale', which has no axis 'sequence'; those that have are: ids, mask",
        ),
        (
            signature(spec("bias", "FP32", "batch", "sequence", "sequence")),
            {"bias": "0"},
            "input 'bias' has more than once ['batch', 'sequence', 'sequence']; only one axis",
        ),
        (
            signature(
                spec("x", "FP32", "batch", "sequence"),
                outputs=(spec("attention", "FP32", "batch", "sequence", "sequence"),),
            ),
            {"x": "0"},
            "output 'attention' has more than once",
        ),
    ],
)  # fmt: skip
def test_padding_that_does_not_fit_the_model_is_refused(
    made: Signature, values: dict[str, str], message: str
) -> None:
    with pytest.raises(StartError) as caught:
        parse_padding(made, LENGTHS, values)
    assert message in str(caught.value)


def test_an_error_of_the_padding_options_names_the_file(load: Load) -> None:
    with pytest.raises(StartError, match=r"m\.onnx: --pad-lengths names the axis 'sequence'"):
        load(small.twice, pad_lengths=LENGTHS)


# The check.


@pytest.mark.parametrize("build", [small.masked_mean, small.attention])
def test_a_model_that_masks_padding_is_padded(
    build: Callable[[Path], Path], load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(build, max_batch_size=4, **MASKED)
    assert model.padding is not None
    assert model.batching == "batches of up to 4 rows (proved), padded along 'sequence' to 4, 8"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("build", "values", "reason"),
    [
        (small.plain_mean, (("x", "0"),), "output 'y' of a row of length 3 changes when it is padded to 4: by "),
        (small.masked_mean, (("ids", "0"), ("mask", "1")), "output 'mean' of a row of length 2 changes when it is padded to 4: infinities or NaNs"),
        (
            lambda path: small.masked_mean(path, tokens="other_name"),
            (("ids", "0"), ("mask", "0")),
            "output 'tokens' of a row of length 3 changes when it is padded to 4: shape [1, 4, 4] instead of [1, 3, 4]",
        ),
        (lambda path: small.with_positions(path, 6), (("x", "0"),), "it does not run on rows padded to 8 (the model failed on this request"),
    ],
    ids=["counts the padding", "masks it in", "an output of another name", "too long for the model"],
)  # fmt: skip
def test_a_model_whose_answers_change_with_padding_is_served_unpadded_and_the_log_says_why(
    build: Callable[[Path], Path], values: Any, reason: str, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(build, pad_lengths=LENGTHS, pad_values=values)
    assert (model.padding, model.max_batch_size) == (None, 32)
    assert model.batching == "batches of up to 32 rows (proved)"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith(
        f"model m is not padded, requests of each length have their own batches: {reason}"
    )
    assert warning.endswith("(--batching trust pads it anyway)")


def test_trust_pads_it_anyway(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    model = load(small.plain_mean, batching="trust", pad_lengths=LENGTHS, pad_values=(("x", "0"),))
    assert model.padding is not None
    assert model.batching == "batches of up to 32 rows (trusted), padded along 'sequence' to 4, 8"
    assert "model m is padded unchecked (--batching trust)" in caplog.text


def mixing(path: Path) -> Path:
    """y = x minus its mean over the rows."""
    text = "(float[batch, sequence] x) => (float[batch, sequence] y)"
    return small.written(path, text + "{ mean = ReduceMean <axes = [0]> (x) y = Sub (x, mean) }")


def test_a_model_that_is_not_batched_is_not_padded(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    model = load(mixing, pad_lengths=LENGTHS, pad_values=(("x", "0"),))
    assert (model.padding, model.max_batch_size) == (None, 0)
    assert "model m is not padded: it is served unbatched, so requests share no batch" in caplog.text


# In the following tests a Python function replaces the model: x [batch, sequence] → y [batch, sequence].
def reason(
    model: Callable[[Array], Array], lengths: tuple[int, ...], datatype: str = "FP32", pad: Any = 0
) -> str:
    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": model(inputs["x"])}

    made = signature(
        spec("x", datatype, "batch", "sequence"), outputs=(spec("y", datatype, "batch", "sequence"),)
    )
    padding = Padding(lengths, {"x": PadInput(1, pad)}, {"y": 1})
    return padding_dependence(made, run, padding, "sequence", 4)


def test_every_datatype_and_set_of_lengths_passes() -> None:
    for datatype in DATATYPES:
        assert reason(lambda x: x, (3, 4, 40), datatype, "" if datatype == "BYTES" else 0) == ""
    for lengths in ((1,), (2,), (1, 2)):
        assert reason(lambda x: x, lengths) == ""


def test_what_there_was_no_time_for_is_tried_by_the_next_load() -> None:
    kept: set[tuple[int, int]] = set()
    tried: list[int] = []
    first = {(4, kind) for kind in range(3)}

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        tried.append(inputs["x"].shape[1])
        return {"y": inputs["x"]}

    made = signature(
        spec("x", "FP32", "batch", "sequence"), outputs=(spec("y", "FP32", "batch", "sequence"),)
    )
    padding = Padding((4, 8), {"x": PadInput(1, 0)}, {"y": 1})
    no_time = LoadBudget(0.0)
    time_for_one_kind = LoadBudget(1.0, iter((0.0, 0.0, 2.0)).__next__)
    for budget, known in (
        (no_time, first),
        (time_for_one_kind, {*first, (8, 0)}),
        (None, {(length, kind) for length in (4, 8) for kind in range(3)}),
    ):
        tried.clear()
        reason = padding_dependence(
            made,
            run,
            padding,
            "sequence",
            4,
            0.0,
            budget,
            lambda *which: which in kept,
            lambda *which: kept.add(which),
        )
        assert reason == ""
        assert kept == known
    assert min(tried) > 4, "the first length is known"
    assert len(tried) == 2 * 9, "so is one kind of rows of the other"


@pytest.mark.parametrize(
    ("model", "lengths", "found"),
    [
        (lambda x: x + (x[:, 1:2] == 0 if x.shape[1] > 1 else 0), (8,), "of a row of length 1 changes"),
        (lambda x: x + (x.shape[1] > 20) * (x[:, -1:] == 0), (8, 32), "padded to 32"),
        (lambda x: x + ((x == 0).any() if len(x) > 1 else 0), (8,), "changes when it is padded to 8 beside others: by "),
        # A maximum that counts padding of 0: in most random rows, one of four or more positions is above 0.
        (lambda x: np.where(x.max(1, keepdims=True) > 0, x, x + (x == 0).any(1, keepdims=True)), (64,), "of a row of length"),
        (lambda x: x * (2 if np.abs(x).max() > 20 and (x == 0).any() else 1), (8,), "of a row of length"),
    ],
    ids=["one length", "the longest", "beside other rows", "negative rows", "rows with large values"],
)  # fmt: skip
def test_a_difference_in_some_rows_only_is_found(
    model: Callable[[Array], Array], lengths: tuple[int, ...], found: str
) -> None:
    assert found in reason(model, lengths)


@pytest.mark.parametrize("datatype", ["BF16", "INT8"])
def test_a_maximum_of_negative_numbers_is_found_in_each_datatype_of_numbers(datatype: str) -> None:
    """BF16 is stored as integers, whose highest bit is the sign."""

    def model(x: Array) -> Array:
        numbers = x.view(ml_dtypes.bfloat16).astype(float) if datatype == "BF16" else x
        return np.where((numbers.max(1, keepdims=True) > 0) | (x != 0).all(1, keepdims=True), x, 0)

    assert "of a row of length" in reason(model, (64,), datatype)


def test_padding_that_the_input_of_a_length_hides_is_found() -> None:
    """Random lengths are 0 or 1, so that only the first position counts."""

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        x, length = inputs["x"], inputs["length"]
        counts = np.arange(x.shape[1]) < length[:, np.newaxis]
        return {"y": (x + (np.roll(x, -1, axis=1) == 0)) * (counts & (length[:, np.newaxis] > 1))}

    numbers, length = spec("x", "FP32", "batch", "sequence"), spec("length", "INT64", "batch")
    made = signature(numbers, length, outputs=(spec("y", "FP32", "batch", "sequence"),))
    padding = Padding((8,), {"x": PadInput(1, 0)}, {"y": 1})
    assert "of a row of length 7 changes" in padding_dependence(made, run, padding, "sequence", 4)


def test_values_that_the_model_rejects_are_left_out() -> None:
    def model(x: Array) -> Array:
        if np.abs(x).max() > 20 or (x < 0).all():
            raise ValueError("not in its domain")
        return x

    assert reason(model, (64,)) == ""


def test_a_random_row_is_never_all_padding() -> None:
    seen: list[bool] = []

    def model(x: Array) -> Array:
        seen.extend((x != 0).any(axis=1))
        return x

    assert reason(model, (1, 2, 3, 4, 5, 6), "INT64") == ""
    assert all(seen)


# The service.


def test_an_optional_input_with_the_padded_axis_is_not_left_short(load: Load) -> None:
    """It has no pad value, so a request that gives it runs alone and unpadded."""

    def masked_sum(path: Path) -> Path:
        text = "(int64[batch, sequence] ids, int64[batch, sequence] mask) => (int64[batch] y)"
        nodes = "{ left = Mul (ids, mask) y = ReduceSum <keepdims = 0> (left, axis) }"
        return small.written(path, text + nodes, axis=np.array([1]), mask=np.ones((1, 1), np.int64))

    model = load(masked_sum, pad_lengths=LENGTHS, pad_values=(("ids", "7"),), batching="trust")
    assert model.padding is not None
    registry = ModelRegistry()
    registry.mark_ready(model)
    inputs = {"ids": np.array([[3, 4, 5]]), "mask": np.array([[1, 0, 1]])}
    response = infer(InferenceService(registry), request(inputs))
    assert np.frombuffer(response.raw_output_contents[0], np.int64).tolist() == [8]


def test_inputs_of_different_lengths_in_one_request_are_an_error_despite_padding(load: Load) -> None:
    """Padding would give them the same length and hide the error."""
    registry = ModelRegistry()
    registry.mark_ready(load(small.masked_mean, **MASKED))
    message = request({"ids": np.ones((1, 3), np.int64), "mask": np.ones((1, 2), np.int64)})
    with pytest.raises(InvalidRequestError):
        infer(InferenceService(registry), message)
