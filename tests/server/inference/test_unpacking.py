"""Compressed requests on the lane: another thread decompresses them; each is answered or cancelled once."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import grpc
import numpy as np
import pytest
from fuzz.attackers.raw import Connection, framed, headers_of
from google.protobuf.message import DecodeError
from support.server.rig import PATIENCE, Make, request
from support.server.scripted_service import ServedTransport, opened
from support.server.tokens import METHODS

from tensorferry.batcher import Cancelled
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.identity import ANONYMOUS
from tensorferry.server.inference import service
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.wire.receiving import decompress


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Events of the server's decompression: it has begun, and it may go on."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(data: bytes, most: int) -> bytes:
        begun.set()
        assert go_on.wait(PATIENCE)
        return decompress(data, most)

    monkeypatch.setattr(service, "decompress", wait)
    return begun, go_on


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_other_requests_are_answered_while_one_is_decompressed(
    start: Make, slowly: tuple[threading.Event, threading.Event], method: str
) -> None:
    begun, go_on = slowly
    app = start()
    message = request({"x": np.ones((1, 3), np.float32)}).SerializeToString()
    with Connection(app.address, PATIENCE) as connection, grpc.insecure_channel(app.address) as channel:
        call = connection.begin(headers_of(path=METHODS[method], grpc_encoding="gzip"))
        connection.send(call, framed(gzip.compress(message), flag=1), last=True)
        connection.flush()
        assert begun.wait(PATIENCE)
        submit: Any = channel.unary_unary(METHODS["ModelInfer"])
        answer = pb.ModelInferResponse.FromString(submit(message, timeout=PATIENCE))
        assert answer.outputs[0].shape == [1, 3]
        go_on.set()
        connection.await_answers([call])
        assert connection.answers[call].grpc_status == 0
        (answered,) = connection.answers[call].messages
        assert answer.raw_output_contents[0] in answered


def test_a_request_does_not_overtake_the_compressed_one_before_it(
    start: Make, slowly: tuple[threading.Event, threading.Event]
) -> None:
    """gRPC sends a message uncompressed if it would not shrink."""
    begun, go_on = slowly
    app = start()
    first, second = (request({"x": np.ones((1, 3), np.float32)}, id=id).SerializeToString() for id in "ab")
    with Connection(app.address, PATIENCE) as connection:
        how = {"grpc_encoding": "gzip", "tensorferry_stream_order": "completion"}
        call = connection.begin(headers_of("ModelStreamInfer", **how))
        connection.send(call, framed(gzip.compress(first), flag=1) + framed(second), last=True)
        # The server reads this call after those.
        after = connection.begin(headers_of())
        connection.send(after, framed(second), last=True)
        connection.flush()
        assert begun.wait(PATIENCE)
        connection.await_answers([after])
        go_on.set()
        connection.await_answers([call])
        answers = map(pb.ModelStreamInferResponse.FromString, connection.answers[call].messages)
        assert [answer.infer_response.id for answer in answers] == ["a", "b"]


class Held(Executor):
    """An executor without threads: the test calls each piece of work. Once `closed`, it takes none."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []
        self.closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.closed:
            raise RuntimeError
        self.work.append(fn)
        return Future()


@pytest.fixture
def executor() -> Held:
    return Held()


@pytest.fixture
def lane(executor: Held) -> Iterator[ServedTransport]:
    yield from opened("lane", unpackers=executor)


def submitted(served: ServedTransport) -> tuple[InferenceCall, list[InferenceReply]]:
    replies: list[InferenceReply] = []
    assert served.lane is not None
    return served.lane.submit(gzip.compress(b""), 0.0, replies.append, (), ANONYMOUS), replies


def test_a_request_cancelled_before_is_not_served_and_answered_once(
    executor: Held, lane: ServedTransport
) -> None:
    call, replies = submitted(lane)
    call.cancel()
    call.abandon()
    assert not replies
    executor.work.pop()()
    (reply,) = replies
    with pytest.raises(Cancelled):
        reply.message()
    assert not lane.service.received


@pytest.mark.parametrize("closed", [False, True])
def test_an_unexpected_error_is_answered_and_logged(
    executor: Held, lane: ServedTransport, caplog: pytest.LogCaptureFixture, closed: bool
) -> None:
    """Also if there are no threads any more, so that the request is served at once."""
    executor.closed = closed
    # The scripted service does not decompress.
    _, replies = submitted(lane)
    while executor.work:
        executor.work.pop()()
    (reply,) = replies
    with pytest.raises(DecodeError):
        reply.message()
    assert "could not be served" in caplog.text
    caplog.clear()  # its frames hold the lane
