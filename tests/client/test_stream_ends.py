"""Streams of both clients that end early: the consumer is woken, and no call, thread or task remains."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from client.conftest import Streams
from client.scripted import Context, Hang, ScriptedServer, ScriptedServicer, rows, streamed

from tensorferry import client as tf
from tensorferry.client import InferenceClient, StreamRequest, aio
from tensorferry.client.inflight import InFlight
from tensorferry.protos import inference_pb2 as pb


def breaks(
    requests: Iterator[pb.ModelInferRequest], context: Context
) -> Iterator[pb.ModelStreamInferResponse]:
    """Answer one request and end the call."""
    yield streamed(next(requests))
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token expired")


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
    servicer: ScriptedServicer, client: InferenceClient
) -> None:
    never = threading.Event()

    def source() -> Iterator[StreamRequest]:
        yield from rows(1)
        never.wait(30)

    servicer.stream = breaks
    outcomes = client.stream("row", source())
    assert next(outcomes).id == "r0"
    with pytest.raises(tf.Unauthenticated):
        next(outcomes)
    never.set()


async def test_a_call_that_ends_between_requests_wakes_the_consumer_of_asyncio(
    servicer: ScriptedServicer, aclient: aio.InferenceClient
) -> None:
    async def source() -> AsyncIterator[StreamRequest]:
        for request in rows(1):
            yield request
        await asyncio.get_running_loop().create_future()

    servicer.stream = breaks
    outcomes = aclient.stream("row", source())
    assert (await anext(outcomes)).id == "r0"
    with pytest.raises(tf.Unauthenticated):
        await anext(outcomes)


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
