"""Calls against a real gRPC server whose answers the test defines."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from client.scripted import Answers, Context, Hang, Requests, ScriptedServer, failed, serving, streamed

from tensorferry.client.load.calls import Calls
from tensorferry.client.load.process import opened
from tensorferry.client.load.records import Target
from tensorferry.protos import inference_pb2 as pb

BODY = pb.ModelInferRequest(model_name="row").SerializeToString()


class Ends(queue.SimpleQueue[Any]):
    """Ends of calls, in order."""

    def next(self) -> Any:
        return self.get(timeout=30)


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def stream(server: ScriptedServer) -> Iterator[Calls]:
    with opened(Target(server.target, metadata=(("x-key", "a"),), stream=True), 1) as (calls,):
        yield calls


def test_the_timeout_is_the_deadline_of_a_unary_call(server: ScriptedServer, ends: Ends) -> None:
    hang = Hang()
    server.servicer.infer = hang.infer
    with opened(Target(server.target, timeout=0.2), 1) as (calls,):
        calls.start(BODY, ends.put)
        assert ends.next()[0] == "DEADLINE_EXCEEDED"
    assert hang.left.wait(30), "the server heard of it"


def test_requests_of_a_stream_have_ids_of_their_own(
    server: ScriptedServer, stream: Calls, ends: Ends
) -> None:
    received: list[str] = []

    def answer(requests: Requests, context: Context) -> Answers:
        first, second, third, fourth = (next(requests) for _ in range(4))
        received.extend(request.id for request in (first, second, third, fourth))
        # Answers are matched by id, not by order.
        yield failed(third.id, "refused", "RESOURCE_EXHAUSTED")
        yield streamed(first)
        yield failed(fourth.id, "no status")
        yield streamed(second)
        next(requests, None)

    server.servicer.stream = answer
    names = [Ends() for _ in range(4)]
    for each in names:
        stream.start(BODY, each.put)
    assert names[0].next() is None
    assert names[1].next() is None
    assert names[2].next() == ("RESOURCE_EXHAUSTED", "refused")
    assert names[3].next() == ("UNKNOWN", "no status")
    assert len(set(received)) == 4
    assert server.metadata_of("ModelStreamInfer")["x-key"] == "a"


def test_a_request_of_a_stream_ends_with_its_last_answer(
    server: ScriptedServer, stream: Calls, ends: Ends
) -> None:
    def answer(requests: Requests, context: Context) -> Answers:
        first, second = next(requests), next(requests)
        for request, final in ((first, False), (second, False), (first, True)):
            several = streamed(request)
            several.infer_response.parameters["triton_final_response"].bool_param = final
            yield several
        yield failed(second.id, "after the first answer", "INTERNAL")
        next(requests, None)

    server.servicer.stream = answer
    stream.start(BODY, ends.put)
    stream.start(BODY, ends.put)
    assert ends.next() is None
    assert ends.next() == ("INTERNAL", "after the first answer")


def test_a_broken_stream_fails_its_requests_and_the_next_opens_another(
    server: ScriptedServer, stream: Calls, ends: Ends
) -> None:
    def broken(requests: Requests, context: Context) -> Answers:
        next(requests)
        context.abort(grpc.StatusCode.INTERNAL, "broken")
        yield pb.ModelStreamInferResponse()

    whole = server.servicer.stream
    server.servicer.stream = broken
    stream.start(BODY, ends.put)
    assert ends.next() == ("INTERNAL", "broken")
    server.servicer.stream = whole
    stream.start(BODY, ends.put)
    assert ends.next() is None


def test_a_stream_that_the_server_ends(server: ScriptedServer, stream: Calls, ends: Ends) -> None:
    def first_of_two(requests: Requests, context: Context) -> Answers:
        first, _ = next(requests), next(requests)
        yield streamed(first)

    server.servicer.stream = first_of_two
    other = Ends()
    stream.start(BODY, ends.put)
    stream.start(BODY, other.put)
    assert ends.next() is None
    assert other.next() == ("UNAVAILABLE", "the server ended the stream")


def test_requests_of_a_stream_expire(
    server: ScriptedServer, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("tensorferry.client.load.calls.time.monotonic", lambda: now)
    hang = Hang()
    server.servicer.stream = hang.stream
    with opened(Target(server.target, timeout=5.0, stream=True), 1) as (calls,):
        calls.start(BODY, ends.put)
        assert ends.next() is None
        calls.start(BODY, ends.put)
        now = 1004.9
        calls.expire()
        now = 1005.1
        calls.expire()
        assert ends.next()[0] == "DEADLINE_EXCEEDED"


def test_a_late_answer_of_a_stream_is_a_failure(
    server: ScriptedServer, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1000.0, 1006.0])
    with opened(Target(server.target, timeout=5.0, stream=True), 1) as (calls,):
        monkeypatch.setattr("tensorferry.client.load.calls.time.monotonic", lambda: next(times))
        calls.start(BODY, ends.put)
        assert ends.next()[0] == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("version", ["", "1"], ids=["without a version", "with a version"])
def test_a_stream_with_other_messages_fails_its_requests(ends: Ends, version: str) -> None:
    """Streams of MLServer have ModelInferResponse messages; with a version they are no ModelStreamInferResponse at all."""

    def answer(requests: Iterator[Any], context: Context) -> Iterator[pb.ModelInferResponse]:
        next(requests)
        yield pb.ModelInferResponse(model_name="row", model_version=version, id="1")

    handler = grpc.stream_stream_rpc_method_handler(
        answer, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
    )
    with (
        serving({"ModelStreamInfer": handler}) as address,
        opened(Target(address, stream=True), 1) as (calls,),
    ):
        # The second request opens another stream.
        for _ in range(2):
            calls.start(BODY, ends.put)
            code, message = ends.next()
            assert code == "UNKNOWN"
            assert "answers no request, so the server may have other streams" in message
