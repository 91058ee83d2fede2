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
from fuzz.attackers.raw import Connection, framed, headers_of
from support.server.rig import PATIENCE
from support.server.scripted_service import ServedTransport, success

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference.reply import BuiltReply, InferenceCall

Leave = Callable[[Connection], None]


def cancel(client: Connection) -> None:
    client.reset(1)
    client.flush()


LEAVES: list[Leave] = [cancel, lambda client: client.socket.close()]
either_way = pytest.mark.parametrize("leave", LEAVES, ids=["cancels", "disconnects"])


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A client that leaves must cause no error in the log."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def asked(request_id: str) -> bytes:
    return framed(pb.ModelInferRequest(id=request_id).SerializeToString())


def stream_of(served: ServedTransport) -> Connection:
    """Open a connection with a stream, which is its call 1."""
    client = Connection(served.address, PATIENCE)
    client.begin(headers_of("ModelStreamInfer"))
    return client


def others_are_served(served: ServedTransport, request_id: str = "other") -> None:
    call = served.infer(request_id)
    served.service.await_received(len(served.service.received) + (request_id not in served.service.received))
    served.service.answer(request_id)
    assert call.result(PATIENCE).id == request_id


@either_way
def test_a_disconnect_within_a_message_of_a_stream(served: ServedTransport, leave: Leave) -> None:
    with stream_of(served) as client:
        client.send(1, asked("1") + asked("never complete")[:8])
        client.flush()
        served.service.await_received(1)
        leave(client)
        served.service.await_cancelled(1)
        others_are_served(served)
    assert served.service.received == ["1", "other"]


def test_a_disconnect_while_further_responses_wait(served: ServedTransport) -> None:
    served.service.answer_at_once = lambda request_id: success(request_id, 1 << 20)
    with stream_of(served) as client:
        client.send(1, b"".join(asked(str(number)) for number in range(10)))
        client.flush()
        served.service.await_received(10)
        while not client.answers[1].data:
            client.read()
    assert served.infer("other").result(PATIENCE).id == "other"


@pytest.fixture
def withdrawn(served: ServedTransport, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a request is cancelled."""
    event, cancel = threading.Event(), served.service._cancel

    def cancel_and_tell(request_id: str) -> None:
        cancel(request_id)
        event.set()

    monkeypatch.setattr(served.service, "_cancel", cancel_and_tell)
    return event


def is_cancelled(call: Any) -> bool:
    """Return whether the client sees its own cancellation, whatever the server did."""
    with pytest.raises(grpc.FutureCancelledError):
        call.result(PATIENCE)
    return bool(call.code() is grpc.StatusCode.CANCELLED)


def test_a_reply_during_the_cancellation(served: ServedTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancelling thread waits until another thread has replied."""
    withdrawn = threading.Event()

    def reply_meanwhile(request_id: str) -> None:
        if request_id != "1":
            # The threaded servicer cancels each request at the end of its call.
            return
        thread = threading.Thread(target=served.service.answer, args=("1",))
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        withdrawn.set()

    monkeypatch.setattr(served.service, "_cancel", reply_meanwhile)
    call = served.infer("1")
    served.service.await_received(1)
    call.cancel()
    assert withdrawn.wait(PATIENCE)
    assert is_cancelled(call)
    others_are_served(served)


def test_a_cancellation_while_the_reply_is_built(served: ServedTransport, withdrawn: threading.Event) -> None:
    building, built = threading.Event(), threading.Event()

    def build() -> list[bytes]:
        building.set()
        assert built.wait(PATIENCE)
        return [pb.ModelInferResponse(id="1").SerializeToString()]

    call = served.infer("1")
    served.service.await_received(1)
    replier = threading.Thread(target=served.service.answer_with, args=("1", BuiltReply("1", build)))
    replier.start()
    assert building.wait(PATIENCE)
    call.cancel()
    assert withdrawn.wait(PATIENCE)
    built.set()
    replier.join(PATIENCE)
    assert is_cancelled(call)
    others_are_served(served)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_disconnect_during_submit(
    served: ServedTransport, withdrawn: threading.Event, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client leaves before `submit` returns; the service may have replied by then."""
    call: Any = None
    made, left, submit = threading.Event(), threading.Event(), served.service.submit

    def submit_and_leave(*arguments: Any, **options: Any) -> InferenceCall:
        submitted = submit(*arguments, **options)
        assert made.wait(PATIENCE)
        call.cancel()
        if at_once:
            served.service.answer("1")
        left.set()
        return submitted

    with monkeypatch.context() as patch:
        patch.setattr(served.service, "submit", submit_and_leave)
        call = served.infer("1")
        made.set()
        assert left.wait(PATIENCE)
        assert is_cancelled(call)
        assert at_once or withdrawn.wait(PATIENCE)
    others_are_served(served)
