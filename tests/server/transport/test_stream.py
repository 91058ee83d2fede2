"""ModelStreamInfer: order of responses, errors, and the end of a stream."""

from __future__ import annotations

import math
import threading
from typing import Any

import grpc
import pytest
from support.server.scripted_service import ServedTransport

from tensorferry.batcher import QueueFull
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.inference.reply import InferenceCall
from tensorferry.server.inference.responses.stream_responses import StreamOptions
from tensorferry.server.transport.call_admission import StreamAdmission
from tensorferry.server.transport.threaded_stream import ResponseStream


def refuse_all(served: ServedTransport) -> None:
    """Raise the error of a draining server."""
    served.service.begin_drain()
    served.drain_streams()


@pytest.mark.parametrize("order", [None, "request"])
def test_responses_come_in_request_order(served: ServedTransport, order: str | None) -> None:
    stream = served.stream(order)
    stream.send("1", "2", "3", "4")
    served.service.await_received(4)
    served.service.answer("3", "2", "4")
    served.service.answer("1")
    assert stream.read_ids(4) == ["1", "2", "3", "4"]


def test_responses_come_in_completion_order_on_request(served: ServedTransport) -> None:
    stream = served.stream("completion")
    stream.send("1", "2", "3", "4")
    served.service.await_received(4)
    for request_id in ("3", "1", "4", "2"):
        served.service.answer(request_id)
        assert stream.read_ids(1) == [request_id]


def test_responses_that_are_ready_together_arrive_in_an_open_stream(served: ServedTransport) -> None:
    """The lane tells core which of them are followed by another; core writes them with the last."""
    stream = served.stream()
    ids = [str(number) for number in range(40)]
    for _ in range(2):
        stream.send(*ids)
        served.service.await_received(40)
        served.service.answer(*reversed(ids))
        assert stream.read_ids(40) == ids
        served.service.received.clear()


def test_an_unknown_order_is_refused(served: ServedTransport) -> None:
    error = served.stream("random").end()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        "metadata tensorferry-stream-order is 'random'; it must be 'request' or 'completion'"
    )


@pytest.mark.parametrize("order", ["request", "completion"])
def test_an_error_is_a_message_and_the_stream_continues(served: ServedTransport, order: str) -> None:
    stream = served.stream(order)
    stream.send("1", "2")
    served.service.await_received(2)
    served.service.fail("1", InvalidRequestError("what to change"))
    error_reply = stream.read()
    assert error_reply.error_message == "what to change"
    assert error_reply.infer_response.id == "1"
    assert error_reply.infer_response.parameters["tensorferry_status"].string_param == "INVALID_ARGUMENT"
    assert error_reply.infer_response.parameters["triton_final_response"].bool_param
    assert "tensorferry_retry_after_ms" not in error_reply.infer_response.parameters
    served.service.answer("2")
    answered = stream.read()
    assert (answered.error_message, answered.infer_response.id) == ("", "2")
    assert list(answered.infer_response.parameters) == ["triton_final_response"]
    stream.send("3")
    served.service.await_received(3)
    served.service.answer("3")
    assert stream.read_ids(1) == ["3"]


def test_a_refusal_in_a_stream_says_when_to_retry(served: ServedTransport) -> None:
    stream = served.stream()
    stream.send("1")
    served.service.await_received(1)
    served.service.fail("1", QueueFull("full", 0.25))
    parameters = stream.read().infer_response.parameters
    assert parameters["tensorferry_status"].string_param == "RESOURCE_EXHAUSTED"
    assert parameters["tensorferry_retry_after_ms"].int64_param == 250


def test_an_unexpected_exception_ends_the_stream(
    served: ServedTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a bug or an exhausted memory the client must neither wait for ever nor see a regular end."""

    def broken(*args: Any, **options: Any) -> InferenceCall:
        raise RuntimeError("a secret")

    monkeypatch.setattr(served.lane or served.service, "submit", broken)
    stream = served.stream()
    stream.send("1")
    error = stream.end()
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "internal error; the server's log has the details"
    assert "a secret" in caplog.text
    caplog.clear()  # its frames hold the call


def test_a_stream_without_a_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    service: Any = None
    stream = ResponseStream(service, math.inf, admission=StreamAdmission(StreamOptions()), max_in_flight=1)
    assert list(stream.responses(iter([b""]))) == []
    assert stream.end is not None
    assert stream.end.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("order", ["request", "completion"])
def test_after_half_close_the_stream_ends_with_the_last_response(served: ServedTransport, order: str) -> None:
    stream = served.stream(order)
    stream.send("1", "2", "3")
    stream.half_close()
    served.service.await_received(3)
    served.service.answer("2", "1")
    assert sorted(stream.read_ids(2)) == ["1", "2"]
    served.service.answer("3")
    assert stream.rest() == ["3"]
    assert stream.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("order", ["request", "completion"])
def test_a_disconnect_cancels_the_streams_requests(served: ServedTransport, order: str) -> None:
    stream = served.stream(order)
    stream.send("1", "2", "3", "4")
    served.service.await_received(4)
    served.service.answer("1")
    assert stream.read_ids(1) == ["1"]
    stream.cancel()
    served.service.await_cancelled(3)
    assert sorted(served.service.cancelled) == ["2", "3", "4"]


def test_a_streams_deadline_holds_for_each_request_and_cancels_it(served: ServedTransport) -> None:
    timeout = 0.1
    ids = ["", ""]
    while not served.service.deadlines.keys() >= set(ids):  # a slow machine may need more time
        timeout *= 2
        ids = [f"1 of {timeout}", f"2 of {timeout}"]
        stream = served.stream(timeout=timeout)
        stream.send(*ids)
        assert stream.end().code() is grpc.StatusCode.DEADLINE_EXCEEDED
    served.service.await_cancelled(len(served.service.received))
    assert served.service.deadlines[ids[0]] == served.service.deadlines[ids[1]] < float("inf")


@pytest.mark.parametrize("order", ["request", "completion"])
def test_a_drain_ends_a_stream_after_its_responses(served: ServedTransport, order: str) -> None:
    stream = served.stream(order)
    stream.send("1", "2")
    served.service.await_received(2)
    refuse_all(served)
    served.service.answer("1", "2")
    assert stream.read_ids(2) == ["1", "2"]
    error = stream.end()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "the server is shutting down; open a stream elsewhere"


def test_a_drain_ends_an_idle_stream_at_once(served: ServedTransport) -> None:
    stream = served.stream()
    stream.send("1")
    served.service.await_received(1)
    served.service.answer("1")
    assert stream.read_ids(1) == ["1"]
    refuse_all(served)
    assert stream.end().code() is grpc.StatusCode.UNAVAILABLE


def test_bytes_that_are_no_message_are_an_error_of_that_request(served: ServedTransport) -> None:
    served.be_real()
    stream = served.stream()
    stream.send_bytes(b"\xff")
    stream.send("2")
    first, second = stream.read(), stream.read()
    assert first.error_message == "the message of 1 bytes is not a ModelInferRequest"
    assert first.infer_response.parameters["tensorferry_status"].string_param == "INVALID_ARGUMENT"
    assert second.infer_response.id == "2"
    assert second.infer_response.parameters["tensorferry_status"].string_param == "NOT_FOUND"


END_ON_ERROR = [("triton_grpc_error", "true")]


def test_the_first_error_ends_a_stream_with_end_on_error(served: ServedTransport) -> None:
    """Earlier requests are answered, later ones are cancelled."""
    stream = served.stream(metadata=END_ON_ERROR)
    stream.send("1", "2", "3", "4")
    served.service.await_received(4)
    served.service.answer("3")
    served.service.fail("2", QueueFull("full", 0.25))
    served.service.answer("1")
    assert stream.read_ids(1) == ["1"]
    error = stream.end()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "Exceeds maximum queue size: full"
    metadata: Any = stream.call.trailing_metadata()
    assert ("grpc-retry-pushback-ms", "250") in [tuple(entry) for entry in metadata]
    served.service.await_cancelled(1)
    assert served.service.cancelled == ["4"]


def test_in_order_of_completion_an_error_ends_the_stream_at_once(served: ServedTransport) -> None:
    stream = served.stream("completion", metadata=END_ON_ERROR)
    stream.send("1", "2", "3")
    served.service.await_received(3)
    served.service.fail("2", InvalidRequestError("what to change"))
    error = stream.end()
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "what to change")
    served.service.await_cancelled(2)
    assert sorted(served.service.cancelled) == ["1", "3"]
