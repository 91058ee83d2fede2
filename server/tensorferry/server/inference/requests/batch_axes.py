"""Tensors of clients whose rows are not on axis 0: the server's tensors and outputs have them there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tensorferry.batcher import Outcome, Tensor
from tensorferry.server.signature import TensorSpec


def rows_first(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Return a client's tensor with the rows on axis 0. Several rows are copied."""
    if not spec.batch_axis:
        return tensor
    shape = spec.rows_first(tensor.shape)
    if tensor.dtype.hasobject:
        return Tensor(tensor.dtype, shape, np.moveaxis(tensor.data, spec.batch_axis, 0))
    if shape[0] == 1:
        return Tensor(tensor.dtype, shape, tensor.data)
    array = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
    return Tensor(tensor.dtype, shape, np.moveaxis(array, spec.batch_axis, 0).tobytes())


def with_clients_axes(outcome: Outcome, axes: Mapping[str, int]) -> Outcome:
    """Return an outcome whose outputs have the rows where clients expect them. The outputs are arrays."""
    if outcome.outputs is None or not axes:
        return outcome
    return outcome._replace(
        outputs={
            name: np.moveaxis(array, 0, axes[name]) if name in axes else array
            for name, array in outcome.outputs.items()
        }
    )
