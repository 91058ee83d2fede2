"""Joined calls of threads and futures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from client.coalescing.rigs import BAD, PATIENT, Script, expected, inputs
from client.scripted import ScriptedServer
from polling import until

from tensorferry import client as tf
from tensorferry.client import Coalesce, InferenceClient, InferenceResult, Retry
from tensorferry.client.coalescing.calls import WaitingCall
from tensorferry.client.coalescing.forms import Form, Forms
from tensorferry.client.coalescing.gathering import Group
from tensorferry.client.coalescing.threads import CoalescedInfer
from tensorferry.client.messages import codec
from tensorferry.protos import inference_pb2 as pb

OK = grpc.StatusCode.OK
Answer = Future[InferenceResult]


class Caller:
    """Calls of one client, each by `infer` on a thread of its own or by `submit`."""

    def __init__(self, client: InferenceClient, how: str) -> None:
        self.client = client
        self._how = how
        self._threads = ThreadPoolExecutor(16)

    def call(self, number: float, rows: int = 1, **options: Any) -> Answer:
        if self._how == "submit":
            return self.client.submit("m", inputs(number, rows), **options)
        return self._threads.submit(partial(self.client.infer, "m", inputs(number, rows), **options))

    def gathered(self) -> int:
        """Return how many calls wait for a message."""
        (coalesced,) = self.client._coalesced
        states = list(coalesced._gathering._states.values())
        return sum(len(state.group.calls) for state in states if state.group is not None)

    def gather(self, numbers: Iterator[float] | list[float] | range, **options: Any) -> list[Answer]:
        """Make calls one after the other, and wait until all are gathered."""
        before = self.gathered()
        answers = []
        for count, number in enumerate(numbers, 1):
            answers.append(self.call(number, **options))
            until(self.gathered, (before + count).__eq__)
        return answers

    def close(self) -> None:
        self.client.close()
        self._threads.shutdown()


@pytest.fixture(params=["infer", "submit"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def caller(server: ScriptedServer, how: str) -> Iterator[Caller]:
    caller = Caller(InferenceClient(server.target, coalesce=PATIENT), how)
    yield caller
    caller.close()


@pytest.fixture
def script(server: ScriptedServer) -> Iterator[Script]:
    script = Script()
    script.serve(server)
    yield script
    script.release.set()


def held(caller: Caller, script: Script, number: float = 0, **options: Any) -> Answer:
    """Make the call whose message is held by the server."""
    first = caller.call(number, **options)
    assert script.begun.acquire(timeout=30)
    return first


def assert_answers(answers: list[Answer], numbers: Any) -> None:
    for answer, number in zip(answers, numbers, strict=True):
        np.testing.assert_array_equal(answer.result(30)["x"], expected(number))


def test_calls_that_wait_anyway_travel_together(caller: Caller, script: Script) -> None:
    first = held(caller, script)
    answers = caller.gather(range(1, 6))
    script.release.set()
    assert_answers([first, *answers], range(6))
    assert script.messages == [[0], [1, 2, 3, 4, 5]]


def test_calls_of_several_rows(caller: Caller, script: Script) -> None:
    held(caller, script)
    answers = [*caller.gather([1], rows=2), *caller.gather([2], rows=1), *caller.gather([3], rows=3)]
    script.release.set()
    for answer, number, rows in zip(answers, (1, 2, 3), (2, 1, 3), strict=True):
        np.testing.assert_array_equal(answer.result(30)["x"], expected(number, rows))
    assert script.messages[1:] == [[1, 1, 2, 3, 3, 3]]


def test_a_full_message_does_not_wait(caller: Caller, script: Script) -> None:
    held(caller, script)
    answers = caller.gather(range(1, 8))
    answers.append(caller.call(8))
    assert_answers(answers, range(1, 9))
    assert not script.release.is_set()
    assert script.messages == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]


def test_a_call_waits_no_longer_than_the_longest_wait(
    server: ScriptedServer, script: Script, how: str
) -> None:
    caller = Caller(InferenceClient(server.target, coalesce=Coalesce(max_wait=0.001)), how)
    first = held(caller, script)
    assert_answers([caller.call(1)], [1])
    assert not first.done()
    script.release.set()
    assert_answers([first], [0])
    caller.close()


def test_calls_that_cannot_be_joined_do_not_wait(caller: Caller, script: Script) -> None:
    held(caller, script)
    own_id = caller.call(1, request_id="mine")
    assert own_id.result(30).id == "mine"
    assert caller.call(2, parameters={"explain": True}).result(30).parameters["explain"] is True
    assert_answers([caller.call(3, version="2")], [3])
    assert not script.release.is_set()


def test_a_bad_row_fails_only_its_call(caller: Caller, script: Script) -> None:
    held(caller, script)
    answers = caller.gather([1, 2, BAD, 3])
    script.release.set()
    with pytest.raises(tf.InvalidArgument, match="a bad row"):
        answers.pop(2).result(30)
    assert_answers(answers, [1, 2, 3])
    assert script.messages[1] == [1, 2, BAD, 3]
    assert sorted(script.messages[2:]) == [[1], [2], [3], [BAD]]


def test_an_answer_without_the_rows_of_its_calls_is_not_used(caller: Caller, script: Script) -> None:
    script.one_row = True
    held(caller, script)
    answers = caller.gather([1, 2])
    script.release.set()
    assert_answers(answers, [1, 2])
    assert sorted(script.messages[1:]) == [[1], [1, 2], [2]]


@pytest.mark.parametrize(
    ("status", "trailers"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, (("grpc-retry-pushback-ms", "10"),)),
        (grpc.StatusCode.UNAVAILABLE, (("grpc-retry-pushback-ms", "10"),)),
    ],
)
def test_refused_messages_are_retried(
    caller: Caller, script: Script, status: grpc.StatusCode, trailers: tuple[tuple[str, str], ...]
) -> None:
    script.statuses, script.trailers = [status], trailers
    held(caller, script)
    answers = caller.gather([1, 2])
    script.release.set()
    assert_answers(answers, [1, 2])
    assert caller.client._retries._left < 99


def test_messages_that_are_too_large_are_divided(caller: Caller, script: Script) -> None:
    script.statuses = [grpc.StatusCode.RESOURCE_EXHAUSTED]
    held(caller, script)
    answers = caller.gather([1, 2])
    script.release.set()
    assert_answers(answers, [1, 2])
    assert caller.client._retries._left == 100


@pytest.mark.parametrize("status", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED])
def test_errors_of_all_rows_are_those_of_each_call(
    server: ScriptedServer, script: Script, how: str, status: grpc.StatusCode
) -> None:
    caller = Caller(InferenceClient(server.target, coalesce=PATIENT, retry=Retry()), how)
    script.statuses = [status]
    held(caller, script)
    answers = caller.gather([1, 2])
    script.release.set()
    errors = [answer.exception(30) for answer in answers]
    assert all(isinstance(error, tf.InferenceError) and error.code is status for error in errors)
    assert errors[0] is not errors[1]
    assert len(script.messages) == 2
    caller.close()


def test_closing_ends_calls_that_wait(caller: Caller, script: Script) -> None:
    first = held(caller, script)
    answers = caller.gather([1, 2])
    caller.client.close()
    for answer in (first, *answers):
        assert isinstance(answer.exception(30), tf.Cancelled)
    assert script.messages == [[0]]
    with pytest.raises(tf.ClientClosed):
        caller.client.infer("m", inputs(1))


# Cancelling


@pytest.fixture
def submitter(server: ScriptedServer) -> Iterator[Caller]:
    caller = Caller(InferenceClient(server.target, coalesce=PATIENT), "submit")
    yield caller
    caller.close()


def test_a_cancelled_call_is_not_sent(submitter: Caller, script: Script) -> None:
    held(submitter, script)
    answers = submitter.gather([1, 2, 3])
    assert answers[1].cancel()
    script.release.set()
    assert_answers([answers[0], answers[2]], [1, 3])
    with pytest.raises(CancelledError):
        answers[1].result()
    assert script.messages[1:] == [[1, 3]]


def test_a_message_is_cancelled_with_its_last_call(submitter: Caller, script: Script) -> None:
    script.held = 2
    first = held(submitter, script)
    answers = submitter.gather(range(1, 8))
    answers.append(submitter.call(8))
    assert script.begun.acquire(timeout=30)
    for answer in answers[:-1]:
        assert answer.cancel()
    assert not script.left.acquire(blocking=False)
    assert answers[-1].cancel()
    assert script.left.acquire(timeout=30)
    script.release.set()
    assert_answers([first], [0])


def test_a_call_in_flight_can_be_cancelled_beside_others(submitter: Caller, script: Script) -> None:
    script.held = 2
    held(submitter, script)
    answers = submitter.gather(range(1, 8))
    answers.append(submitter.call(8))
    assert script.begun.acquire(timeout=30)
    assert answers[0].cancel()
    script.release.set()
    assert_answers(answers[1:], range(2, 9))
    assert answers[0].cancelled()


# With a scripted method, and a clock


class Method:
    """Method of a stub: answers each request with its inputs, or does what `script` says."""

    def __init__(self) -> None:
        self.made: list[tuple[list[float], float | None]] = []
        self.script: list[Any] = []

    def __call__(self, request: pb.ModelInferRequest, timeout: float | None, **options: Any) -> Any:
        rows = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(-1, 2)
        self.made.append((rows[:, 0].tolist(), timeout))
        step = self.script.pop(0) if self.script else None
        if callable(step):
            step()
        elif step is not None:
            raise step
        answer = pb.ModelInferResponse(model_name="m", raw_output_contents=request.raw_input_contents)
        answer.outputs.add(name="x", datatype="FP32", shape=request.inputs[0].shape)
        return answer


class Failure(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "scripted"

    def trailing_metadata(self) -> Any:
        return ()


class AllAlike(Forms):
    """Forms under which all calls may be joined."""

    def form(self, request: Any, timeout: float | None, options: Any) -> Form | None:
        return Form("m", 1, 8, 8)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """Coalesced calls of threads. The first runs `within` while its message is in flight."""

    def __init__(self) -> None:
        self.method, self.clock = Method(), Clock()
        forms = AllAlike(PATIENT, lambda model, version: None, ())
        self.infer = CoalescedInfer(self.method, forms, PATIENT, self.clock)

    def request(self, number: float) -> pb.ModelInferRequest:
        return codec.encode("m", "", codec.request_of(inputs(number), None, None, None), None)

    def outcomes(self, timeouts: list[float | None], script: list[Any]) -> list[Any]:
        """Return the code of the outcome of each call; they gather while a first message is in flight."""
        codes: list[Any] = [None] * len(timeouts)

        def call(number: int) -> None:
            try:
                self.infer(self.request(number), timeout=timeouts[number])
                codes[number] = OK
            except grpc.RpcError as error:
                codes[number] = error.code()
            except BaseException as error:
                codes[number] = type(error)

        with ThreadPoolExecutor(8) as threads:

            def begin() -> None:
                for number in range(len(timeouts)):
                    threads.submit(call, number)
                    until(self.gathered, (number + 1).__eq__)

            self.method.script = [begin, *script]
            self.infer(self.request(-1))
        return codes

    def gathered(self) -> int:
        states = list(self.infer._gathering._states.values())
        return sum(len(state.group.calls) for state in states if state.group is not None)

    def later(self, seconds: float, error: Exception) -> Any:
        def step() -> None:
            self.clock.now += seconds
            raise error

        return step


def test_the_deadline_of_a_message_is_the_latest_of_its_calls() -> None:
    rig = Rig()
    assert rig.outcomes([5.0, 7.0, 6.0], []) == [OK, OK, OK]
    assert rig.method.made[1:] == [([0, 1, 2], 7.0)]


def test_calls_without_time_left_end_with_their_message() -> None:
    rig = Rig()
    late = rig.later(5.0, Failure(grpc.StatusCode.DEADLINE_EXCEEDED))
    assert rig.outcomes([5.0, 7.0, 5.0], [late]) == [
        grpc.StatusCode.DEADLINE_EXCEEDED,
        OK,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ]
    assert rig.method.made[1:] == [([0, 1, 2], 7.0), ([1], 2.0)]


def test_a_call_whose_deadline_passed_is_not_sent() -> None:
    rig = Rig()
    original = rig.infer._ended

    def ended(*arguments: Any, **options: Any) -> None:
        rig.clock.now = 6.0
        original(*arguments, **options)

    rig.infer._ended = ended  # type: ignore[method-assign]
    codes = rig.outcomes([7.0, 5.0, 7.0], [])
    assert codes == [OK, grpc.StatusCode.DEADLINE_EXCEEDED, OK]
    assert rig.method.made[1:] == [([0, 2], 1.0)]


def test_an_interrupted_thread_does_not_take_others_with_it() -> None:
    rig = Rig()
    assert rig.outcomes([None, None, None], [KeyboardInterrupt()]) == [KeyboardInterrupt, OK, OK]
    assert sorted(rig.method.made[2:]) == [([1], None), ([2], None)]


@pytest.mark.parametrize("method", ["wait", "sending"])
def test_a_thread_that_is_interrupted_before_it_sends_leaves_its_message_to_another(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    real = getattr(WaitingCall, method)
    interrupted: list[WaitingCall] = []

    def interrupting(call: WaitingCall, *arguments: Any) -> Any:
        event = call._to_send if method == "sending" else real(call, *arguments)
        if isinstance(event, Group) and len(event.calls) > 1 and not interrupted:
            interrupted.append(call)
            raise KeyboardInterrupt
        return event if method == "wait" else real(call)

    monkeypatch.setattr(WaitingCall, method, interrupting)
    assert rig.outcomes([None, None, None], []) == [KeyboardInterrupt, OK, OK]
    assert len(interrupted) == 1


def test_an_unexpected_exception_reaches_only_its_thread() -> None:
    """Such as ValueError from a channel that was closed in between."""
    rig = Rig()
    assert rig.outcomes([None, None], [ValueError("closed")]) == [ValueError, OK]


def test_after_a_fork_calls_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    seen = []

    def inner() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            rig.infer(rig.request(2))
        seen.append(rig.gathered())

    rig.method.script = [inner]
    rig.infer(rig.request(1))
    assert seen == [0]
    assert [rows for rows, _ in rig.method.made] == [[1], [2]]
