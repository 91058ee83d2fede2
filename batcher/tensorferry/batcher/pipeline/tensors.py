"""Tensors between stages: from the outputs of one model function to the request for the next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from tensorferry.batcher.errors import BatcherError, InvalidRequest, ModelOutputError
from tensorferry.batcher.execution.collate import tensor_nbytes, tensor_of
from tensorferry.batcher.padding import Padding, PadInput
from tensorferry.batcher.pipeline.stage import Stage, StageModel
from tensorferry.batcher.request import Array, Outcome, Request, Tensor

# The key has a digest in place of a longer tensor without rows.
_MAX_KEY_VALUE_BYTES = 4096


def request_of_stage(
    stage: Stage,
    model: StageModel,
    values: Sequence[Any],
    complete: Callable[[Outcome], None],
    whole: Request,
    deadline: float,
) -> Request:
    """Return a stage's part of a pipeline's request, with these values of its inputs.

    Raises ModelOutputError if they do not fit together, or InvalidRequest if all are the caller's.
    """
    names, batcher = tuple(stage.inputs), model.batcher
    tensors = tuple(
        [
            value if type(value) is Tensor else tensor_of(_array(stage, model.padding, name, value))
            for name, value in zip(names, values, strict=True)
        ]
    )
    rows, plan, nbytes = 1, None, 0
    if batcher.settings.max_batch_size:
        rows = _rows(stage, model.shared, tensors, values)
    for tensor in tensors:
        nbytes += tensor_nbytes(tensor)
    shapes: Sequence[tuple[int, ...]] = [tensor.shape[1:] for tensor in tensors]
    if model.padding is not None:
        try:
            plan = model.padding.plan(names, [(tensor.dtype, tensor.shape) for tensor in tensors])
        except InvalidRequest as error:
            raise _kind(values)(f"stage {stage.name!r} cannot pad its inputs: {error}") from None
        if plan is not None:
            shapes = plan.shapes
            nbytes += plan.added_bytes
    key = _key(names, model.shared, tensors, shapes) if model.key is None else model.key(tensors, shapes)
    priority = whole.priority
    return Request(
        tensors,
        complete,
        names=names,
        rows=rows,
        nbytes=nbytes,
        key=key,
        deadline=deadline,
        # A class that this batcher does not have means its default.
        priority=priority if priority <= batcher.priorities else 0,
        padding=plan,
        max_queue_time=whole.max_queue_time,
        tag=whole.tag,
        client=whole.client,
        shared=frozenset([names.index(name) for name in model.shared]) if model.shared else frozenset(),
        owner=whole.owner,
    )


def _rows(stage: Stage, shared: frozenset[str], tensors: Sequence[Tensor], values: Sequence[Any]) -> int:
    """Return the rows of a stage's request, which must be those of each of its inputs with rows."""
    rows = -1
    for name, tensor in zip(stage.inputs, tensors, strict=True):
        if name in shared:
            continue
        count = tensor.shape[0] if tensor.shape else -1
        if count < 0 or rows not in (-1, count):
            shapes = {name: list(tensor.shape) for name, tensor in zip(stage.inputs, tensors, strict=True)}
            raise _kind(values)(
                f"the inputs of stage {stage.name!r} must have the same number of rows on axis 0, got shapes {shapes}"
            )
        rows = count
    return 1 if rows < 0 else rows


def _kind(values: Sequence[Any]) -> type[BatcherError]:
    """Return the type of an error in these inputs of a stage: if all are the caller's, the request is wrong."""
    return InvalidRequest if all(isinstance(value, Tensor) for value in values) else ModelOutputError


def _key(
    names: tuple[str, ...],
    shared: frozenset[str],
    tensors: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
) -> Hashable:
    """Return what requests must have in common to share a batch."""
    key: list[Hashable] = [names]
    for name, tensor, shape in zip(names, tensors, shapes, strict=True):
        key += (tensor.dtype, shape)
        if name in shared:
            key.append((tensor.shape, _value(tensor)))
    return tuple(key)


def _value(tensor: Tensor) -> Hashable:
    """Return a value that is equal for equal tensors of one shape only."""
    if tensor.dtype.hasobject:
        return tuple(tensor.data.flat)
    data = bytes(tensor.data)
    return data if len(data) <= _MAX_KEY_VALUE_BYTES else hashlib.sha256(data).digest()


def _array(stage: Stage, padding: Padding | None, name: str, value: Any) -> Array:
    """Return an output of an earlier stage as the array that a stage reads."""
    pad = None
    if padding is not None and not isinstance(padding.inputs, PadInput):
        pad = padding.inputs.get(name)
    return array_of(value, f"input {name!r} of stage {stage.name!r}", None if pad is None else pad.value)


def array_of(value: Any, what: str, pad_value: Any = None) -> Array:
    """Return an output as an array; one that is a list of rows is stacked, see `stack_rows`."""
    return value if isinstance(value, np.ndarray) else stack_rows(value, what, pad_value)


def stack_rows(rows: Sequence[Any], what: str, pad_value: Any = None) -> Array:
    """Return rows, given one by one, as one array. Rows that differ in length along one axis are padded to the longest.

    Without a pad value this is 0, and for strings the empty string. `what` names the rows in an error.
    """
    try:
        arrays = [np.asarray(row) for row in rows]
    except ValueError as error:
        raise ModelOutputError(f"a row of {what} is not an array: {error}") from None
    arrays = [array.astype(object) if array.dtype.kind in "SU" else array for array in arrays]
    if not arrays:
        return np.empty(0)
    # An empty list says nothing about its dtype.
    dtype = next((array.dtype for array in arrays if array.size), arrays[0].dtype)
    arrays = [
        array if array.size or isinstance(row, np.ndarray) else array.astype(dtype)
        for row, array in zip(rows, arrays, strict=True)
    ]
    first = arrays[0]
    if any(array.dtype != first.dtype or array.ndim != first.ndim for array in arrays):
        kinds = sorted({f"{array.dtype} of {array.ndim} axes" for array in arrays})
        raise ModelOutputError(f"the rows of {what} must have one dtype and number of axes, got {kinds}")
    uneven = [axis for axis in range(first.ndim) if len({array.shape[axis] for array in arrays}) > 1]
    if not uneven:
        return np.stack(arrays)
    if len(uneven) > 1:
        raise ModelOutputError(
            f"the rows of {what} may differ in length along one axis, but differ in {len(uneven)}: "
            f"{sorted({array.shape for array in arrays})[:4]}"
        )
    axis = uneven[0]
    longest = max(array.shape[axis] for array in arrays)
    if pad_value is None:
        pad_value = _empty(arrays) if first.dtype.hasobject else 0
    shape = (len(arrays), *first.shape[:axis], longest, *first.shape[axis + 1 :])
    padded = np.full(shape, pad_value, first.dtype)
    for place, array in zip(padded, arrays, strict=True):
        place[(*(slice(None),) * axis, slice(array.shape[axis]))] = array
    return padded


def _empty(arrays: Sequence[Array]) -> str | bytes:
    """Return the empty string of the kind that object arrays have."""
    element = next((array.flat[0] for array in arrays if array.size), "")
    return b"" if isinstance(element, bytes) else ""
