"""Calls of other models from a function in a child process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from polling import PATIENCE
from server.processes.functions.conftest import Start

from tensorferry.batcher import QueueFull
from tensorferry.server.processes.functions.errors import FunctionRaised, ProcessDied
from tensorferry.server.processes.functions.worker_process import WorkerProcess
from tensorferry.serving import InvalidInput, calls_through

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]
# Calls of the function `many`.
_AT_ONCE = 40


class Caller:
    """A `ModelCaller` that answers on other threads."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._threads = ThreadPoolExecutor(_AT_ONCE)
        self.calls: list[tuple[Any, ...]] = []

    def submit(
        self, model: str, version: str, inputs: Mapping[str, Any], timeout: float | None
    ) -> Future[dict[str, Any]]:
        self.calls.append((model, version, timeout))
        return self._threads.submit(self._answer, inputs)


def run(process: WorkerProcess, caller: Any) -> Any:
    with calls_through(caller):
        return process.run({"x": np.arange(3.0)})


def test_many_large_calls_wait_for_answers_at_the_same_time(started: Start) -> None:
    answered = threading.Barrier(_AT_ONCE)

    def answer(inputs: Mapping[str, Any]) -> dict[str, Any]:
        # None is answered before the last one was sent.
        answered.wait(PATIENCE)
        return {"y": inputs["x"] * 2}

    assert run(started("many"), Caller(answer)).tolist() == [2 * number for number in range(_AT_ONCE)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidInput("too long"), ["tensorferry.serving.errors", "InvalidInput", "too long", []]),
        (QueueFull("full", 0.5), ["tensorferry.batcher.errors", "QueueFull", "full", [("retry_after", 0.5), ("pause_seconds", 0.0)]]),
        (UnicodeDecodeError("utf-8", b"a", 0, 1, "bad"), ["builtins", "RuntimeError"]),
        (type("Own", (ValueError,), {})("text"), ["builtins", "ValueError", "Own: text", []]),
    ],
)  # fmt: skip
def test_an_error_of_a_call_is_raised_in_the_child(
    started: Start, error: Exception, expected: list[Any]
) -> None:
    def fail(inputs: Mapping[str, Any]) -> dict[str, Any]:
        raise error

    assert run(started("caught"), Caller(fail))[: len(expected)] == expected


def test_without_a_caller_a_call_says_so(started: Start) -> None:
    with pytest.raises(FunctionRaised, match="was called outside of a model's function"):
        started("nested").run({"x": np.ones(1)})


def test_a_call_without_an_answer_is_cancelled_at_the_end_of_the_run(started: Start) -> None:
    class Silent:
        def __init__(self) -> None:
            self.futures: list[Future[Any]] = []

        def submit(self, *call: Any) -> Future[Any]:
            self.futures.append(Future())
            return self.futures[-1]

    caller = Silent()
    process = started("abandoned")
    # The process is in step with the server after it.
    assert [run(process, caller).tolist() for _ in range(2)] == [[0, 1, 2]] * 2
    assert [future.cancelled() for future in caller.futures] == [True, True]


def test_a_call_by_mistake_fails_alone(started: Start) -> None:
    """The process is in step with the server after it, and the server needs none of the user's classes."""
    caller = Caller(lambda inputs: {"y": inputs["x"] + 1})
    process = started("mistaken")
    for _ in range(2):
        found = run(process, caller)
        assert found.pop("right").tolist() == [1, 2, 3]
        assert {what: raised.partition(":")[0] for what, raised in found.items()} == {
            "a function as name": "TypeError",
            "a number as version": "TypeError",
            "a text as timeout": "TypeError",
            "nan as timeout": "ValueError",
            "an array for the inputs": "TypeError",
            "a number as input name": "TypeError",
            "a function as input": "InvalidInput",
            "functions as elements": "InvalidInput",
            "fields": "InvalidInput",
            "a cycle": "InvalidInput",
        }
        assert found["a function as name"] == "TypeError: the model's name is of type function; give a str"
        assert "'x' is of type builtins.function" in found["a function as input"]
    assert caller.calls == [("other", "", 5.0)] * 2


def test_an_exception_with_objects_of_the_user_is_sent_without_them(started: Start) -> None:
    process = started("unpicklable")
    for _ in range(2):
        with pytest.raises(QueueFull) as raised:
            run(process, Caller(dict))
        assert (str(raised.value), raised.value.retry_after) == ("full", 0.5)
        assert not hasattr(raised.value, "name")


def test_a_call_of_a_thread_whose_run_is_over_fails(started: Start) -> None:
    process = started("late")
    caller = Caller(lambda inputs: {"y": inputs["x"]})
    assert run(process, caller) == []
    (raised,) = run(process, caller)
    assert raised == "RuntimeError: 'other' was called after the function had returned; wait for calls in it"


def test_a_process_that_dies_during_a_call(started: Start) -> None:
    process = started("nested")

    def kill(inputs: Mapping[str, Any]) -> dict[str, Any]:
        process.end_runs()
        return {"y": inputs["x"]}

    with pytest.raises(ProcessDied):
        run(process, Caller(kill))
