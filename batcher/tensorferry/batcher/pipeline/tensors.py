"""Tensors between stages: from the outputs of one model function to the request for the next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorferry.batcher.errors import BatcherError, InvalidRequest, ModelOutputError
from tensorferry.batcher.execution.collate import tensor_nbytes, tensor_of
from tensorferry.batcher.padding import PadInput, PadPlan
from tensorferry.batcher.pipeline.stage import Stage, StageModel
from tensorferry.batcher.request import Array, Outcome, Request, Tensor

# The key has a digest in place of a longer tensor without rows.
_MAX_KEY_VALUE_BYTES = 4096

# Layouts that are kept for a model. More are rare, and cost a computation each.
_MAX_LAYOUTS = 256


class Layout(NamedTuple):
    """What the dtypes and shapes of a request's tensors say of it."""

    rows: int
    nbytes: int
    key: Hashable
    padding: PadPlan | None


class RequestMaker:
    """Makes a stage's requests for one model. Thread-safe: its cache is only a cache."""

    def __init__(self, stage: Stage, model: StageModel) -> None:
        self._stage = stage
        self._model = model
        self._names = stage.names
        self._shared = frozenset([self._names.index(name) for name in model.shared])
        self._batched = model.batcher.settings.max_batch_size > 0
        self._priorities = model.batcher.priorities
        # Layouts by the tensors' dtypes and shapes. Those of strings and of shared inputs depend on values, too.
        self._layouts: dict[Hashable, Layout] = {}

    def make(
        self, values: Sequence[Any], complete: Callable[[Outcome], None], whole: Request, deadline: float
    ) -> Request:
        """Return a stage's part of a pipeline's request, with these values of its inputs.

        Raises ModelOutputError if they do not fit together, or InvalidRequest if all are the caller's.
        """
        tensors, known = [], not self._shared
        for name, value in zip(self._names, values, strict=True):
            if type(value) is not Tensor:
                value = tensor_of(value if type(value) is np.ndarray else self._array(name, value))
            tensors.append(value)
            known = known and not value.dtype.hasobject
        if known:
            kinds = tuple([(dtype, shape) for dtype, shape, _ in tensors])
            layout = self._layouts.get(kinds)
            if layout is None:
                layout = self._layout(tensors, values)
                if len(self._layouts) >= _MAX_LAYOUTS:
                    self._layouts = {}
                self._layouts[kinds] = layout
        else:
            layout = self._layout(tensors, values)
        rows, nbytes, key, padding = layout
        priority = whole.priority
        return Request(
            tuple(tensors),
            complete,
            names=self._names,
            rows=rows,
            nbytes=nbytes,
            key=key,
            deadline=deadline,
            # A class that this batcher does not have means its default.
            priority=priority if priority <= self._priorities else 0,
            padding=padding,
            max_queue_time=whole.max_queue_time,
            tag=whole.tag,
            client=whole.client,
            shared=self._shared,
            owner=whole.owner,
        )

    def _layout(self, tensors: Sequence[Tensor], values: Sequence[Any]) -> Layout:
        model, plan = self._model, None
        rows = self._rows(tensors, values) if self._batched else 1
        nbytes = sum([tensor_nbytes(tensor) for tensor in tensors])
        shapes: Sequence[tuple[int, ...]] = [tensor.shape[1:] for tensor in tensors]
        if model.padding is not None:
            try:
                plan = model.padding.plan(self._names, [(dtype, shape) for dtype, shape, _ in tensors])
            except InvalidRequest as error:
                raise _kind(values)(f"stage {self._stage.name!r} cannot pad its inputs: {error}") from None
            if plan is not None:
                shapes = plan.shapes
                nbytes += plan.added_bytes
        key = self._key(tensors, shapes) if model.key is None else model.key(tensors, shapes)
        return Layout(rows, nbytes, key, plan)

    def _rows(self, tensors: Sequence[Tensor], values: Sequence[Any]) -> int:
        """Return the rows of the request, which must be those of each input with rows."""
        counts = {
            tensor.shape[0] if tensor.shape else None
            for at, tensor in enumerate(tensors)
            if at not in self._shared
        }
        if len(counts) > 1 or None in counts:
            shapes = {name: list(tensor.shape) for name, tensor in zip(self._names, tensors, strict=True)}
            raise _kind(values)(
                f"the inputs of stage {self._stage.name!r} must have the same number of rows on axis 0, got shapes {shapes}"
            )
        return counts.pop() or 0 if counts else 1

    def _key(self, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Hashable:
        """Return what requests must have in common to share a batch."""
        shared = [(tensors[at].shape, _value(tensors[at])) for at in sorted(self._shared)]
        return self._names, *[tensor.dtype for tensor in tensors], *shapes, *shared

    def _array(self, name: str, value: Any) -> Array:
        """Return an output of an earlier stage as the array that this one reads."""
        padding, pad = self._model.padding, None
        if padding is not None and not isinstance(padding.inputs, PadInput):
            pad = padding.inputs.get(name)
        what = f"input {name!r} of stage {self._stage.name!r}"
        return array_of(value, what, None if pad is None else pad.value)


def _kind(values: Sequence[Any]) -> type[BatcherError]:
    """Return the type of an error in these inputs of a stage: if all are the caller's, the request is wrong."""
    return InvalidRequest if all(isinstance(value, Tensor) for value in values) else ModelOutputError


def _value(tensor: Tensor) -> Hashable:
    """Return a value that is equal for equal tensors of one shape only."""
    if tensor.dtype.hasobject:
        return tuple(tensor.data.flat)
    data = bytes(tensor.data)
    return data if len(data) <= _MAX_KEY_VALUE_BYTES else hashlib.sha256(data).digest()


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
