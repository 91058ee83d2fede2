"""Streams of both clients that end early: the consumer is woken, and no call, thread or task remains."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from client.conftest import Streams
from client.scripted import Context, Hang, ScriptedServicer, rows, streamed

from tensorferry import client as tf
from tensorferry.client import InferenceClient, StreamRequest, aio
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
    assert hang.left.wait(10)
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("scripted"):
            thread.join(10)
            assert not thread.is_alive()


def test_dropping_the_iterator_cancels_the_call(servicer: ScriptedServicer, client: InferenceClient) -> None:
    hang = Hang()
    servicer.stream = hang.stream
    for result in client.stream("row", rows(10**9)):
        assert result.id == "r0"
        break
    gc.collect()
    assert hang.left.wait(10)


async def test_cancelling_the_consumer_cancels_the_call(
    servicer: ScriptedServicer, aclient: aio.InferenceClient
) -> None:
    hang = Hang()
    servicer.stream = hang.stream

    async def consume() -> None:
        async for _ in aclient.stream("row", rows(10**9)):
            pass

    task = asyncio.create_task(consume())
    assert await asyncio.to_thread(hang.begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(hang.left.wait, 10)


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
