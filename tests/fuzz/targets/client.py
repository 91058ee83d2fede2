"""The bundled client on arbitrary answers: a result, or one of its own errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from fuzz.target import ANSWERED, FindingError, Shape, Target, timed
from fuzz.world import WORDS, requests
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tensorferry.client.errors import InferenceError, from_status
from tensorferry.client.inflight import InFlight
from tensorferry.client.messages.codec import decode, decode_stream
from tensorferry.client.messages.metadata import ModelMetadata, ModelStatus, ServerMetadata
from tensorferry.client.messages.results import InferenceResult
from tensorferry.protos import inference_pb2 as pb

_KINDS = (
    pb.ModelInferResponse, pb.ModelStreamInferResponse, pb.ModelMetadataResponse, pb.ServerMetadataResponse,
    pb.RepositoryIndexResponse, status_pb2.Status,
)  # fmt: skip
_TEXT = len(_KINDS)
# A plausible pause is finite and not negative.
_LONGEST_PAUSE = 1e10


class ClientTarget(Target):
    """An input is the number of a kind of answer, and its bytes; the last kind is a text in a trailer."""

    name = "client"
    words: Sequence[str] = (*WORDS, "tensorferry_status", "tensorferry_retry_after_ms", "RESOURCE_EXHAUSTED", "INTERNAL", "OK", "READY",
             "type.googleapis.com/google.rpc.RetryInfo")  # fmt: skip

    def __init__(self, directory: Path) -> None:
        """Ignore the directory."""

    def seeds(self) -> Sequence[bytes]:
        made: list[tuple[int, Any]] = []
        for sent in requests()[:14]:
            answer = pb.ModelInferResponse(model_name=sent.model_name, model_version="1", id=sent.id)
            for tensor in sent.inputs:
                output = answer.outputs.add(
                    name=f"{tensor.name}_out", datatype=tensor.datatype, shape=tensor.shape
                )
                if tensor.HasField("contents"):
                    output.contents.CopyFrom(tensor.contents)
            answer.raw_output_contents.extend(sent.raw_input_contents)
            answer.parameters["batch_rows"].int64_param = 1
            made += [(0, answer), (1, pb.ModelStreamInferResponse(infer_response=answer))]
        failed = pb.ModelStreamInferResponse(error_message="full")
        failed.infer_response.id = "1"
        failed.infer_response.parameters["tensorferry_status"].string_param = "RESOURCE_EXHAUSTED"
        failed.infer_response.parameters["tensorferry_retry_after_ms"].int64_param = 20
        model = pb.ModelMetadataResponse(name="m", versions=["1"], platform="onnxruntime_onnx")
        model.inputs.add(name="x", datatype="FP32", shape=[-1, 3])
        index = pb.RepositoryIndexResponse()
        index.models.add(name="m", version="1", state="READY")
        status = status_pb2.Status(code=8, message="full")
        status.details.add().Pack(
            error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=5))
        )
        other = status_pb2.Status(code=8, details=[any_pb2.Any(type_url="other")])
        server = pb.ServerMetadataResponse(name="t", version="1", extensions=["a"])
        made += [(1, failed), (2, model), (3, server), (4, index), (5, status), (5, other)]
        messages = [bytes([number]) + each.SerializeToString(deterministic=True) for number, each in made]
        return [*messages, *(bytes([_TEXT]) + text for text in (b"250", b"-1", b"1e9"))]

    def shape(self, data: bytes) -> Shape:
        front = data[:1] or b"\0"
        number = front[0] % (_TEXT + 1)
        return Shape(front, None if number == _TEXT else _KINDS[number])

    def run(self, data: bytes) -> str:
        front, _ = self.shape(data)
        with timed():
            try:
                return self._read(front[0] % (_TEXT + 1), data[1:])
            except InferenceError as error:
                return _named(error)

    def _read(self, number: int, data: bytes) -> str:
        if number == _TEXT:
            text = data.decode("latin-1")
            return _named(from_status(grpc.StatusCode.UNAVAILABLE, text, (("retry-after-ms", text),)))
        if number == 5:
            trailers = (("grpc-status-details-bin", data), ("retry-after-ms", "5"))
            return _named(from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, None, trailers))
        try:
            message: Any = _KINDS[number].FromString(data)
        except Exception:
            # grpcio parses it, and reports INTERNAL itself.
            return "UNREADABLE"
        match number:
            case 0:
                _look_at(decode(message))
            case 1:
                outcome = decode_stream(message)
                _settle(message.infer_response.id, outcome)
                if isinstance(outcome, InferenceError):
                    return _named(outcome)
                _look_at(outcome)
            case 2:
                str(ModelMetadata.from_message(message))
            case 3:
                str(ServerMetadata.from_message(message))
            case _:
                str(ModelStatus.from_message(message))
        return ANSWERED


def _look_at(result: InferenceResult) -> None:
    for name in result:
        if result[name].nbytes < 0:
            raise FindingError(name)
    dict(result.parameters)


def _settle(request_id: str, outcome: InferenceResult | InferenceError) -> None:
    """Deliver the answer to a stream that waits for the ids 1 and 2."""
    waiting = InFlight(4, ordered=True)
    waiting.add("1")
    waiting.add("2")
    try:
        waiting.settle(request_id, outcome)
    except InferenceError:
        pass
    while waiting.take() is not None:
        pass


def _named(error: InferenceError) -> str:
    str(error)
    pause = error.retry_after
    if pause is not None and not 0 <= pause <= _LONGEST_PAUSE:
        raise FindingError(f"the client is to wait for {pause} s")
    return f"client {error.code.name}"
