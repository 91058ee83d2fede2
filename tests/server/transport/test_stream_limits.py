"""Limits on what one client can make the server hold: requests in flight, and streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from support.server.rig import PATIENCE
from support.server.scripted_service import ScriptedService, ServedTransport, success

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference.reply import InferenceCall
from tensorferry.server.inference.responses.stream_responses import StreamOptions
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.transport.call_admission import StreamAdmission
from tensorferry.server.transport.threaded_stream import ResponseStream

Serve = Callable[..., ServedTransport]

LIMIT = 4


@pytest.mark.parametrize("order", ["request", "completion"])
def test_no_more_than_the_limit_is_in_flight(serve: Serve, order: str) -> None:
    """Each response that is sent makes room for one more request."""
    served = serve(max_in_flight=LIMIT)
    stream = served.stream(order)
    ids = [str(number) for number in range(30)]
    stream.send(*ids)
    for sent, request_id in enumerate(ids):
        served.service.await_received(min(LIMIT + sent, len(ids)))
        assert served.service.received == ids[: LIMIT + sent]
        served.service.answer(request_id)
        assert stream.read_ids(1) == [request_id]


def test_streams_beyond_the_limit_are_refused(serve: Serve) -> None:
    served = serve(max_streams=2)
    streams = [served.stream() for _ in range(2)]
    for number, stream in enumerate(streams):
        stream.send(str(number))
    served.service.await_received(2)
    error = served.stream().end()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == (
        "2 streams are open, which is the most this server keeps; close one, or send several requests in one stream"
    )
    served.service.answer("0", "1")
    assert [stream.read_ids(1) for stream in streams] == [["0"], ["1"]]


def response_stream(service: ScriptedService) -> ResponseStream:
    admission = StreamAdmission(StreamOptions())
    return ResponseStream(service, float("inf"), admission=admission, max_in_flight=LIMIT)


def test_a_finished_reader_is_joined_and_its_stream_is_not_ended_by_a_drain() -> None:
    service = ScriptedService(ModelRegistry())
    service.answer_at_once = success
    before = set(threading.enumerate())
    stream = response_stream(service)
    responses = stream.responses(iter([pb.ModelInferRequest(id="1").SerializeToString()]))
    assert pb.ModelStreamInferResponse.FromString(next(responses)).infer_response.id == "1"
    for reader in set(threading.enumerate()) - before:
        reader.join(PATIENCE)
    stream.drain()
    assert list(responses) == []
    assert not stream.end
    assert set(threading.enumerate()) <= before


def test_a_disconnect_during_submit_cancels_the_request() -> None:
    class Leaving(ScriptedService):
        def submit(self, *arguments: Any, **options: Any) -> InferenceCall:
            call = super().submit(*arguments, **options)
            stream.close()
            return call

    service = Leaving(ModelRegistry())
    stream = response_stream(service)
    messages = iter([pb.ModelInferRequest(id=request_id).SerializeToString() for request_id in "123"])
    assert list(stream.responses(messages)) == []
    service.await_cancelled(1)
    assert service.received == service.cancelled == ["1"]
