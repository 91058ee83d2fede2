"""What a function's calls at load show: that it writes to its inputs, that its rows affect each other, or nothing."""

from __future__ import annotations

import ctypes
import logging
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorferry.batcher import Outcome, Request
from tensorferry.batcher.execution.collate import request_of
from tensorferry.server.errors import StartError, StepFailedError
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.python.models.load_check import check_at_load
from tensorferry.server.python.models.loading import signature_of_function
from tensorferry.serving import BYTES, FP32, INT64, STRING, FunctionModel, InvalidInput, model

LoadFunction = Callable[..., Model]

X, Y = {"x": FP32[-1, 2]}, {"y": FP32[-1, 2]}


def declared(function: Callable[..., Any], **arguments: Any) -> FunctionModel:
    return model(**{"inputs": X, "outputs": Y, "name": "f", **arguments})(function)


class Recorded:
    """A function that keeps the number of rows of each call."""

    def __init__(self, function: Callable[[Any], Any] = lambda x: x) -> None:
        self._function = function
        self.rows: list[int] = []

    def __call__(self, x: Any) -> Any:
        self.rows.append(len(x))
        return self._function(x)


# Writes.


def divide(x: Any) -> Any:
    x /= 255
    return x


def shuffle(x: Any) -> Any:
    random.shuffle(x)
    return x


def through_memory(x: Any) -> Any:
    ctypes.memset(x.ctypes.data, 0, x.nbytes)
    return x


@pytest.mark.parametrize(
    ("function", "source"), [(divide, "'x /= 255'"), (shuffle, "'random.shuffle(x)'")], ids=lambda each: ""
)
def test_a_function_that_writes_to_its_input_is_refused_with_its_line(
    load: LoadFunction, function: Callable[..., Any], source: str
) -> None:
    line = function.__code__.co_firstlineno + 1
    expected = (
        f"model 'f', trial run: test_load_check.py:{line}: {source} writes to a read-only array; inputs are read-only: copy what "
        "you change, such as x = x / 255 in place of x /= 255"
    )
    with pytest.raises(StartError, match=f"^{re.escape(expected)}$"):
        load(declared(function))


def test_code_that_ignores_that_an_input_is_read_only_is_refused(load: LoadFunction) -> None:
    with pytest.raises(
        StartError, match="trial run: the function writes to its input 'x', which is read-only; copy"
    ):
        load(declared(through_memory))


def test_a_write_in_a_later_run_is_explained_in_the_log_only(load: LoadFunction) -> None:
    served = load(declared(lambda x: divide(x) if (x == 7).any() else x))
    with pytest.raises(StepFailedError) as failed:
        served.batcher.submit_rows({"x": np.full((1, 2), 7, np.float32)}).result()
    assert str(failed.value) == "model 'f' failed on this request: the server's log has the reason"
    line = divide.__code__.co_firstlineno + 1
    assert (
        f"test_load_check.py:{line}: 'x /= 255' writes to a read-only array; inputs are"
        in failed.value.reason
    )


@pytest.mark.parametrize(("returned", "outputs"), [(np.asarray, Y), (list, {"y": FP32[-1, -1]})])
def test_no_answer_changes_when_the_function_runs_again(
    load: LoadFunction, returned: Callable[[Any], Any], outputs: Any
) -> None:
    """A response is encoded when it is sent, and a function may return the same array, or its rows, in each run."""
    buffer = np.empty((32, 2), np.float32)

    def reused(x: Any) -> Any:
        return returned(np.multiply(x, 2, out=buffer[: len(x)]))

    served = load(declared(reused, outputs=outputs))
    assert served.batching_verdict == "tested"
    outcomes: list[Outcome] = []
    for value in (1, 2):
        request: Request = request_of(
            {"x": np.full((1, 2), value, np.float32)}, outcomes.append, one_row=False
        )
        served.batcher.enqueue(request)
        served.batcher.wait_idle()
    assert [np.asarray(outcome.outputs["y"]).tolist() for outcome in outcomes] == [[[2, 2]], [[4, 4]]]


# Rows that affect each other.


def scaled_if_large(x: Any) -> Any:
    return x / 255 if x.max() > 1 else x


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),
        lambda x: np.rint(x / np.abs(x).max() * 127) * np.abs(x).max() / 127,
        lambda x: x + np.arange(len(x), dtype=np.float32)[:, None],
        scaled_if_large,
    ],
)
def test_a_request_of_a_function_whose_rows_affect_each_other_runs_alone(
    load: LoadFunction, function: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    recorded = Recorded(function)
    served = load(declared(recorded))
    assert served.batching_verdict == "refused"
    assert len(recorded.rows) <= 4
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith("model f: each request runs alone: output 'y' of a row is [")
    assert "] if it runs alone, and [" in message
    x = np.arange(64, dtype=np.float32).reshape(32, 2)
    futures = [served.batcher.submit_rows({"x": x[at : at + 2]}) for at in range(0, 32, 2)]
    for at, future in zip(range(0, 32, 2), futures, strict=True):
        np.testing.assert_allclose(future.result()["y"], function(x[at : at + 2]), rtol=1e-6)


def test_mixing_that_only_the_largest_batch_shows_is_found(load: LoadFunction) -> None:
    served = load(declared(lambda x: x * np.float32(len(x) > 4)), max_batch_size=8)
    assert served.batching_verdict == "refused"
    assert "in a batch of 8" in served.batching


@pytest.mark.parametrize(
    ("inputs", "outputs", "function"),
    [
        ({"x": FP32[-1, -1]}, {"y": FP32[-1]}, lambda x: x.sum(axis=1)),
        ({"x": STRING[-1]}, {"y": BYTES[-1]}, lambda x: [each.encode() for each in x]),
        ({"x": STRING[-1]}, {"y": INT64[-1, -1]}, lambda x: [np.arange(len(each)) for each in x]),
    ],
)
def test_independent_rows_share_batches(
    load: LoadFunction, inputs: Any, outputs: Any, function: Callable[[Any], Any]
) -> None:
    recorded = Recorded(function)
    served = load(declared(recorded, inputs=inputs, outputs=outputs), max_batch_size=8)
    assert served.batching_verdict == "tested"
    assert recorded.rows == [1, 1, 2, 8]


def test_rows_of_strings_that_affect_each_other_are_found(load: LoadFunction) -> None:
    def padded(x: Any) -> Any:
        return [each.rjust(max(map(len, x))) for each in x]

    served = load(declared(padded, inputs={"x": STRING[-1]}, outputs={"y": STRING[-1]}))
    assert served.batching_verdict == "refused"
    assert "is ['1'] if it runs alone, and ['   1'] in a batch of 2" in served.batching


def test_a_function_of_one_row_only_gets_each_request_alone(load: LoadFunction) -> None:
    def single(x: Any) -> Any:
        if len(x) > 1:
            raise ValueError("one row, please")
        return x

    served = load(declared(single))
    assert "it runs one row, but not two together: ValueError: one row, please" in served.batching


@pytest.mark.parametrize("state", [False, True])
def test_outputs_that_differ_from_run_to_run_cannot_be_compared(load: LoadFunction, state: bool) -> None:
    generator = np.random.default_rng(0)
    calls = Recorded()

    def noisy(x: Any) -> Any:
        calls(x)
        return x + np.float32(len(calls.rows) if state else generator.standard_normal())

    served = load(declared(noisy))
    assert served.batching_verdict == "refused"
    assert "the same row gives different outputs from run to run" in served.batching
    assert calls.rows == [1, 1, 2, 1]


@pytest.mark.parametrize(("policy", "verdict"), [("proved", "refused"), ("trust", "trusted")])
def test_the_batching_option_holds_for_functions(load: LoadFunction, policy: str, verdict: str) -> None:
    assert load(declared(lambda x: x), batching="proved").batching_verdict == "refused"
    assert load(declared(lambda x: x - x.mean(0)), batching=policy).batching_verdict == verdict


# What is run.


def test_a_function_is_never_called_more_than_four_times(load: LoadFunction) -> None:
    def picky(x: Any) -> Any:
        if x.shape[1] < 8:
            raise InvalidInput("too short")
        if (x > 100).any():
            raise InvalidInput("too large")
        return x

    recorded = Recorded(picky)
    types = {"inputs": {"x": FP32[-1, -1]}, "outputs": {"y": FP32[-1, -1]}}
    load(declared(recorded, **types))
    assert len(recorded.rows) == 4
    recorded = Recorded(lambda x: 1 / 0)
    load(declared(recorded, **types))
    assert len(recorded.rows) <= 4


@pytest.mark.parametrize(("row_seconds", "sizes"), [(0.01, [1, 1, 2, 64]), (0.1, [1, 1, 2])])
def test_the_largest_batch_runs_if_it_takes_at_most_a_second(row_seconds: float, sizes: list[int]) -> None:
    now = 0.0

    def slow(x: Any) -> Any:
        nonlocal now
        now += row_seconds * len(x)
        return {"y": x}

    recorded = Recorded(slow)
    each = declared(recorded)
    found = check_at_load(
        each, signature_of_function(each), lambda inputs, rows: recorded(inputs["x"]), 64, clock=lambda: now
    )
    assert found.compared
    assert recorded.rows == sizes
    assert found.seconds == pytest.approx({rows: rows * row_seconds for rows in sizes})


def test_a_function_that_must_not_be_called_is_not_called(
    load: LoadFunction, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = Recorded()
    with caplog.at_level(logging.INFO):
        served = load(declared(recorded, check=False))
    assert not recorded.rows
    assert served.batching_verdict == "trusted"
    assert (
        "model f is not called at load (check=False): its rows were not compared, so it is batched as declared, and its outputs "
        "are checked when it answers requests"
    ) in caplog.text


def test_rows_of_the_example_are_compared(load: LoadFunction) -> None:
    seen: list[Any] = []

    def kept(x: Any) -> Any:
        seen.append(x[:, 0].tolist())
        return x

    assert load(declared(kept, example={"x": [[5, 5], [5, 5], [9, 9]]})).batching_verdict == "tested"
    assert seen[:3] == [[5], [9], [9, 5]]
    # Another row is made of a single one.
    centred = declared(lambda x: x - x.mean(0), example={"x": [[5, 5]]})
    assert load(centred).batching_verdict == "refused"


def test_an_example_of_one_row_of_bytes_is_not_compared(
    load: LoadFunction, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = declared(
        lambda x: [len(each) for each in x],
        inputs={"x": BYTES[-1]},
        outputs={"y": INT64[-1]},
        example={"x": [b"a picture"]},
    )
    assert load(sizes).batching_verdict == "trusted"
    assert "model f has an example of equal rows: its rows were not compared" in caplog.text
    assert "give @model(example=...) with two different rows" in caplog.text
