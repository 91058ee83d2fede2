"""Messages of several calls: their requests joined on axis 0, and the rows of the answer for each call.

Pure and thread-safe functions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Datatype, TensorError

# The length before each element of BYTES in raw contents.
_LENGTH = struct.Struct("<I")


def rows_of(request: pb.ModelInferRequest) -> int:
    """Return the rows of a request that has a form."""
    return int(request.inputs[0].shape[0])


def join(requests: Sequence[pb.ModelInferRequest]) -> pb.ModelInferRequest:
    """Return one request with the rows of all, in this order. They have the same form."""
    first = requests[0]
    rows = sum(map(rows_of, requests))
    joined = pb.ModelInferRequest(
        model_name=first.model_name,
        model_version=first.model_version,
        outputs=first.outputs,
        parameters=first.parameters,
    )
    for at, tensor in enumerate(first.inputs):
        joined.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[rows, *tensor.shape[1:]])
        # Rows of raw contents follow each other without gaps, also those of BYTES.
        contents = [request.raw_input_contents[at] for request in requests]
        joined.raw_input_contents.append(b"".join(contents))
    return joined


def split(answer: pb.ModelInferResponse, rows: Sequence[int]) -> list[pb.ModelInferResponse] | None:
    """Return the answer to each request, given their rows; None if the joined answer does not have these rows."""
    ends = list(accumulate(rows))
    spans = list(zip((0, *ends), ends, strict=False))
    parts = [
        pb.ModelInferResponse(
            model_name=answer.model_name,
            model_version=answer.model_version,
            id=answer.id,
            parameters=answer.parameters,
        )
        for _ in spans
    ]
    raw = answer.raw_output_contents
    if raw and len(raw) != len(answer.outputs):
        return None
    for at, tensor in enumerate(answer.outputs):
        total, *shape = tensor.shape or (0,)
        if total != ends[-1]:
            return None
        try:
            kind = tensors.datatype(tensor.datatype)
            width = tensors.element_count(shape)
            if raw:
                _split_raw(parts, spans, raw[at], kind, width)
            elif not _has_typed(tensor, kind, total * width):
                return None
        except (TensorError, struct.error):
            return None
        for part, (start, end) in zip(parts, spans, strict=True):
            mine = part.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=[end - start, *shape])
            mine.parameters.MergeFrom(tensor.parameters)
            if not raw:
                assert kind.contents is not None
                values = getattr(tensor.contents, kind.contents)[start * width : end * width]
                getattr(mine.contents, kind.contents).extend(values)
    return parts


def _split_raw(
    parts: Sequence[pb.ModelInferResponse],
    spans: Sequence[tuple[int, int]],
    raw: bytes,
    kind: Datatype,
    width: int,
) -> None:
    """Give each part its rows of raw contents; TensorError if their size is wrong."""
    total = spans[-1][1]
    tensors.check_raw(raw, kind, (total, width))
    if kind.size:
        size = width * kind.size
        offsets = [row * size for row in range(total + 1)]
    else:
        offsets = _row_offsets(raw, total, width)
    for part, (start, end) in zip(parts, spans, strict=True):
        part.raw_output_contents.append(raw[offsets[start] : offsets[end]])


def _row_offsets(raw: bytes, rows: int, width: int) -> list[int]:
    """Return where each row of BYTES begins, and where the last one ends."""
    offsets = [0]
    at = 0
    for _ in range(rows):
        for _ in range(width):
            at += 4 + _LENGTH.unpack_from(raw, at)[0]
        offsets.append(at)
    if at != len(raw):
        raise TensorError(f"the elements have {at} bytes, the contents {len(raw)}")
    return offsets


def _has_typed(tensor: pb.ModelInferResponse.InferOutputTensor, kind: Datatype, count: int) -> bool:
    """Return whether the tensor's typed contents are `count` elements of its datatype."""
    filled = [field.name for field, _ in tensor.contents.ListFields()]
    if kind.contents is None or any(field != kind.contents for field in filled):
        return False
    return len(getattr(tensor.contents, kind.contents)) == count
