"""Malformed retry times in trailers: the error is raised without a retry time."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tensorferry.client.errors import ResourceExhausted, from_status
from tensorferry.client.messages.codec import decode_stream
from tensorferry.protos import inference_pb2 as pb


def retry_info(**delay: int) -> bytes:
    status = status_pb2.Status(code=8, message="full")
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
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after == pause


def test_a_pause_without_end_in_a_stream() -> None:
    message = pb.ModelStreamInferResponse(error_message="full")
    message.infer_response.parameters["tensorferry_retry_after_ms"].int64_param = (1 << 63) - 1
    outcome = decode_stream(message)
    assert isinstance(outcome, Exception)
    assert outcome.retry_after is None
