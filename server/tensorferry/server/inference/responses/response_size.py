"""Responses too large for a message, refused before the model runs if the shapes show it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tensorferry.server.errors import InvalidRequestError, LimitError
from tensorferry.server.inference.requests.codec import DecodedRequest
from tensorferry.server.signature import TensorSpec

_HINT = (
    "ask for fewer rows or outputs at once, have outputs in shared memory, or start the server with a larger "
    "--max-message-bytes"
)


def check_response_size(decoded: DecodedRequest, batched: bool, max_bytes: float) -> None:
    """Raise InvalidRequestError if the requested outputs are known to have more than `max_bytes`."""
    spec = decoded.response_spec
    if spec.typed:
        # The size of typed contents depends on the values.
        return
    named = decoded.signature.named_lengths(tensor.shape for tensor in decoded.tensors)
    total = 0
    for index, output in enumerate(spec.outputs):
        in_shared_memory = spec.spans and spec.spans[index]
        classified = spec.class_counts and spec.class_counts[index]
        if not in_shared_memory and not classified:
            total += _min_bytes(output, decoded.rows if batched else None, named)
    if total > max_bytes:
        names = ", ".join(output.name for output in spec.outputs)
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


def response_too_large(nbytes: int, max_bytes: float) -> LimitError:
    """Return the error of a response whose size is known only after the model has run."""
    return LimitError(
        f"the response has {nbytes} bytes, and this server sends at most {max_bytes:.0f} in a message: {_HINT}"
    )
