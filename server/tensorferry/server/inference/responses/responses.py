"""Response bytes: the constant parts of a ModelInferResponse are serialised once and reused.

A response too large for a message is refused before the model runs if the shapes show it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorferry.batcher import Outcome
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError, ResponseTooLargeError
from tensorferry.server.inference.reply import Piece
from tensorferry.server.inference.requests.codec import DecodedRequest, ResponseSpec, encode_response
from tensorferry.server.inference.responses.classification import NO_LABELS, Classifier
from tensorferry.server.signature import TensorSpec
from tensorferry.server.wire.fields import encode_varint

_RAW_TAG = pb.ModelInferResponse.DESCRIPTOR.fields_by_name["raw_output_contents"].number << 3 | 2
_ID_TAG = pb.ModelInferResponse.DESCRIPTOR.fields_by_name["id"].number << 3 | 2

# Most models' output shapes differ only in rows. This bounds memory for the others.
_MAX_SHAPES = 64
# Most bytes of a stream's message around a response; and of an output beside its name and its content.
_AROUND, _AROUND_OUTPUT = 64, 160

_HINT = (
    "ask for fewer rows or outputs at once, have outputs in shared memory, or start the server with a larger "
    "--max-message-bytes"
)


class ResponseTemplate:
    """Builds a model version's responses to requests with the same `ResponseSpec`. Thread-safe.

    Raw contents go between bytes that were serialised once for each shape. Typed contents, strings, classes, outputs in
    shared memory and batch descriptions go through protobuf. ResponseTooLargeError for a response of more than `max_bytes`.
    """

    def __init__(
        self,
        model: str,
        version: str,
        response_spec: ResponseSpec,
        classifier: Classifier = NO_LABELS,
        max_bytes: float = math.inf,
    ) -> None:
        self._max_bytes = max_bytes
        self._model = model
        self._version = version
        self.spec = response_spec
        self._classifier = classifier
        self._names = tuple([output.spec.name for output in response_spec.outputs])
        # The name of the only output, the usual case.
        self._only_name = self._names[0] if len(self._names) == 1 else None
        self._through_protobuf = (
            response_spec.typed
            or response_spec.explain
            or any(
                count or span is not None or not spec.datatype.size
                for spec, count, span in response_spec.outputs
            )
        )
        self._head = pb.ModelInferResponse(model_name=model, model_version=version).SerializeToString()
        # Bytes of a response beside its id and its outputs' content.
        described = sum([len(name.encode()) + _AROUND_OUTPUT for name in self._names])
        self._beside = len(self._head) + _AROUND + described
        self._most_content = max_bytes - self._beside
        # By the outputs' shapes. Needs no lock, because threads can only replace a value by an equal one.
        self._constant_parts: dict[tuple[tuple[int, ...], ...], tuple[bytes, ...]] = {}

    def pieces(self, id_field: bytes, outcome: Outcome) -> Sequence[Piece]:
        """Return the serialised response in pieces. `id_field` is the serialised id, b"" for none."""
        if self._through_protobuf:
            message = encode_response(self._model, self._version, self.spec, outcome, self._classifier)
            if (size := message.ByteSize() + len(id_field) + _AROUND) > self._max_bytes:
                raise _too_large(size, self._max_bytes)
            # Protobuf fields may come in any order.
            return message.SerializeToString(), id_field
        outputs = outcome.outputs
        if self._only_name is not None:
            # As below for one output; saves about 1 us of each request.
            array = outputs[self._only_name]
            constant = self._constant_parts.get((array.shape,))
            fits = array.nbytes + len(id_field) <= self._most_content
            if constant is not None and array.flags.c_contiguous and fits:
                return self._head, id_field, constant[0], array
        arrays = [outputs[name] for name in self._names]
        if (size := sum([array.nbytes for array in arrays]) + len(id_field)) > self._most_content:
            raise _too_large(size + self._beside, self._max_bytes)
        shapes = tuple([array.shape for array in arrays])
        constant = self._constant_parts.get(shapes)
        if constant is None:
            constant = self._serialise_constant_parts(shapes, arrays)
        pieces: list[Piece] = [self._head, id_field]
        for before, array in zip(constant, arrays, strict=True):
            pieces.append(before)
            pieces.append(array if array.flags.c_contiguous else array.tobytes())
        return pieces

    def without_outputs(self, id_field: bytes) -> Sequence[Piece]:
        """Return the pieces of a response that has no outputs."""
        return self._head, id_field

    def _serialise_constant_parts(
        self, shapes: tuple[tuple[int, ...], ...], arrays: Sequence[np.ndarray[Any, Any]]
    ) -> tuple[bytes, ...]:
        described = pb.ModelInferResponse()
        for (spec, *_), shape in zip(self.spec.outputs, shapes, strict=True):
            described.outputs.add(name=spec.name, datatype=spec.datatype.name, shape=shape)
        starts = [bytes([_RAW_TAG]) + encode_varint(array.nbytes) for array in arrays]
        constant = (described.SerializeToString() + starts[0], *starts[1:]) if starts else ()
        if len(self._constant_parts) >= _MAX_SHAPES:
            self._constant_parts.clear()
        self._constant_parts[shapes] = constant
        return constant


def id_field_of(request_id: str) -> bytes:
    """Return an id as a serialised field; b"" for none."""
    text = request_id.encode()
    return bytes([_ID_TAG]) + encode_varint(len(text)) + text if text else b""


def check_response_size(decoded: DecodedRequest, batched: bool, max_bytes: float) -> None:
    """Raise InvalidRequestError if the requested outputs are known to have more than `max_bytes`."""
    spec = decoded.response_spec
    if spec.typed:
        # The size of typed contents depends on the values.
        return
    named = decoded.signature.named_lengths(tensor.shape for tensor in decoded.tensors)
    rows = decoded.rows if batched else None
    total = sum(
        [
            _min_bytes(output.spec, rows, named)
            for output in spec.outputs
            if not output.class_count and output.span is None
        ]
    )
    if total > max_bytes:
        names = ", ".join(output.spec.name for output in spec.outputs)
        raise InvalidRequestError(
            f"the response would have {total} bytes (outputs {names}), and this server sends at most {max_bytes:.0f} in a "
            f"message: {_HINT}"
        )


def _min_bytes(spec: TensorSpec, rows: int | None, named: Mapping[str, int | None]) -> int:
    """Return an output's size in bytes, 0 if its shape is unknown."""
    if spec.any_rank:
        return 0
    dims = [length or 0 for length in spec.lengths(named)]
    if rows is not None and dims:
        dims[0] = rows
    return math.prod(dims) * spec.datatype.size


def _too_large(nbytes: int, max_bytes: float) -> ResponseTooLargeError:
    """Return the error of a response whose size is known only after the model has run."""
    return ResponseTooLargeError(
        f"the response has {nbytes} bytes, and this server sends at most {max_bytes:.0f} in a message: {_HINT}"
    )
