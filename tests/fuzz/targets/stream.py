"""ModelStreamInfer in the servicer: an input is a call's metadata and its messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzz.target import FindingError, Shape, Target, timed
from fuzz.world import WORDS, World, requests

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.inference.responses.stream_responses import (
    END_ON_ERROR,
    STREAM_ORDER,
    parse_stream_options,
)
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.status import Status
from tensorferry.server.transport.call_admission import StreamAdmission
from tensorferry.server.transport.threaded_stream import ResponseStream
from tensorferry.server.wire import structure

_NAMES = (
    STREAM_ORDER, END_ON_ERROR, "traceparent", "tracestate", "authorization", "grpc-timeout",
    "x-request-id",
)  # fmt: skip
_VALUES = (
    "request", "completion", "true", "false", "", "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "é",
    "Bearer x",
)  # fmt: skip
_MOST_MESSAGES = 16


class StreamTarget(Target):
    """Each message has one response, with its id, in the requested order; or the stream ends with a
    status.

    An input is two bytes for the metadata, then messages, each with its length in two bytes.
    """

    name = "stream"
    words: Sequence[str] = WORDS

    def __init__(self, directory: Path) -> None:
        self._world = World(directory)
        self._world.register()
        self._service = InferenceService(self._world.registry, regions=self._world.regions)

    def seeds(self) -> Sequence[bytes]:
        small = [r.SerializeToString(deterministic=True) for r in requests() if r.ByteSize() < 2000]
        made = [
            _joined(front, small[at : at + 5])
            for at, front in enumerate((b"\0\0", b"\0\1", b"\1\2", b"\2\5"))
        ]
        return [
            *made,
            _joined(b"\0\0", []),
            _joined(b"\0\0", [small[0], b"\xff", small[1]]),
            _joined(b"\1\2", [b"\xff"]),
        ]

    def shape(self, data: bytes) -> Shape:
        # The last message takes the remaining bytes, whatever its stated length.
        at = last = 2
        while at + 2 < len(data):
            last = at
            at += 2 + int.from_bytes(data[at : at + 2], "little")
        return Shape(data[:last] + b"\xff\xff", pb.ModelInferRequest)

    def run(self, data: bytes) -> str:
        metadata, messages = _split(data)
        options = parse_stream_options(metadata)
        if isinstance(options, Status):
            return options.code.name
        with timed():
            stream = ResponseStream(
                self._service,
                math.inf,
                admission=StreamAdmission(options),
                max_in_flight=3,
                metadata=metadata,
            )
            try:
                responses = [
                    pb.ModelStreamInferResponse.FromString(each) for each in stream.responses(iter(messages))
                ]
            finally:
                stream.close()
        self._world.check()
        return _outcome(options, messages, responses, stream.end)

    def check(self) -> None:
        self._world.check()

    def close(self) -> None:
        self._world.close()


def _outcome(options: Any, messages: list[bytes], responses: list[Any], end: Status | None) -> str:
    codes = []
    for response in responses:
        status = response.infer_response.parameters["tensorferry_status"].string_param
        if status == "INTERNAL":
            raise FindingError(f"answered with INTERNAL: {response.error_message}")
        if bool(response.error_message) != bool(status):
            raise FindingError(f"{status!r} with the message {response.error_message!r}")
        if not response.infer_response.parameters["triton_final_response"].bool_param:
            raise FindingError("a response that is not the last to its request")
        codes.append(status or "OK")
    if end is not None:
        if not options.end_on_error or end.code.name in ("INTERNAL", "OK"):
            raise FindingError(f"the stream ended with {end}")
        return end.code.name
    ids = [_id_of(message) for message in messages]
    answered = [response.infer_response.id for response in responses]
    if (answered if options.ordered else sorted(answered)) != (ids if options.ordered else sorted(ids)):
        raise FindingError(f"the ids {answered} for the requests {ids}")
    # The first of several errors.
    return next((code for code in codes if code != "OK"), "OK")


def _id_of(message: bytes) -> str:
    try:
        structure.check_message(message, pb.ModelInferRequest)
    except InvalidRequestError:
        return structure.peek_request_id(message)
    try:
        return str(pb.ModelInferRequest.FromString(message).id)
    except Exception:
        return ""


def _joined(front: bytes, messages: Sequence[bytes]) -> bytes:
    return front + b"".join(len(message).to_bytes(2, "little") + message for message in messages)


def _split(data: bytes) -> tuple[list[tuple[str, str]], list[bytes]]:
    front, rest = data[:2].ljust(2, b"\0"), data[2:]
    metadata = []
    if front[0]:
        metadata.append((_NAMES[(front[0] - 1) % len(_NAMES)], _VALUES[front[1] % len(_VALUES)]))
        metadata.append((_NAMES[front[1] % len(_NAMES)], _VALUES[front[0] % len(_VALUES)]))
    messages: list[bytes] = []
    while rest and len(messages) < _MOST_MESSAGES:
        size = int.from_bytes(rest[:2], "little")
        messages.append(rest[2 : 2 + size])
        rest = rest[2 + size :]
    return metadata, messages
