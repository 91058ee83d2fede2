"""Inputs of different lengths share a batch, and each request gets the answer that it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from batcher.conftest import Make
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import Recorder, dirty, enqueue, ignore, new_request, reproducible, result

from tensorferry.batcher import (
    Batcher,
    InvalidRequest,
    ModelOutputError,
    Padding,
    PadInput,
    RequestTooLarge,
)
from tensorferry.batcher.execution.collate import join, split
from tensorferry.batcher.testing import ScriptedRunner

Array = npt.NDArray[Any]

BARE = Padding((4, 8), PadInput(1, 0.0), outputs=1)
TEXT = Padding((4, 8), {"ids": PadInput(1, 9), "mask": PadInput(1, False)}, outputs={"tokens": 2})


def encoder(batch: dict[str, Array]) -> dict[str, Any]:
    """tokens [rows, 2, length], their sum over the mask [rows], and the row's own bias [rows]."""
    tokens = np.stack([batch["ids"] * 2, batch["ids"] + 1], axis=1)
    return {
        "tokens": tokens,
        "sum": (tokens * batch["mask"][:, None]).sum(axis=(1, 2)),
        "bias": batch["bias"].tolist(),
    }


def text(rows: int, length: int, tag: int = 0) -> dict[str, Array]:
    ids = np.arange(rows * length).reshape(rows, length) + 100 * tag
    return {"ids": ids, "mask": ids % 3 > 0, "bias": np.arange(rows) + tag}


def same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name])


def test_inputs_are_padded_each_with_its_value_and_the_others_left(make: Make) -> None:
    runner = ScriptedRunner(encoder)
    batcher = make(runner, padding=TEXT)
    sent = text(2, 3)
    same(result(batcher.submit_rows(sent)), encoder(sent))
    (batch,) = runner.batches
    assert batch["ids"].tolist() == [[0, 1, 2, 9], [3, 4, 5, 9]]
    assert batch["mask"].tolist() == [[False, True, True, False]] * 2
    assert batch["bias"].tolist() == [0, 1]
    assert not batch["ids"].flags.writeable


@reproducible
@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 11)), min_size=1, max_size=12),
    most=st.integers(1, 6),
    steps=st.sampled_from([1, 4]),
)
def test_each_request_gets_exactly_its_answer_alone(
    sizes: list[tuple[int, int]], most: int, steps: int
) -> None:
    """For any mix of rows and lengths, also split requests and lengths beyond the last padded length."""
    runner = ScriptedRunner(encoder, gated=True)
    sent = [text(rows, length, tag) for tag, (rows, length) in enumerate(sizes)]
    with Batcher(runner, most, padding=replace(TEXT, steps=steps)) as batcher:
        futures = [batcher.submit_rows(x) for x in sent]
        runner.open()
        for future, x in zip(futures, sent, strict=True):
            same(result(future), encoder(x))
        statistics = batcher.statistics()
    padded = [(rows, length) for rows, length in sizes if 1 <= length <= 8]
    assert statistics.positions == sum(rows * length for rows, length in padded)
    most_padding = sum(rows * ((4 if length <= 4 else 8) - length) for rows, length in padded)
    assert statistics.padding_positions <= most_padding
    if steps == 1:
        assert statistics.padding_positions == most_padding


ARRAYS: dict[str, tuple[Array, Any]] = {
    "bool": (np.array([[True, False, True]]), True),
    "uint8": (np.arange(6, dtype=np.uint8).reshape(2, 3), 255),
    "negative infinity": (np.arange(6, dtype=np.float32).reshape(2, 3), -np.inf),
    "not a number": (np.arange(6, dtype=np.float32).reshape(2, 3), np.nan),
    "bfloat16": (np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16), -2.0),
    "datetime": (np.array([["2024-02-29", "NaT"]], dtype="datetime64[s]"), np.datetime64("NaT", "s")),
    "strings": (np.array([["a", "bcd", "ü"], ["", "x", "y"]]), "[PAD]"),
    "bytes": (np.array([[b"a", b"b\x00c"]], dtype=object), b""),
    "objects": (np.array([[{"a": 1}, None]], dtype=object), None),
    "fortran order": (np.asfortranarray(np.arange(6).reshape(2, 3)), 1),
    "backwards": (np.arange(6).reshape(2, 3)[::-1, ::-1], 1),
    "no rows": (np.zeros((0, 3), np.float32), 1),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_every_dtype(name: str) -> None:
    array, value = ARRAYS[name]
    padding = Padding((2, 8), PadInput(1, value), outputs=1)
    arrays = [array, array[:, :2], np.concatenate([array, array], axis=1).astype(array.dtype), array[:1]]
    arrays = [each for each in arrays if each.shape[1] > 2]
    requests = [new_request(each, ignore, padding=padding) for each in arrays]
    joined = join(requests)
    expected = np.full((sum(map(len, arrays)), 8), value, array.dtype if array.dtype.kind != "U" else object)
    assert (joined.dtype, joined.shape) == (expected.dtype, expected.shape)
    at = 0
    for each in arrays:
        expected[at : at + len(each), : each.shape[1]] = each
        at += len(each)
    np.testing.assert_array_equal(joined, expected)
    for part, each in zip(split(joined, requests), arrays, strict=True):
        np.testing.assert_array_equal(part, each)


@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_every_axis(axis: int, other: int) -> None:
    def shape(rows: int, length: int) -> tuple[int, ...]:
        return (rows, *(length if at == axis else other for at in (1, 2, 3)))

    padding = Padding((4,), PadInput(axis, -1), outputs=axis)
    arrays = [np.random.default_rng(1).integers(0, 9, shape(rows, n)) for rows, n in ((1, 3), (2, 1), (3, 4))]
    requests = [new_request(each, ignore, padding=padding) for each in arrays]
    joined = join(requests)
    assert joined.shape == shape(6, 4)
    for part, each in zip(split(joined, requests), arrays, strict=True):
        np.testing.assert_array_equal(part, each)
    assert (joined == -1).sum() == joined.size - sum(each.size for each in arrays)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize(
    ("lengths", "expected"), [((9, 5), 9), ((9, 8), 9), ((5, 6), 6), ((10, 10), 10), ((5, 5), 6)]
)
def test_a_batch_is_padded_to_the_step_that_holds_its_longest_row(
    lengths: tuple[int, ...], expected: int, placed: bool
) -> None:
    """The steps up to 10 are 3, 6, 9 and 10."""
    padding = Padding((4, 10), {"x": PadInput(2, -1)}, outputs={"y": 2}, steps=4)
    sent = [{"x": np.full((1, 2, length), length)} for length in lengths]
    requests = [new_request(each, ignore, padding=padding) for each in sent]
    joined = join(requests, dirty if placed else None)["x"]
    assert joined.shape == (2, 2, expected)
    assert (joined == -1).sum() == 2 * sum(expected - length for length in lengths)
    for part, each in zip(split({"y": joined}, requests), sent, strict=True):
        np.testing.assert_array_equal(part["y"], each["x"])


def test_only_declared_outputs_are_cut_whatever_their_size(make: Make) -> None:
    batcher = make(
        lambda x: {"cut": x, "whole": x.copy(), "entries": x.tolist()},
        padding=Padding((4,), PadInput(1, 0.0), outputs={"cut": 1, "entries": 1}),
    )
    with pytest.raises(InvalidRequest, match="declared for a bare array"):
        batcher.submit({"x": np.ones(3)})
    answer = result(batcher.submit(np.ones(3)))
    assert (answer["cut"].shape, answer["whole"].shape, len(answer["entries"])) == ((3,), (4,), 3)


@pytest.mark.parametrize("kind", [list, tuple])
def test_entries_of_lists_are_cut(make: Make, kind: Callable[[Any], Any]) -> None:
    batcher = make(lambda x: kind(kind(row) for row in x), padding=BARE)
    assert len(result(batcher.submit(np.ones(3)))) == 3


@pytest.mark.parametrize(
    ("model_fn", "message"),
    [
        (
            lambda x: x[:, :3],
            "the model function's result is declared to carry the padded length, 4 in this batch",
        ),
        (lambda x: x.sum(axis=1), "but the axis is missing"),
        (lambda x: x.sum(axis=1).tolist(), "but the axis is missing"),
        (lambda x: x[:, :3].tolist(), "but the axis has size 3"),
        (lambda x: {"y": x}, r"padding declares one bare output, but the model function returned \['y'\]"),
    ],
)
def test_an_output_without_the_padded_length_is_an_error(
    make: Make, model_fn: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ModelOutputError, match=message):
        result(make(model_fn, padding=BARE).submit(np.ones(2)))


@pytest.mark.parametrize("model_fn", [lambda x: {"other": x["ids"]}, lambda x: x["ids"]])
def test_a_declared_output_that_is_missing_is_an_error(make: Make, model_fn: Callable[[Any], Any]) -> None:
    with pytest.raises(ModelOutputError, match=r"padding declares outputs \['tokens'\], but the model"):
        result(make(model_fn, padding=TEXT).submit_rows(text(1, 3)))


def test_inputs_that_differ_in_length_are_left_to_the_model(make: Make) -> None:
    runner = ScriptedRunner(lambda x: {"tokens": np.zeros((1, 1, 1))})
    sent = {"ids": np.ones((1, 3)), "mask": np.ones((1, 2), bool)}
    result(make(runner, padding=TEXT).submit_rows(sent))
    assert [array.shape for array in runner.batches[0].values()] == [(1, 3), (1, 2)]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"ids": np.ones((1, 3))}, r"input 'mask' is declared as padded, but the request has \['ids'\]"),
        (np.ones((1, 3)), "the input is one bare array, but the padding of the inputs is declared by name"),
        (
            {"ids": np.ones((1, 3)), "mask": np.ones(1, bool)},
            r"input 'mask' has shape \[1\] with its rows, but its axis 1 is padded",
        ),
        (
            {"ids": np.ones((1, 3), bool), "mask": np.ones((1, 3), bool)},
            "input 'ids' is of dtype bool, which cannot hold its pad value 9",
        ),
    ],
)
def test_requests_that_do_not_fit_the_padding(make: Make, sent: Any, message: str) -> None:
    batcher = make(encoder, padding=TEXT)
    with pytest.raises(InvalidRequest, match=message):
        batcher.submit_rows(sent)
    assert batcher.statistics().accepted == 0


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("u1", 256),
        ("u1", -1),
        ("i8", 0.5),
        ("i8", np.nan),
        ("i8", "0"),
        ("f2", 1e6),
        ("f4", "x"),
        ("f4", [0, 0]),
    ],
)
def test_pad_values_that_the_dtype_lacks(make: Make, dtype: str, value: Any) -> None:
    batcher = make(lambda x: x, padding=Padding((4,), PadInput(1, value)))
    with pytest.raises(InvalidRequest, match="which cannot hold its pad value"):
        batcher.submit(np.ones(3, dtype))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), PadInput(1, 0)), r"lengths are \(\); they must ascend, from at least 1"),
        (((0, 4), PadInput(1, 0)), r"lengths are \(0, 4\)"),
        (((8, 4), PadInput(1, 0)), r"lengths are \(8, 4\)"),
        (((4,), {}), "inputs are empty"),
        (((4,), PadInput(1, 0), None, 0), "steps are 0"),
        (((4,), PadInput(0, 0)), "an axis is 0; it must be at least 1, since axis 0 counts the rows"),
        (((4,), {"x": PadInput(-1, 0)}), "an axis is -1"),
        (((4,), PadInput(1, 0), {"y": 0}), "an axis is 0"),
    ],
)
def test_declarations_that_make_no_sense(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Padding(*arguments)


def test_admission_counts_the_padded_bytes(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner, padding=BARE, max_queue_bytes=8 * 8)
    batcher.submit(np.ones(5))
    assert batcher.statistics().sizes.held_bytes == 8 * 8
    roomy = make(runner, padding=BARE, max_queue_bytes=8 * 7)
    with pytest.raises(RequestTooLarge, match="the request has 64 bytes"):
        roomy.submit(np.ones(5))
    # A split request is also counted once.
    wide = make(runner, 2, padding=BARE)
    wide.submit_rows(np.ones((6, 5)))
    assert wide.statistics().sizes.held_bytes == 6 * 8 * 8


def test_an_outcome_and_the_statistics_report_the_padding(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner, padding=BARE)
    recorders: list[Recorder] = [enqueue_padded(batcher, np.ones((1, 8)))]
    runner.await_batches(1)
    recorders += [enqueue_padded(batcher, np.ones((rows, n))) for rows, n in ((2, 5), (1, 6))]
    recorders.append(enqueue(batcher, np.ones((1, 9)))[1])
    runner.open()
    assert batcher.drain()
    lengths = [each.only.batch.padded_length for each in recorders if each.only.batch is not None]
    assert lengths == [8, 8, 8, None]
    statistics = batcher.statistics()
    assert (statistics.positions, statistics.padding_positions) == (24, 8)
    assert statistics.padding_waste == 0.25
    assert make(runner).statistics().padding_waste == 0


def enqueue_padded(batcher: Batcher, x: Array) -> Recorder:
    return enqueue(batcher, x, padding=BARE)[1]
