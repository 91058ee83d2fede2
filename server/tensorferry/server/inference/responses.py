"""Response bytes: the static parts of a ModelInferResponse are built once, the rest is put between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tensorferry.batcher import Outcome
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference.classification import PLAIN, Classifier
from tensorferry.server.inference.codec import ResponseSpec, encode_response
from tensorferry.server.inference.response_size import too_large
from tensorferry.server.status import Status
from tensorferry.server.wire.fields import encode_varint

# A piece of a serialised message: bytes, or an array in row-major order whose bytes are meant.
Piece = Any

# The gRPC code of an error inside a stream, and when to retry, which the message has no fields for.
STATUS_PARAMETER = "tensorferry_status"
RETRY_PARAMETER = "tensorferry_retry_after_ms"

_RAW_TAG = pb.ModelInferResponse.DESCRIPTOR.fields_by_name["raw_output_contents"].number << 3 | 2
_RESPONSE_TAG = pb.ModelStreamInferResponse.DESCRIPTOR.fields_by_name["infer_response"].number << 3 | 2
_ID_TAG = pb.ModelInferResponse.DESCRIPTOR.fields_by_name["id"].number << 3 | 2

# Every response of a stream is the last one to its request, and says so as Triton's do.
FINAL_PARAMETER = "triton_final_response"
_FINAL = pb.ModelInferResponse(
    parameters={FINAL_PARAMETER: pb.InferParameter(bool_param=True)}
).SerializeToString()

# Shapes of outputs differ in their rows, mostly: a bound for the models where they differ in more.
_MOST_SHAPES = 64


class ResponseTemplate:
    """Builds the responses of a model version to requests that want the same. Thread-safe.

    Raw contents are put between bytes that were serialised once for each shape. Typed contents,
    strings, classes, outputs in shared memory and an explained batch go through protobuf. LimitError for a response of
    more than `most_bytes`.
    """

    def __init__(
        self,
        model: str,
        version: str,
        wanted: ResponseSpec,
        classifier: Classifier = PLAIN,
        most_bytes: float = math.inf,
    ) -> None:
        self._most_bytes = most_bytes
        self._model = model
        self._version = version
        self._wanted = wanted
        self._classifier = classifier
        self._names = tuple([spec.name for spec in wanted.outputs])
        # Where there is just one, the usual case.
        self._name = self._names[0] if len(self._names) == 1 else None
        strings = any(spec.datatype.size == 0 for spec in wanted.outputs)
        self._through_protobuf = (
            wanted.typed or wanted.explain or strings or bool(wanted.classes or wanted.places)
        )
        self._head = pb.ModelInferResponse(model_name=model, model_version=version).SerializeToString()
        # Replaced by equal values at worst, so it needs no lock.
        self._fixed: dict[tuple[tuple[int, ...], ...], tuple[bytes, ...]] = {}

    def pieces(self, id_field: bytes, outcome: Outcome) -> Sequence[Piece]:
        """The serialised response in pieces; `id_field` is the serialised field of the id, b"" for none."""
        if self._through_protobuf:
            message = encode_response(self._model, self._version, self._wanted, outcome, self._classifier)
            if (size := message.ByteSize()) > self._most_bytes:
                raise too_large(size, self._most_bytes)
            # In whatever order: a reader of protobuf takes the fields as they come.
            return message.SerializeToString(), id_field
        outputs = outcome.outputs
        if self._name is not None:
            # As below, for the one.
            array = outputs[self._name]
            known = self._fixed.get((array.shape,))
            if known is not None and array.flags.c_contiguous and array.nbytes <= self._most_bytes:
                return self._head, id_field, known[0], array
        arrays = [outputs[name] for name in self._names]
        if (size := sum([array.nbytes for array in arrays])) > self._most_bytes:
            raise too_large(size, self._most_bytes)
        shapes = tuple([array.shape for array in arrays])
        fixed = self._fixed.get(shapes)
        if fixed is None:
            fixed = self._remember(shapes, arrays)
        pieces: list[Piece] = [self._head, id_field]
        for before, array in zip(fixed, arrays, strict=True):
            pieces.append(before)
            pieces.append(array if array.flags.c_contiguous else array.tobytes())
        return pieces

    def _remember(
        self, shapes: tuple[tuple[int, ...], ...], arrays: Sequence[np.ndarray[Any, Any]]
    ) -> tuple[bytes, ...]:
        described = pb.ModelInferResponse()
        for spec, shape in zip(self._wanted.outputs, shapes, strict=True):
            described.outputs.add(name=spec.name, datatype=spec.datatype.name, shape=shape)
        starts = [bytes([_RAW_TAG]) + encode_varint(array.nbytes) for array in arrays]
        fixed = (described.SerializeToString() + starts[0], *starts[1:]) if starts else ()
        if len(self._fixed) >= _MOST_SHAPES:
            self._fixed.clear()
        self._fixed[shapes] = fixed
        return fixed


def stream_response(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """The pieces of a ModelStreamInferResponse with this response, which is the last to its request."""
    size = sum([piece.nbytes if isinstance(piece, np.ndarray) else len(piece) for piece in pieces])
    # In front, since a reader of protobuf takes the fields as they come.
    return (_stream_head(size), *pieces)


# A model's responses have few sizes, mostly one.
@lru_cache(maxsize=256)
def _stream_head(size: int) -> bytes:
    return bytes([_RESPONSE_TAG]) + encode_varint(size + len(_FINAL)) + _FINAL


def stream_error(request_id: str, addressed: tuple[str, str], status: Status) -> bytes:
    """A serialised ModelStreamInferResponse that says what went wrong, with which request to which model and version."""
    response = pb.ModelStreamInferResponse(error_message=status.message)
    response.infer_response.id = request_id
    response.infer_response.model_name, response.infer_response.model_version = addressed
    parameters = response.infer_response.parameters
    parameters[FINAL_PARAMETER].bool_param = True
    parameters[STATUS_PARAMETER].string_param = status.code.name
    if status.retry_after is not None:
        parameters[RETRY_PARAMETER].int64_param = max(1, round(status.retry_after * 1e3))
    return response.SerializeToString()


def id_field_of(request_id: str) -> bytes:
    """The serialised field of an id; b"" for none."""
    text = request_id.encode()
    return bytes([_ID_TAG]) + encode_varint(len(text)) + text if text else b""
