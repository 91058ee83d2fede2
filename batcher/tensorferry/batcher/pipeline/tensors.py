"""Tensors between stages: from the outputs of one model function to the request for the next."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from tensorferry.batcher.batcher import Batcher
from tensorferry.batcher.errors import BatcherError, InvalidRequest, ModelOutputError
from tensorferry.batcher.execution.collate import tensor_nbytes, tensor_of, whole_array
from tensorferry.batcher.execution.completion import already_completed
from tensorferry.batcher.execution.splitting import cut
from tensorferry.batcher.padding import PadInput, PadPlan
from tensorferry.batcher.pipeline.stage import Stage, StageModel
from tensorferry.batcher.request import AloneKey, Array, Outcome, Request, Tensor

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
        inputs = model.padding.inputs if model.padding is not None else None
        self._pads: Mapping[str, PadInput] = inputs if isinstance(inputs, Mapping) else {}
        # Requests of more rows are divided by their lengths. Those to a pipeline are not: its stages get the rows, and divide
        # them.
        self._passes_rows = not isinstance(model.batcher, Batcher)
        self._undivided: float = math.inf
        self._divides = False
        if self._batched and isinstance(model.batcher, Batcher):
            self._divides = model.divides
            if self._pads:
                self._undivided = model.batcher.settings.max_batch_size
        # Layouts by the tensors' dtypes and shapes. Those of strings and of shared inputs depend on values, too.
        self._layouts: dict[Hashable, Layout] = {}

    def make(
        self, values: Sequence[Any], complete: Callable[[Outcome], None], whole: Request, deadline: float
    ) -> Request:
        """Return a stage's part of a pipeline's request, with these values of its inputs.

        Raises ModelOutputError if they do not fit together, or InvalidRequest if all are the caller's.
        """
        tensors: list[Any] = []
        known, stacked, equal = not self._shared, 0, False
        rows_by_place: dict[int, Any] = {}
        for name, value in zip(self._names, values, strict=True):
            if type(value) is not Tensor:
                if type(value) is not np.ndarray:
                    if not equal and self._run_apart(name, value):
                        if (divided := self._divided(values, whole, deadline)) is not None:
                            divided.complete = complete
                            return divided
                        equal = True
                    pad = self._pads.get(name)
                    array = array_of(value, self._input(name), None if pad is None else pad.value)
                    stacked = max(stacked, self._stacked(name, value, array))
                    if self._passes_rows and len(set(map(np.shape, value))) > 1:
                        rows_by_place[len(tensors)] = value
                    value = array
                value = tensor_of(value)
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
        if isinstance(whole.key, AloneKey):
            key = AloneKey()
        if stacked and padding is not None:
            padding = padding._replace(stacked=stacked)
        priority = whole.priority
        for place, value in rows_by_place.items():
            tensors[place] = value
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
            content=whole.content,
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

    def _input(self, name: str) -> str:
        return f"input {name!r} of stage {self._stage.name!r}"

    def _run_apart(self, name: str, rows: Sequence[Any]) -> bool:
        """Whether the rows of an input are divided if they differ in shape."""
        if len(rows) > self._undivided:
            return True
        if not self._divides or len(rows) < 2:
            return False
        if (pad := self._pads.get(name)) is None:
            return True
        # Only the length of the padded axis is known to change no answers.
        shapes = map(np.shape, rows)
        return len({(shape[: pad.axis - 1], shape[pad.axis :]) for shape in shapes}) > 1

    def _stacked(self, name: str, rows: Sequence[Any], array: Array) -> int:
        """Return how many positions of the padded axis were added to the rows of an input to make an array of them."""
        pad = self._pads.get(name)
        if pad is None or array.ndim <= pad.axis:
            return 0
        longest: int = array.shape[pad.axis]
        return sum([longest - np.shape(row)[pad.axis - 1] for row in rows])

    def _divided(self, values: Sequence[Any], whole: Request, deadline: float) -> Request | None:
        """Return a request whose rows are in groups of equal shapes, the longest first.

        None if all are equal, or the inputs do not fit together.
        """
        columns = [
            value if at in self._shared else self._rows_of(name, value)
            for at, (name, value) in enumerate(zip(self._names, values, strict=True))
        ]
        with_rows = [column for at, column in enumerate(columns) if at not in self._shared]
        shapes = list(zip(*[[row.shape for row in rows] for rows in with_rows], strict=False))
        if len(set(shapes)) == 1 or any(len(rows) != len(shapes) for rows in with_rows):
            return None
        order = sorted(range(len(shapes)), key=shapes.__getitem__, reverse=True)
        groups = []
        for _, equal in groupby(order, key=shapes.__getitem__):
            rows = list(equal)
            group = [
                column if at in self._shared else np.stack([column[row] for row in rows])
                for at, column in enumerate(columns)
            ]
            groups.append(self.make(group, already_completed, whole, deadline))
        divided = cut(groups[0], 0, groups[0].rows, already_completed)
        divided.tensors, divided.groups, divided.places = (), groups, np.argsort(order)
        divided.rows = divided.rows_counted = len(order)
        divided.nbytes = sum([group.nbytes for group in groups])
        return divided

    def _rows_of(self, name: str, value: Any) -> Sequence[Array]:
        """Return the rows of an input; none if it has no axis of rows.

        A row of length 0 is padded to 1, because many models do not run on an empty axis.
        """
        if isinstance(value, Tensor):
            of_strings = value.dtype.hasobject
            value = value.data if of_strings else np.frombuffer(value.data, value.dtype).reshape(value.shape)
        if isinstance(value, np.ndarray):
            # With `...`, because a row of a single string is to be an array, too.
            rows = [value[row, ...] for row in range(len(value))] if value.ndim else []
        else:
            rows = row_arrays(value, self._input(name))
        if (pad := self._pads.get(name)) is not None:
            axis = pad.axis - 1
            rows = [
                row
                if row.ndim <= axis or row.shape[axis]
                else np.full((*row.shape[:axis], 1, *row.shape[pad.axis :]), pad.value, row.dtype)
                for row in rows
            ]
        return rows


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
    """Return an output as an array; one that is a list of rows is stacked.

    Without a pad value, a list that is convertible to an array by `__array__` is converted so. Otherwise see `stack_rows`.
    """
    if isinstance(value, np.ndarray):
        return value
    if pad_value is None and hasattr(value, "__array__"):
        return np.asarray(value)
    return stack_rows(value, what, pad_value)


def row_arrays(rows: Sequence[Any], what: str) -> list[Array]:
    """Return rows as arrays of one dtype and number of axes; ModelOutputError if they differ in these."""
    try:
        arrays = [whole_array(row) for row in rows]
    except ValueError as error:
        raise ModelOutputError(f"a row of {what} is not an array: {error}") from None
    if not arrays:
        return []
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
    return arrays


def stack_rows(rows: Sequence[Any], what: str, pad_value: Any = None) -> Array:
    """Return rows, given one by one, as one array. Rows that differ in length are padded to the longest along each axis.

    Without a pad value this is 0, and for strings the empty string. `what` names the rows in an error.
    """
    arrays = row_arrays(rows, what)
    if not arrays:
        return np.empty(0)
    shapes = [array.shape for array in arrays]
    if len(set(shapes)) == 1:
        return np.stack(arrays)
    dtype = arrays[0].dtype
    if pad_value is None:
        pad_value = _empty(arrays) if dtype.hasobject else 0
    padded = np.full((len(arrays), *map(max, *shapes)), pad_value, dtype)
    for place, array in zip(padded, arrays, strict=True):
        place[tuple(map(slice, array.shape))] = array
    return padded


def _empty(arrays: Sequence[Array]) -> str | bytes:
    """Return the empty string of the kind that object arrays have."""
    element = next((array.flat[0] for array in arrays if array.size), "")
    return b"" if isinstance(element, bytes) else ""
