"""Clients that leave in the middle of a call: the call ends once, and nothing of it remains.

That no call and no thread is left behind is shown at the end of every test, by `opened`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from support.server.raw_h2 import STREAM, RawClient, message
from support.server.rig import PATIENCE
from support.server.scripted_service import ServedTransport, success

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.identity import ANONYMOUS, ClientIdentity, Metadata
from tensorferry.server.inference.reply import BuiltReply, InferenceCall, InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.registry import ModelRegistry

Leave = Callable[[RawClient], None]

LEAVES: list[Leave] = [lambda client: client.cancel(1), lambda client: client.leave()]
either_way = pytest.mark.parametrize("leave", LEAVES, ids=["cancels", "disconnects"])


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A client that leaves must cause no error in the log."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def asked(request_id: str) -> bytes:
    return message(pb.ModelInferRequest(id=request_id).SerializeToString())


def others_are_served(served: ServedTransport, request_id: str = "other") -> None:
    call = served.infer(request_id)
    served.service.await_received(len(served.service.received) + (request_id not in served.service.received))
    served.service.answer(request_id)
    assert call.result(PATIENCE).id == request_id


@either_way
def test_a_disconnect_within_a_message_of_a_stream(served: ServedTransport, leave: Leave) -> None:
    with RawClient(served.address) as client:
        client.begin(1, STREAM)
        client.send(1, asked("1") + asked("never complete")[:8])
        served.service.await_received(1)
        leave(client)
        served.service.await_cancelled(1)
        others_are_served(served)
    assert served.service.received == ["1", "other"]


def test_a_disconnect_while_further_responses_wait(served: ServedTransport) -> None:
    served.service.answer_at_once = lambda request_id: success(request_id, 1 << 20)
    with RawClient(served.address) as client:
        client.begin(1, STREAM)
        client.send(1, b"".join(asked(str(number)) for number in range(10)))
        served.service.await_received(10)
        client.await_data(1)
    assert served.infer("other").result(PATIENCE).id == "other"


class Hooked(InferenceService):
    """A service of one request at a time, with the test's hooks for its arrival and its cancellation."""

    def __init__(self) -> None:
        super().__init__(ModelRegistry())
        self.arrived = threading.Event()
        self.withdrawn = threading.Event()
        self.when_it_comes: Callable[[], None] = lambda: None
        self.when_withdrawn: Callable[[], None] = lambda: None
        self.completed = 0
        self._complete: Callable[[InferenceReply], None] | None = None

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata = (),
        caller: ClientIdentity = ANONYMOUS,
        **options: Any,
    ) -> InferenceCall:
        self._complete = complete
        self.arrived.set()
        self.when_it_comes()
        return _HookedCall(self)

    def complete(self, reply: InferenceReply) -> None:
        """Completes the request, if it is not."""
        complete, self._complete = self._complete, None
        if complete is not None:
            self.completed += 1
            complete(reply)


class _HookedCall(InferenceCall):
    def __init__(self, service: Hooked) -> None:
        super().__init__()
        self._hooked = service

    def cancel(self) -> None:
        self._hooked.withdrawn.set()
        self._hooked.when_withdrawn()
        self._hooked.complete(success("withdrawn"))


@pytest.fixture
def hooked(served: ServedTransport) -> Hooked:
    service = Hooked()
    served.serve_by(service)
    return service


def is_cancelled(call: Any) -> bool:
    """Return whether the client sees its own cancellation, whatever the server did."""
    with pytest.raises(grpc.FutureCancelledError):
        call.result(PATIENCE)
    return bool(call.code() is grpc.StatusCode.CANCELLED)


def other_call(served: ServedTransport) -> None:
    served.serve_by(served.service)
    others_are_served(served)


def test_a_reply_during_the_cancellation(served: ServedTransport, hooked: Hooked) -> None:
    """The cancelling thread waits until another thread has replied."""

    def reply_meanwhile() -> None:
        thread = threading.Thread(target=hooked.complete, args=(success("1"),))
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()

    hooked.when_withdrawn = reply_meanwhile
    call = served.infer("1")
    assert hooked.arrived.wait(PATIENCE)
    call.cancel()
    assert hooked.withdrawn.wait(PATIENCE)
    assert is_cancelled(call)
    other_call(served)
    assert hooked.completed == 1


def test_a_cancellation_while_the_reply_is_built(served: ServedTransport, hooked: Hooked) -> None:
    building, built = threading.Event(), threading.Event()

    def build() -> list[bytes]:
        building.set()
        assert built.wait(PATIENCE)
        return [pb.ModelInferResponse(id="1").SerializeToString()]

    call = served.infer("1")
    assert hooked.arrived.wait(PATIENCE)
    replier = threading.Thread(target=hooked.complete, args=(BuiltReply("1", build),))
    replier.start()
    assert building.wait(PATIENCE)
    call.cancel()
    assert hooked.withdrawn.wait(PATIENCE)
    built.set()
    replier.join(PATIENCE)
    assert is_cancelled(call)
    other_call(served)
    assert hooked.completed == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_a_disconnect_during_submit(served: ServedTransport, hooked: Hooked, at_once: bool) -> None:
    """The client leaves before `submit` returns; the service may have replied by then."""
    call: Any = None
    made, left = threading.Event(), threading.Event()

    def leave() -> None:
        assert made.wait(PATIENCE)
        call.cancel()
        if at_once:
            hooked.complete(success("1"))
        left.set()

    hooked.when_it_comes = leave
    call = served.infer("1")
    made.set()
    assert left.wait(PATIENCE)
    assert is_cancelled(call)
    if not at_once:
        assert hooked.withdrawn.wait(PATIENCE)
    other_call(served)
    assert hooked.completed == 1
