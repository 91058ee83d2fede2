"""Streams of the Ray application: the same order, limits and ends as on the other transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from support.server.scripted_service import failure, success

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import NotFoundError
from tensorferry.server.identity import Metadata
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.ray.stream import RayStream
from tensorferry.server.status import Status, status_of

LIMIT = 3


class Replies:
    """Holds requests by their text until the test answers them."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.cancelled: list[str] = []
        self._futures: dict[str, asyncio.Future[InferenceReply]] = {}

    async def infer(self, data: bytes, deadline: float, metadata: Metadata) -> InferenceReply:
        request_id = data.decode()
        self.received.append(request_id)
        self._futures[request_id] = asyncio.get_running_loop().create_future()
        try:
            return await self._futures[request_id]
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise

    def answer(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self._futures[request_id].set_result(success(request_id))

    def fail(self, request_id: str) -> None:
        self._futures[request_id].set_result(failure(request_id, NotFoundError("no such model")))


def _status_of(error: BaseException, reply: InferenceReply) -> Status:
    return status_of(error)


def stream_of(replies: Replies, metadata: Metadata = ()) -> RayStream:
    return RayStream(
        replies.infer, _status_of, float("inf"), metadata, max_in_flight=LIMIT, max_bytes=1 << 20
    )


async def requests(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield str(number).encode()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def id_of(data: bytes) -> str:
    return pb.ModelStreamInferResponse.FromString(data).infer_response.id


@pytest.mark.parametrize(
    ("order", "expected"), [("request", ["0", "1", "2"]), ("completion", ["2", "0", "1"])]
)
async def test_responses_come_in_the_chosen_order(order: str, expected: list[str]) -> None:
    replies = Replies()
    stream = stream_of(replies, (("tensorferry-stream-order", order),))
    responses = stream.responses(requests(3))
    first = asyncio.ensure_future(anext(responses))
    await settle()
    for request_id in ("2", "0", "1"):
        replies.answer(request_id)
        await settle()
    assert [id_of(await first), *[id_of(data) async for data in responses]] == expected
    assert stream.end is None


async def test_no_more_than_the_limit_is_in_flight() -> None:
    replies = Replies()
    responses = stream_of(replies).responses(requests(5))
    next_response = asyncio.ensure_future(anext(responses))
    for number in range(5):
        await settle()
        assert replies.received == [str(other) for other in range(min(LIMIT + number, 5))]
        replies.answer(str(number))
        assert id_of(await next_response) == str(number)
        next_response = asyncio.ensure_future(anext(responses, b"end"))
    assert await next_response == b"end"


async def test_the_first_error_ends_a_stream_with_end_on_error() -> None:
    replies = Replies()
    stream = stream_of(replies, (("triton_grpc_error", "true"),))
    responses = asyncio.ensure_future(_all(stream, 2))
    await settle()
    replies.fail("0")
    assert await responses == []
    assert stream.end is not None
    assert stream.end.code is grpc.StatusCode.NOT_FOUND
    await settle()
    assert replies.cancelled == ["1"]


async def test_an_unknown_order_is_refused() -> None:
    replies = Replies()
    stream = stream_of(replies, (("tensorferry-stream-order", "random"),))
    assert await _all(stream, 2) == []
    assert stream.end is not None
    assert stream.end.code is grpc.StatusCode.INVALID_ARGUMENT
    assert not replies.received


async def test_closing_the_iterator_cancels_the_requests_in_flight() -> None:
    replies = Replies()
    responses = stream_of(replies).responses(requests(2))
    reading = asyncio.ensure_future(anext(responses))
    await settle()
    reading.cancel()
    await settle()
    assert sorted(replies.cancelled) == ["0", "1"]


async def _all(stream: RayStream, count: int) -> list[bytes]:
    return [data async for data in stream.responses(requests(count))]
