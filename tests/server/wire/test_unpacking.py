"""Compressed requests of the lane: another thread unpacks them, and each is answered or withdrawn once."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import grpc
import numpy as np
import pytest
from fuzz.attackers.raw import Connection, framed, headers_of
from support.server.rig import PATIENCE, Make, request
from support.server.tokens import METHODS

from tensorferry.batcher import Cancelled
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.identity import ANONYMOUS
from tensorferry.server.inference import service
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.transport.lane.unpacking import Unpacker
from tensorferry.server.wire.compression import decompress


class Later(Executor):
    """Calls what it was given when the test says so; not once it is shut down."""

    def __init__(self) -> None:
        self.given: list[Callable[[], Any]] = []
        self.is_open = True

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if not self.is_open:
            raise RuntimeError
        self.given.append(fn)
        return Future()

    def run(self) -> None:
        while self.given:
            self.given.pop(0)()


class Served(InferenceCall):
    """A request that the service has; how it was withdrawn."""

    def __init__(self) -> None:
        self.withdrawn: list[str] = []

    def cancel(self) -> None:
        self.withdrawn.append("cancel")

    def abandon(self) -> None:
        self.withdrawn.append("abandon")


class Desk:
    """An unpacker over a service that does nothing, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.later = Later()
        self.served: list[Served] = []
        self.replies: list[InferenceReply] = []
        self._error = error
        self._unpacker = Unpacker(self._submit, self.later)

    def _submit(self, data: bytes, *arguments: Any, **options: Any) -> InferenceCall:
        if self._error is not None:
            raise self._error
        self.served.append(Served())
        return self.served[-1]

    def submit(self) -> InferenceCall:
        return self._unpacker.submit(b"", 0.0, self.replies.append, (), ANONYMOUS)


def test_it_is_served_later() -> None:
    desk = Desk()
    desk.submit()
    assert not desk.served
    desk.later.run()
    assert len(desk.served) == 1
    assert not desk.replies


def test_one_that_is_withdrawn_before_is_not_served_and_told_so_once() -> None:
    desk = Desk()
    call = desk.submit()
    call.cancel()
    call.abandon()
    assert not desk.replies
    desk.later.run()
    (reply,) = desk.replies
    with pytest.raises(Cancelled):
        reply.message()
    assert not desk.served


def test_one_that_is_withdrawn_later_is_withdrawn_from_the_service() -> None:
    desk = Desk()
    call = desk.submit()
    desk.later.run()
    call.abandon()
    call.cancel()
    assert desk.served[0].withdrawn == ["abandon", "cancel"]


def test_one_that_is_withdrawn_meanwhile_is_withdrawn_from_the_service() -> None:
    desk = Desk()

    def submit(*arguments: Any, **options: Any) -> InferenceCall:
        call.cancel()
        return desk._submit(b"")

    call = Unpacker(submit, desk.later).submit(b"", 0.0, desk.replies.append, (), ANONYMOUS)
    desk.later.run()
    assert desk.served[0].withdrawn == ["cancel"]


def test_a_bug_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(ZeroDivisionError())
    desk.submit()
    desk.later.run()
    (reply,) = desk.replies
    with pytest.raises(ZeroDivisionError):
        reply.message()
    assert "could not be served" in caplog.text


def test_without_threads_it_is_served_at_once() -> None:
    desk = Desk()
    desk.later.is_open = False
    desk.submit()
    assert len(desk.served) == 1


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_others_are_answered_while_one_is_unpacked(
    start: Make, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(data: bytes, most: int) -> bytes:
        begun.set()
        assert go_on.wait(PATIENCE)
        return decompress(data, most)

    monkeypatch.setattr(service, "decompress", slowly)
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
