"""Responses that no message can hold, refused before the model runs where the shapes tell."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tensorferry.server.errors import InvalidRequestError, LimitError
from tensorferry.server.inference.codec import DecodedRequest
from tensorferry.server.shapes.no_rows import named_dimensions
from tensorferry.server.signature import Signature, TensorSpec

_CURE = (
    "ask for fewer rows or outputs at once, have outputs in shared memory, or start the server with a larger "
    "--max-message-bytes"
)


def check_response_size(signature: Signature, batched: bool, decoded: DecodedRequest, most: float) -> None:
    """InvalidRequestError if the outputs asked for are known to have more than `most` bytes."""
    wanted = decoded.wanted
    if wanted.typed:
        # Its size depends on the values.
        return
    lengths = named_dimensions(signature, decoded.tensors)
    total = 0
    for index, spec in enumerate(wanted.outputs):
        in_message = not (wanted.places and wanted.places[index]) and not (
            wanted.classes and wanted.classes[index]
        )
        if in_message:
            total += _least_bytes(spec, decoded.rows if batched else None, lengths)
    if total > most:
        names = ", ".join(spec.name for spec in wanted.outputs)
        raise InvalidRequestError(
            f"the response would have {total} bytes (outputs {names}), and this server sends at most {most:.0f} in a "
            f"message: {_CURE}"
        )


def _least_bytes(spec: TensorSpec, rows: int | None, lengths: Mapping[str, int | None]) -> int:
    """Bytes of an output, 0 where its shape is not known."""
    if spec.any_rank:
        return 0
    dims = [dim if isinstance(dim, int) else lengths.get(dim) or 0 for dim in spec.dims]
    if rows is not None and dims:
        dims[0] = rows
    return math.prod(dims) * spec.datatype.size


def too_large(nbytes: int, most: float) -> LimitError:
    """The error of a response whose size is known only after the model has run."""
    return LimitError(
        f"the response has {nbytes} bytes, and this server sends at most {most:.0f} in a message: {_CURE}"
    )
