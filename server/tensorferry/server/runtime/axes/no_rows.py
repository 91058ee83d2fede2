"""Requests without rows. Their answer follows from the model's signature, so the model does not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.batcher import Tensor
from tensorferry.protos.tensors import TensorError, element_count
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.signature import Signature, TensorSpec


def empty_outputs(
    model: str, signature: Signature, outputs: Sequence[TensorSpec], tensors: Sequence[Tensor]
) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs of a batched model for no rows. `tensors` are the request's, in the signature's order.

    An output's dimension is known if it is fixed or has the name of an input's dimension. InvalidRequestError for an
    output of unknown shape, or of one that no array can have.
    """
    named = signature.named_lengths(tensor.shape for tensor in tensors)
    empty = {}
    for spec in outputs:
        shape = (0, *_row_shape(model, spec, named))
        try:
            element_count(shape)
        except TensorError as error:
            raise InvalidRequestError(f"output {spec.name!r} of model {model!r}: {error}") from None
        empty[spec.name] = np.empty(shape, spec.datatype.storage)
    return empty


def _row_shape(model: str, spec: TensorSpec, named: Mapping[str, int | None]) -> list[int]:
    if spec.any_rank:
        raise InvalidRequestError(
            f"the request has no rows, so model {model!r} is not run, and the shape of its output {spec.name!r} is not "
            "declared: send at least one row, or request other outputs"
        )
    shape = []
    for axis, size in enumerate(spec.lengths(named)[1:], 1):
        if size is None:
            name = f" ({spec.dims[axis]!r})" if spec.dims[axis] else ""
            raise InvalidRequestError(
                f"the request has no rows, so model {model!r} is not run, and the length of axis {spec.clients_axis(axis)}{name} of its "
                f"output {spec.name!r} {list(spec.shape)} does not follow from the inputs: send at least one row, or "
                "request other outputs"
            )
        shape.append(size)
    return shape
