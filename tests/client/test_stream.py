"""Many requests over one call: order, errors, bounds. The scenarios run on both clients."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from client.conftest import Streams
from client.scripted import (
    Answers,
    Context,
    Hang,
    Requests,
    ScriptedServer,
    ScriptedServicer,
    failed,
    rows,
    streamed,
)

from tensorferry import client as tf
from tensorferry.client import InferenceClient, InferenceError, InferenceResult, Internal, StreamRequest, aio
from tensorferry.client.inflight import InFlight


def ids(outcomes: Iterable[Any]) -> list[str]:
    return [
        f"!{outcome.request_id}" if isinstance(outcome, InferenceError) else outcome.id
        for outcome in outcomes
    ]


def backwards(requests: Requests, context: Context) -> Answers:
    """Wait for the last request, then answer from the last to the first."""
    return map(streamed, reversed(list(requests)))


def in_pairs(requests: Requests, context: Context) -> Answers:
    """Answer the requests pairwise, the second of a pair first."""
    for first in requests:
        second = next(requests)
        yield streamed(second)
        yield streamed(first)


# Order


def test_results_come_as_they_finish(server: ScriptedServer, stream: Streams) -> None:
    server.servicer.stream = backwards
    results = list(stream("row", rows(5)))
    assert ids(results) == ["r4", "r3", "r2", "r1", "r0"]
    assert [result["x"].tolist() for result in results] == [[4], [3], [2], [1], [0]]
    assert server.metadata_of("ModelStreamInfer")["tensorferry-stream-order"] == "completion"


def test_results_come_in_the_order_of_the_requests(server: ScriptedServer, stream: Streams) -> None:
    """Also if the server answers in another order."""
    server.servicer.stream = in_pairs
    assert ids(stream("row", rows(6), ordered=True, max_in_flight=2)) == [f"r{n}" for n in range(6)]
    assert "tensorferry-stream-order" not in server.metadata_of("ModelStreamInfer")
    assert list(stream("row", [])) == []


def test_requests_are_dicts_or_records(servicer: ScriptedServicer, stream: Streams) -> None:
    requests = [
        {"words": ["a"], "weights": [[1, 2]]},
        StreamRequest({"words": ["b"], "weights": [[3, 4]]}, "mine", ["weights"], {"p": 2}),
        {"words": ["c"], "weights": [[5, 6]]},
    ]
    first, second, third = stream("text", requests, ordered=True, outputs=["words"], parameters={"p": 1})
    assert (list(first), list(second), list(third)) == (["words"], ["weights"], ["words"])
    assert [result.parameters["p"] for result in (first, second, third)] == [1, 2, 1]
    assert second.id == "mine"
    assert len({first.id, second.id, third.id}) == 3


def test_errors_are_yielded_in_place_of_results(servicer: ScriptedServicer, stream: Streams) -> None:
    def answer(requests: Requests, context: Context) -> Answers:
        for request in requests:
            if request.id == "r1":
                yield failed("r1", "bad shape", "INVALID_ARGUMENT")
            elif request.id == "r2":
                yield failed("r2", "as Triton says it")
            else:
                yield streamed(request)

    servicer.stream = answer
    for ordered in (True, False):
        outcomes = list(stream("row", rows(4), on_error="yield", ordered=ordered))
        assert ids(outcomes) == ["r0", "!r1", "!r2", "r3"]
    assert type(outcomes[1]) is tf.InvalidArgument
    assert outcomes[1].message == "bad shape"
    assert type(outcomes[2]) is InferenceError
    assert outcomes[2].code is grpc.StatusCode.UNKNOWN


def test_an_error_is_raised_and_names_its_request(servicer: ScriptedServicer, stream: Streams) -> None:
    def answer(requests: Requests, context: Context) -> Answers:
        yield streamed(next(requests))
        yield failed(next(requests).id, "full", "RESOURCE_EXHAUSTED")
        yield from map(streamed, requests)

    servicer.stream = answer
    results = stream("row", rows(4))
    assert next(results).id == "r0"
    with pytest.raises(tf.ResourceExhausted, match=r"full \(request 'r1'\)"):
        next(results)
    assert list(results) == []


def test_a_request_that_does_not_fit_fails_alone(stream: Streams) -> None:
    requests = [
        StreamRequest({"x": [1]}, "good"),
        StreamRequest({"x": np.ones(2, np.int64)}, "bad"),
        StreamRequest({"x": [3]}, "late"),
    ]
    assert sorted(ids(stream("row", requests, on_error="yield"))) == ["!bad", "good", "late"]
    assert ids(stream("row", requests, on_error="yield", ordered=True)) == ["good", "!bad", "late"]
    with pytest.raises(tf.InvalidInput, match="axis 0 is 1 long, not 2"):
        list(stream("row", requests))


def test_an_unknown_model_fails_each_request(stream: Streams) -> None:
    outcomes = list(stream("nothing", rows(2), on_error="yield"))
    assert ids(outcomes) == ["!r0", "!r1"]
    assert {type(outcome) for outcome in outcomes} == {tf.NotFound}
    with pytest.raises(tf.NotFound, match="r0"):
        list(stream("nothing", rows(2)))


def test_an_exception_of_the_iterable_comes_after_the_results(stream: Streams) -> None:
    def source() -> Iterator[StreamRequest]:
        yield from rows(3)
        raise LookupError("the file is gone")

    results: list[Any] = []
    with pytest.raises(LookupError, match="the file is gone"):
        _collect(stream("row", source()), results)
    assert ids(results) == ["r0", "r1", "r2"]


def _collect(outcomes: Iterator[Any], into: list[Any]) -> None:
    # Not extend, which would lose the results before an error.
    for outcome in outcomes:
        into.append(outcome)


def test_an_id_that_is_in_flight_is_refused(servicer: ScriptedServicer, stream: Streams) -> None:
    servicer.stream = backwards
    results: list[Any] = []
    with pytest.raises(tf.InvalidInput, match="expects a request id that is not in flight, got 'same'"):
        _collect(stream("row", [StreamRequest({"x": [n]}, "same") for n in range(2)]), results)
    assert ids(results) == ["same"]


@pytest.mark.parametrize("answered", ["r9", "", "r0"])
def test_an_answer_that_fits_no_request_ends_the_stream(
    servicer: ScriptedServicer, stream: Streams, answered: str
) -> None:
    def answer(requests: Requests, context: Context) -> Answers:
        yield streamed(next(requests))
        next(requests)
        yield failed(answered, "whole stream refused")

    servicer.stream = answer
    outcomes = stream("row", rows(2), on_error="yield")
    assert next(outcomes).id == "r0"
    with pytest.raises(InferenceError, match=f"request id '{answered}'.*whole stream refused"):
        next(outcomes)


@pytest.mark.parametrize("on_error", ["yield", "raise"])
def test_a_call_that_breaks_fails_every_request(
    servicer: ScriptedServicer, stream: Streams, on_error: str
) -> None:
    def answer(requests: Requests, context: Context) -> Answers:
        first, _, _ = (next(requests) for _ in range(3))
        yield streamed(first)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token expired")

    servicer.stream = answer
    outcomes = stream("row", rows(100), max_in_flight=3, on_error=on_error)
    assert next(outcomes).id == "r0"
    if on_error == "raise":
        with pytest.raises(tf.Unauthenticated, match="the token expired"):
            next(outcomes)
        return
    results: list[Any] = []
    with pytest.raises(tf.Unauthenticated, match=r"the token expired$"):
        _collect(outcomes, results)
    assert {type(result) for result in results} == {tf.Unauthenticated}
    assert ids(results)[:2] == ["!r1", "!r2"]


def test_unanswered_requests_of_a_finished_stream_are_an_error(
    servicer: ScriptedServicer, stream: Streams
) -> None:
    def answer(requests: Requests, context: Context) -> Answers:
        *_, last = requests
        yield streamed(last)

    servicer.stream = answer
    results: list[Any] = []
    with pytest.raises(InferenceError, match="left 2 requests unanswered"):
        _collect(stream("row", rows(3), on_error="yield"), results)
    assert ids(results) == ["r2", "!r0", "!r1"]


def test_a_stream_that_ends_before_all_requests_were_sent_is_an_error(
    servicer: ScriptedServicer, stream: Streams
) -> None:
    servicer.stream = lambda requests, context: map(streamed, itertools.islice(requests, 1))
    outcomes = stream("row", stream.one_by_one(rows(2)), on_error="yield")
    assert next(outcomes).id == "r0"
    with pytest.raises(InferenceError, match="the server ended the stream and did not wait for all requests"):
        next(outcomes)


def test_a_timeout_is_that_of_the_stream(servicer: ScriptedServicer, stream: Streams) -> None:
    hang = Hang()
    servicer.stream = hang.stream
    with pytest.raises(tf.DeadlineExceeded):
        list(stream("row", rows(5), timeout=0.2))
    # The timeout may pass before the server has read the call.
    assert "ModelStreamInfer" not in servicer.calls or hang.left.wait(30)


# Bounds


class Counted:
    """Iterable that counts its requests that were taken and not yet answered."""

    def __init__(self, count: int) -> None:
        self._requests = rows(count)
        self.pulled = 0
        self.taken = 0
        self.most = 0

    def __iter__(self) -> Iterator[StreamRequest]:
        for request in self._requests:
            self.pulled += 1
            self.most = max(self.most, self.pulled - self.taken)
            yield request


def test_max_in_flight_bounds_the_requests_sent(servicer: ScriptedServicer, stream: Streams) -> None:
    def answer(requests: Requests, context: Context) -> Answers:
        waiting = [next(requests) for _ in range(4)]  # comes to an end only if four may be in flight
        while waiting:
            yield streamed(waiting.pop(0))
            waiting.extend(itertools.islice(requests, 1))

    servicer.stream = answer
    source = Counted(50)
    for _ in stream("row", source, max_in_flight=4):
        source.taken += 1
    # A result frees its place when it is yielded; `taken` counts it a moment later.
    assert 4 <= source.most <= 5


def test_a_slow_consumer_slows_the_source_down(servicer: ScriptedServicer, stream: Streams) -> None:
    source = Counted(50)
    outcomes = stream("row", source, max_in_flight=3)
    for count in range(1, 51):
        next(outcomes)
        source.taken = count
    assert list(outcomes) == []
    assert source.most <= 4


def test_a_call_that_ends_while_requests_are_sent_says_why(
    servicer: ScriptedServicer, stream: Streams
) -> None:
    """The server's status is kept even if grpcio reports the failed write first, as INTERNAL."""

    def answer(requests: Requests, context: Context) -> Answers:
        yield streamed(next(requests))
        context.set_trailing_metadata((("retry-after-ms", "2"),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")

    servicer.stream = answer
    for _ in range(10):
        outcomes = stream("row", rows(10**9), max_in_flight=64)
        with pytest.raises(tf.ResourceExhausted, match="no room") as caught:
            _collect(outcomes, [])
        assert caught.value.retry_after == 0.002


def test_results_can_be_found_in_collections() -> None:
    one, other = (InferenceResult("m", "1", "", {}, {"x": np.zeros(2)}) for _ in range(2))
    assert [one, other].index(other) == 1
    assert {one, one, other} == {other, one}


def test_a_result_without_outputs_is_a_result() -> None:
    in_flight = InFlight(2, ordered=True)
    for request_id in ("answered", "open"):
        in_flight.add(request_id)
    result = InferenceResult("m", "1", "answered", {}, {})
    in_flight.settle("answered", result)
    taken, _ = in_flight.end(InferenceError(grpc.StatusCode.INTERNAL, "broken"), all_sent=False)
    (answered, _), (unanswered, _) = taken
    assert answered is result
    assert isinstance(unanswered, Internal)


# Early ends: the consumer is woken, and no call, thread or task remains


def test_closing_early_leaves_no_call_and_no_thread(servicer: ScriptedServicer, stream: Streams) -> None:
    """The fixture checks that no task is left."""
    list(stream("row", rows(1)))  # the channel's own threads start
    hang = Hang()
    servicer.stream = hang.stream
    before = set(threading.enumerate())
    outcomes = stream("row", rows(10**9), max_in_flight=8)
    assert next(outcomes).id == "r0"
    outcomes.close()
    assert hang.left.wait(30)
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("scripted"):
            thread.join(30)
            assert not thread.is_alive()


def test_dropping_the_iterator_cancels_the_call(servicer: ScriptedServicer, client: InferenceClient) -> None:
    hang = Hang()
    servicer.stream = hang.stream
    for result in client.stream("row", rows(10**9)):
        assert result.id == "r0"
        break
    gc.collect()
    assert hang.left.wait(30)


def test_the_thread_that_sends_may_collect_the_dropped_iterator(
    servicer: ScriptedServicer, client: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = Hang()
    servicer.stream = hang.stream
    dropped = threading.Event()

    def source() -> Iterator[StreamRequest]:
        yield from rows(1)
        assert dropped.wait(30)
        yield from rows(1)

    add = InFlight.add

    def collect_and_add(self: InFlight, *request: Any) -> None:
        if dropped.is_set():
            gc.collect()
        add(self, *request)

    monkeypatch.setattr(InFlight, "add", collect_and_add)
    cycle: list[Any] = [client.stream("row", source())]
    cycle.append(cycle)
    next(cycle[0])
    gc.disable()
    try:
        del cycle
        dropped.set()
        assert hang.left.wait(30)
    finally:
        gc.enable()


async def test_cancelling_the_consumer_cancels_the_call(
    servicer: ScriptedServicer, aclient: aio.InferenceClient
) -> None:
    hang = Hang()
    servicer.stream = hang.stream

    async def consume() -> None:
        async for _ in aclient.stream("row", rows(10**9)):
            pass

    task = asyncio.create_task(consume())
    assert await asyncio.to_thread(hang.begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(hang.left.wait, 30)


def test_closing_the_client_ends_its_streams(servicer: ScriptedServicer, stream: Streams) -> None:
    servicer.stream = Hang().stream
    outcomes = stream("row", rows(10**9), max_in_flight=2)
    next(outcomes)
    stream.close_client()
    with pytest.raises(tf.Cancelled):
        next(outcomes)
    with pytest.raises(RuntimeError, match="closed"):
        next(stream("row", rows(1)))


def test_a_call_that_ends_between_requests_wakes_the_consumer(
    servicer: ScriptedServicer, stream: Streams
) -> None:
    def breaks(requests: Requests, context: Context) -> Answers:
        yield streamed(next(requests))
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token expired")

    servicer.stream = breaks
    outcomes = stream("row", stream.one_by_one(rows(2)))
    assert next(outcomes).id == "r0"
    with pytest.raises(tf.Unauthenticated):
        next(outcomes)


class NoException(BaseException):
    """Such as those of pytest.skip."""


@pytest.mark.parametrize("kind", [asyncio.CancelledError, NoException])
async def test_what_a_source_raises_ends_the_stream(
    kind: type[BaseException], aclient: aio.InferenceClient
) -> None:
    async def source() -> AsyncIterator[StreamRequest]:
        for request in rows(1):
            yield request
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(kind()) if kind is NoException else failed.cancel()
        await failed

    outcomes = aclient.stream("row", source())
    assert (await anext(outcomes)).id == "r0"
    with pytest.raises(kind):
        await asyncio.wait_for(anext(outcomes), 30)


async def test_a_client_that_is_closed_before_its_stream_begins(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aio.InferenceClient([server.target, "localhost:1"]) as client:
        connect = client._stream_connection

        async def connect_and_close(context: Any) -> Any:
            connection = await connect(context)
            await client.close()
            return connection

        monkeypatch.setattr(client, "_stream_connection", connect_and_close)
        with pytest.raises(tf.ClientClosed):
            await anext(client.stream("row", rows(1)))


def test_a_sequence_needs_a_model_with_one_answer(
    servicer: ScriptedServicer, client: InferenceClient
) -> None:
    servicer.models["row"].properties["streams"] = "true"
    with (
        client.sequence("row") as sequence,
        pytest.raises(tf.InvalidInput, match="because it answers in streams"),
    ):
        sequence.infer({"x": [1]})


def test_a_sequence_begins_with_the_first_request_that_is_sent(client: InferenceClient) -> None:
    with client.sequence("row") as sequence:
        with pytest.raises(TypeError, match="mapping"):
            sequence.infer({"x": [1]}, parameters=5)  # type: ignore[arg-type]
        assert sequence.infer({"x": [1]}).parameters["sequence_start"] is True


def test_sequences_of_programs_with_one_seed_have_different_ids(client: InferenceClient) -> None:
    ids = set()
    for _ in range(2):
        random.seed(1)
        ids.add(client.sequence("row").id)
    assert len(ids) == 2
