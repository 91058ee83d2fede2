"""Requests above the limits of a server: split on axis 0, and their results joined.

Pure functions. Only a server that states its limits has its requests split. It states them for
models whose rows are independent, so the parts give the same results as the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages import checks, codec
from tensorferry.client.messages.codec import StreamRequest
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.client.messages.results import InferenceResult
from tensorferry.client.messages.several_answers import of_sequence
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

# Properties of a model's metadata.
MAX_ROWS = "max_request_rows"
MAX_BYTES = "max_message_bytes"

# Allowance for all of an answer but the contents of its outputs, in bytes.
_ANSWER_OVERHEAD = 4096
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows of the largest request, bytes of the largest message, and bytes of an answer's row as far as known."""

    rows: int
    nbytes: int
    answer_row: int

    @property
    def answer_nbytes(self) -> int:
        """Bytes of the largest contents of an answer."""
        return self.nbytes - min(_ANSWER_OVERHEAD, self.nbytes // 2)

    def admit(self, message: pb.ModelInferRequest) -> bool:
        """Return whether the request is within the limits. It is called for each request."""
        rows, contents = 0, 0.0
        for tensor in message.inputs:
            shape, size = tensor.shape[:], tensors.DATATYPES[tensor.datatype].size
            rows = max([rows, *shape[:1]])
            contents += math.prod(shape) * size if size else math.inf
        if rows > self.rows or rows * self.answer_row > self.answer_nbytes:
            return False
        # ByteSize serializes the message, so it is called only for strings, and near the limit.
        return contents <= self.nbytes // 2 or message.ByteSize() <= self.nbytes


def limits_of(metadata: ModelMetadata, max_message_bytes: int) -> Limits | None:
    """Return the limits that the server states, the client's own included; None if it states none."""
    rows, nbytes = (metadata.properties.get(name, "") for name in (MAX_ROWS, MAX_BYTES))
    if not all(text.isdecimal() and 0 < len(text) <= _MOST_DIGITS and int(text) for text in (rows, nbytes)):
        return None
    answer_row = _answer_row(metadata, [tensor.name for tensor in metadata.outputs])
    return Limits(int(rows), min(int(nbytes), max_message_bytes), answer_row)


def split(
    request: StreamRequest, message: pb.ModelInferRequest, metadata: ModelMetadata, limits: Limits
) -> Iterator[pb.ModelInferRequest]:
    """Yield the message, or messages of parts of the request that are within the limits.

    Parts are of equal size, except that a part that is still too large is split again: strings
    differ in length. One row that is too large, a request of a sequence, and inputs that do not
    fit together are left for the server to refuse.
    """
    names = [tensor.name for tensor in metadata.inputs if tensor.shape[:1] == (-1,)]
    sizes = {tensor.shape[0] for tensor in message.inputs if tensor.name in names}
    rows = sizes.pop() if len(sizes) == 1 else 0
    count = min(rows, _parts(message, rows, metadata, limits))
    if count < 2 or of_sequence(message):
        yield message
        return
    arrays = checks.check_inputs(cast("dict[str, object]", request.inputs), metadata)
    bounds = (rows * part // count for part in range(count + 1))
    for first, last in itertools.pairwise(bounds):
        inputs = {name: array[first:last] if name in names else array for name, array in arrays.items()}
        part = replace(request, inputs=inputs)
        encoded = codec.encode(message.model_name, message.model_version, part, metadata)
        yield from split(part, encoded, metadata, limits)


def join(results: Sequence[InferenceResult]) -> InferenceResult:
    """Return the results of the parts as one; its other fields are those of the first."""
    if len(results) == 1:
        return results[0]
    outputs: dict[str, Array] = {}
    for name in dict.fromkeys(itertools.chain(*(result.outputs for result in results))):
        arrays = [result.outputs[name] for result in results if name in result.outputs]
        shapes = {array.shape[1:] if array.ndim else None for array in arrays}
        if len(arrays) < len(results) or len(shapes) > 1 or None in shapes:
            raise InvalidInput(
                f"a request of model {results[0].model_name!r} in {len(results)} parts",
                f"answers that can be joined along the rows of output {name!r}",
                ", ".join(str(list(array.shape)) for array in arrays[:4]),
                "send fewer rows at once",
            )
        outputs[name] = np.concatenate(arrays)
    return replace(results[0], outputs=outputs)


def _parts(message: pb.ModelInferRequest, rows: int, metadata: ModelMetadata, limits: Limits) -> int:
    """Return how many parts are needed for the rows, the bytes sent, and the bytes of the answer."""
    size = message.ByteSize()
    contents = sum(map(len, message.raw_input_contents))
    wanted = [output.name for output in message.outputs] or [tensor.name for tensor in metadata.outputs]
    answer = rows * _answer_row(metadata, wanted)
    parts = max(1, -(-rows // limits.rows))
    if size > limits.nbytes:
        parts = max(parts, -(-contents // max(1, limits.nbytes - (size - contents))))
    return max(parts, -(-answer // limits.answer_nbytes))


def _answer_row(metadata: ModelMetadata, outputs: Sequence[str]) -> int:
    """Return the bytes of one row of these outputs, without strings and dynamic axes, whose size is unknown."""
    return sum(
        tensors.DATATYPES[tensor.datatype].size * math.prod(tensor.shape[1:])
        for tensor in metadata.outputs
        if tensor.name in outputs
        and tensor.datatype in tensors.DATATYPES
        and min(tensor.shape[1:], default=0) >= 0
    )
