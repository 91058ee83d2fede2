"""Metadata, statuses and message limits of calls, the same on both transports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.server.rig import PATIENCE
from support.server.scripted_service import ServedTransport, error_of, success

from tensorferry.batcher import BatcherClosed, QueueFull
from tensorferry.protos import inference_pb2 as pb

Serve = Callable[..., ServedTransport]

UNARY = "/inference.GRPCInferenceService/ModelInfer"
MOST_BYTES = 10_000
LIMITS = [("grpc.max_receive_message_length", MOST_BYTES), ("grpc.max_send_message_length", MOST_BYTES)]
TOO_LARGE = "x" * 2 * MOST_BYTES


def calling(served: ServedTransport) -> Any:
    """Return ModelInfer as a method that sends any number of messages."""
    return served.channel.stream_unary(UNARY)


def message(request_id: str) -> bytes:
    return pb.ModelInferRequest(id=request_id).SerializeToString()


def large(request_id: str) -> Any:
    """Return a response above the limit for the request that asks for one."""
    return success(request_id, 2 * MOST_BYTES if request_id == "large" else 0)


@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
def test_metadata_reaches_the_service(served: ServedTransport, streamed: bool) -> None:
    sent = [("x-text", "plain ~"), ("x-bytes-bin", bytes(range(256))), ("x-text", "twice")]
    if streamed:
        stream = served.stream(metadata=sent)
        stream.send("1")
    else:
        call = served.infer("1", metadata=sent)
    served.service.await_received(1)
    got = [(name, value) for name, value in served.service.metadata["1"] if name.startswith("x-")]
    assert sorted(got, key=str) == sorted(sent, key=str)
    served.service.answer("1")
    assert streamed or call.result(PATIENCE).id == "1"


def test_a_call_that_the_server_ended_with_unavailable_says_so(served: ServedTransport) -> None:
    """By this mark a client knows that the call ended no server."""
    call = served.infer("1")
    served.service.await_received(1)
    served.service.fail("1", BatcherClosed("what to change"))
    status = error_of(call)
    assert (status.code(), status.details()) == (grpc.StatusCode.UNAVAILABLE, "what to change")
    assert tuple(status.trailing_metadata()) == (("tensorferry-answered", "1"),)


@pytest.mark.parametrize(("seconds", "pushback"), [(0.25, "250"), (0.0001, "1")])
def test_a_full_queue_says_when_to_retry_also_in_a_long_status(
    served: ServedTransport, seconds: float, pushback: str
) -> None:
    call = served.infer("1")
    served.service.await_received(1)
    served.service.fail("1", QueueFull("🚢" * 10_000, seconds))
    error = error_of(call)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == pushback
    rich = rpc_status.from_call(error)
    assert (rich.code, rich.message) == (8, error.details())
    assert rich.message.startswith("Exceeds maximum queue size: " + "🚢" * 300)
    (detail,) = rich.details
    hint = error_details_pb2.RetryInfo()
    assert detail.Unpack(hint)
    assert hint.retry_delay.ToNanoseconds() == round(seconds * 1e9)


def test_a_call_without_a_message_is_refused(served: ServedTransport) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        calling(served)(iter([]), timeout=PATIENCE)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "requires exactly one request message" in str(refused.value.details())
    assert served.service.received == []


def test_only_the_first_of_two_messages_is_served(served: ServedTransport) -> None:
    served.service.answer_at_once = success
    answer = calling(served)(iter([message("1"), message("2")]), timeout=PATIENCE)
    assert pb.ModelInferResponse.FromString(answer).id == "1"
    assert served.service.received == ["1"]


@pytest.mark.parametrize("which", [TOO_LARGE, "large"], ids=["request", "response"])
def test_a_message_above_the_limit_ends_its_stream_and_no_other(serve: Serve, which: str) -> None:
    served = serve(options=LIMITS)
    served.service.answer_at_once = large
    stream, other = served.stream(), served.stream()
    for each in (stream, other):
        each.send("1")
        assert each.read_ids(1) == ["1"]
    stream.send(which, "2")
    error = stream.end()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"vs. {MOST_BYTES}" in str(error.details())
    other.send("3")
    assert other.read_ids(1) == ["3"]
