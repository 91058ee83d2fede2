"""ModelInfer over gRPC: statuses, retry hints, deadlines and clients that leave."""

from __future__ import annotations

import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.server.rig import PATIENCE
from support.server.scripted_service import ServedTransport, error_of

from tensorferry.batcher import BatcherClosed, QueueFull
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("what to change"), "INVALID_ARGUMENT"),
        (BatcherClosed("what to change"), "UNAVAILABLE"),
    ],
)
def test_an_error_is_the_calls_status(served: ServedTransport, error: Exception, code: str) -> None:
    call = served.infer("1")
    served.service.await_received(1)
    served.service.fail("1", error)
    status = error_of(call)
    assert (status.code(), status.details()) == (grpc.StatusCode[code], "what to change")
    # By which a client knows that the call ended no server.
    answered = (("tensorferry-answered", "1"),) if code == "UNAVAILABLE" else ()
    assert tuple(status.trailing_metadata()) == answered


def test_an_unexpected_error_does_not_leak_its_text(
    served: ServedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    call = served.infer("1")
    served.service.await_received(1)
    served.service.fail("1", RuntimeError("a secret"))
    status = error_of(call)
    assert status.code() is grpc.StatusCode.INTERNAL
    assert status.details() == "internal error; the server's log has the details"
    assert "a secret" in caplog.text
    caplog.clear()  # its frames hold the call


@pytest.mark.parametrize(("seconds", "pushback"), [(0.25, "250"), (0.0001, "1")])
def test_a_full_queue_says_when_to_retry(served: ServedTransport, seconds: float, pushback: str) -> None:
    call = served.infer("1")
    served.service.await_received(1)
    served.service.fail("1", QueueFull("full", seconds))
    error = error_of(call)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == pushback
    rich = rpc_status.from_call(error)
    assert (rich.code, rich.message) == (8, "Exceeds maximum queue size: full")
    (detail,) = rich.details
    hint = error_details_pb2.RetryInfo()
    assert detail.Unpack(hint)
    assert hint.retry_delay.ToNanoseconds() == round(seconds * 1e9)


@pytest.mark.parametrize("letter", ["x", "🚢"])
def test_a_status_reaches_the_client_however_long_its_quotes_are(
    served: ServedTransport, letter: str
) -> None:
    served.be_real()
    with pytest.raises(grpc.RpcError) as caught:
        served.stub.ModelInfer(pb.ModelInferRequest(model_name=letter * 100_000), timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"model_name has {100_000 * len(letter.encode())} bytes" in str(caught.value.details())


def test_a_deadline_is_passed_on_and_cancels_the_request(served: ServedTransport) -> None:
    before = time.monotonic()
    call = served.infer("1", timeout=0.2)
    assert error_of(call).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    if served.service.received:  # a deadline may pass before the server has read the call
        served.service.await_cancelled(1)
        assert before < served.service.deadlines["1"] < time.monotonic() + 0.2
