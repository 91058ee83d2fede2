"""Exceptions of the client: class by status code, the server's message, and the retry time, also a malformed one."""

from __future__ import annotations

import pickle

import grpc
import numpy as np
import pytest
from client.calls import call
from client.scripted import ScriptedServer
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tensorferry import client as tf
from tensorferry.client import InferenceClient
from tensorferry.client.errors import from_status
from tensorferry.client.messages.codec import decode_stream
from tensorferry.protos import inference_pb2 as pb

IMAGES = np.arange(128, dtype=np.uint8).reshape(2, 8, 8)


def test_errors_have_the_class_of_their_code(server: ScriptedServer) -> None:
    for code in set(grpc.StatusCode) - {grpc.StatusCode.OK}:
        expected = getattr(tf, code.name.title().replace("_", ""), tf.InferenceError)
        with InferenceClient(server.target, check=False, retry=None) as client:
            for method in ("infer", "submit"):
                server.servicer.failures = [code]
                with pytest.raises(tf.InferenceError) as caught:
                    call(client, method, "digits", {"image": IMAGES}, request_id="r1")
                error = caught.value
                assert type(error) is expected
                assert (error.code, error.message, error.request_id) == (code, "scripted failure", "r1")
                assert str(error) == f"{code.name}: scripted failure (request 'r1')"


def test_errors_survive_pickling() -> None:
    for error in (
        tf.ResourceExhausted(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "r", 0.5),
        tf.InvalidInput("input 'x'", "FP32", "FP64", "cast it", "r"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert vars(again) == vars(error)


def retry_info(**delay: int) -> bytes:
    status = status_pb2.Status(code=8, message="full")
    status.details.add().Pack(error_details_pb2.Help())
    status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(**delay)))
    return bytes(status.SerializeToString())


@pytest.mark.parametrize(
    ("trailers", "pause"),
    [
        ((("grpc-status-details-bin", retry_info(seconds=2)),), 2.0),
        ((("grpc-status-details-bin", b"\xff\xff"),), None),
        ((("grpc-status-details-bin", retry_info(seconds=2)[:-1] + b"\xff"), ("retry-after-ms", "50")), 0.05),
        ((("grpc-status-details-bin", retry_info(seconds=-5)),), None),
        ((("grpc-status-details-bin", retry_info(seconds=(1 << 63) - 1)),), None),
        ((("retry-after-ms", "250"),), 0.25),
        ((("retry-after-ms", "9" * 5000),), None),
        ((("retry-after-ms", "999999999999999"),), None),
        ((("retry-after-ms", "-1"),), None),
    ],
)
def test_trailers(trailers: tuple[tuple[str, str | bytes], ...], pause: float | None) -> None:
    error = from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailers)
    assert isinstance(error, tf.ResourceExhausted)
    assert error.retry_after == pause


def test_a_pause_without_end_in_a_stream() -> None:
    message = pb.ModelStreamInferResponse(error_message="full")
    message.infer_response.parameters["tensorferry_retry_after_ms"].int64_param = (1 << 63) - 1
    outcome = decode_stream(message)
    assert isinstance(outcome, Exception)
    assert outcome.retry_after is None
