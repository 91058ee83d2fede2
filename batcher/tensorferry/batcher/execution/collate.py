"""Joining of requests into one batch and splitting of its outputs: only this module depends on axis 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from tensorferry.batcher.errors import InvalidRequest, ModelOutputError, ModelRowsError
from tensorferry.batcher.padding import Padding
from tensorferry.batcher.request import Array, HeldTensor, Outcome, Request, Tensor, padded_length


def request_of(
    x: Any,
    complete: Callable[[Outcome], None],
    *,
    one_row: bool,
    batched: bool = True,
    deadline: float = math.inf,
    padding: Padding | None = None,
) -> Request:
    """Make a request of an array or a dict of arrays; with `one_row`, add the batch axis.

    Strings become object arrays, so that strings of different lengths can share a batch. Raises InvalidRequest if the
    inputs have no rows, or different numbers of rows.
    """
    names = tuple(sorted(x)) if isinstance(x, Mapping) else None
    if names == ():
        raise InvalidRequest("the request has no inputs; give at least one named array")
    tensors = tuple(
        tensor_of(whole_array(array), add_axis=one_row)
        for array in ([x] if names is None else map(x.get, names))
    )
    rows = _common_rows(names or ("x",), tensors) if batched else 1
    plan = None
    if padding is not None:
        plan = padding.plan(names, [(tensor.dtype, tensor.shape) for tensor in tensors])
    shapes = plan.shapes if plan is not None else [tensor.shape[1:] for tensor in tensors]
    return Request(
        tensors,
        complete,
        names=names,
        rows=rows,
        nbytes=sum(tensor_nbytes(tensor) for tensor in tensors)
        + (plan.added_bytes if plan is not None else 0),
        key=(names, *((tensor.dtype, shape) for tensor, shape in zip(tensors, shapes, strict=True))),
        deadline=deadline,
        padding=plan,
    )


def whole_array(value: Any) -> Array:
    """Return a value as an array; strings become objects, with the NULs at their ends."""
    array = np.asarray(value)
    # Made of the value, because an array of dtype S or U has lost the NULs at the end of a string.
    return np.asarray(value, object) if array.dtype.kind in "SUT" else array


def tensor_of(array: Array, *, add_axis: bool = False) -> Tensor:
    """Return an array as a tensor, which shares its memory if it is contiguous; with `add_axis`, as one row."""
    shape = (1, *array.shape) if add_axis else array.shape
    if array.dtype.kind in "SUT":
        array = array.astype(object)
    if array.dtype.hasobject:
        return Tensor(array.dtype, shape, array.reshape(shape))
    # As bytes, because some dtypes (bfloat16, datetime64) do not support the buffer protocol.
    return Tensor(array.dtype, shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _common_rows(names: Sequence[str], tensors: Sequence[Tensor]) -> int:
    scalars = [name for name, tensor in zip(names, tensors, strict=True) if not tensor.shape]
    if scalars:
        raise InvalidRequest(
            f"input {scalars[0]!r} is a scalar; rows are counted on axis 0: give it that axis"
        )
    rows = {name: tensor.shape[0] for name, tensor in zip(names, tensors, strict=True)}
    if len(set(rows.values())) != 1:
        raise InvalidRequest(f"the inputs must have the same number of rows on axis 0, got {rows}")
    return tensors[0].shape[0]


def tensor_nbytes(tensor: Tensor) -> int:
    """Return how many bytes a tensor has; for strings, those of the strings."""
    if tensor.dtype.hasobject:
        return sum(len(element) if isinstance(element, (bytes, str)) else 8 for element in tensor.data.flat)
    return math.prod(tensor.shape) * tensor.dtype.itemsize


# Up to this many bytes a request, copying twice is faster than a loop: 32 requests of 90 bytes take 1.0 µs instead
# of 4.0, but 32 of 16 KiB take 38.7 µs instead of 17.0.
_SMALL = 4096
# From this size, numpy's arrays are on huge pages: joining 32 MiB takes 7 ms instead of 17, most of it for page faults.
_LARGE = 4 << 20

_Place = Callable[[Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]], Mapping[str, Any] | None]


def join(requests: Sequence[Request], place: _Place | None = None) -> Any:
    """Return the model function's input: one array, or a dict of arrays, with rows on axis 0.

    The arrays are read-only, however many requests there are. The rows are copied once; those of a single request of
    `bytes`, or of aligned parts of them, are not copied. With `place` (`StagedModel.place`), the rows are copied into the
    arrays that it returns, if any.
    """
    first = requests[0]
    names, plan = first.names, first.padding
    if place is not None and names is not None:
        placed = _join_into(place, names, requests)
        if placed is not None:
            return placed
    rows = 0
    for request in requests:
        rows += request.rows
    length = padded_length(requests)
    arrays: list[Array] = []
    for i, (dtype, shape, data) in enumerate(first.tensors):
        has_rows = i not in first.shared
        if has_rows and plan is not None and length is not None and (pad := plan.pads[i]) is not None:
            tensors = [request.tensors[i] for request in requests]
            if any(tensor.shape[pad[0]] < length for tensor in tensors):
                arrays.append(_join_padded(tensors, rows, length, *pad))
                continue
        if has_rows and len(requests) > 1:
            shape = (rows, *shape[1:])
            parts = [
                _on_host(data) if isinstance(data := request.tensors[i].data, HeldTensor) else data
                for request in requests
            ]
            if dtype.hasobject:
                data = np.concatenate(parts)
            elif len(parts[0]) * len(parts) < _LARGE:
                data = b"".join(parts)
            else:
                data = np.concatenate([np.frombuffer(part, np.uint8) for part in parts])
        elif dtype.hasobject:
            data = data.copy()
        elif isinstance(data, HeldTensor):
            data = _on_host(data)
        elif not isinstance(data, bytes) and not _is_aligned_part(data, dtype):
            # A caller's array is copied, because outputs may be views of it, and the caller may change it later.
            data = b"".join([data])
        arrays.append(data if dtype.hasobject else np.frombuffer(data, dtype).reshape(shape))
    for array in arrays:
        array.flags.writeable = False
    return arrays[0] if names is None else dict(zip(names, arrays, strict=True))


def _on_host(held: HeldTensor) -> bytes:
    return held.numpy().tobytes()


def _is_aligned_part(data: Any, dtype: np.dtype[Any]) -> bool:
    """Whether the data is a part of a message. It must be aligned, because compiled kernels may fail on it otherwise."""
    return (
        isinstance(data, memoryview)
        and isinstance(data.obj, bytes)
        and np.frombuffer(data, dtype).flags.aligned
    )


def _join_padded(tensors: Sequence[Tensor], rows: int, length: int, axis: int, value: Array) -> Array:
    first = tensors[0]
    shape = (rows, *first.shape[1:axis], length, *first.shape[axis + 1 :])
    if first.dtype.hasobject:
        joined = np.empty(shape, first.dtype)
        _fill_padded(joined, tensors, axis, value)
        return joined
    # Joined as bytes: 32 rows of up to 128 int64 take 11 µs, filling an array takes 51. A row consists of `runs` runs of
    # elements, each followed by its padding.
    runs = math.prod(first.shape[1:axis])
    inner = math.prod(first.shape[axis + 1 :])
    padding = np.full(length * inner, value, first.dtype).tobytes()
    pieces: list[Any] = []
    for tensor in tensors:
        width = tensor.shape[axis] * inner * first.dtype.itemsize
        count = tensor.shape[0] * runs if width else 0
        tail = padding[width:]
        if count == 1:
            pieces += (tensor.data, tail)
            continue
        data = memoryview(tensor.data).cast("B")
        for start in range(0, count * width, width or 1):
            pieces += (data[start : start + width], tail)
    return np.frombuffer(b"".join(pieces), np.uint8).view(first.dtype).reshape(shape)


def _join_into(place: _Place, names: Sequence[str], requests: Sequence[Request]) -> Mapping[str, Any] | None:
    first = requests[0]
    if any(tensor.dtype.hasobject for tensor in first.tensors):
        return None
    plan, length = first.padding, padded_length(requests)
    shapes = [tensor.shape[1:] for tensor in first.tensors]
    if plan is not None and length is not None:
        shapes = [
            shape if pad is None else (*shape[: pad[0] - 1], length, *shape[pad[0] :])
            for shape, pad in zip(shapes, plan.pads, strict=True)
        ]
    rows = sum([request.rows for request in requests])
    # A single request may have no batch axis.
    alone = len(requests) == 1 and plan is None
    wanted = {
        name: (tensor.dtype, tensor.shape if alone or i in first.shared else (rows, *shape))
        for i, (name, tensor, shape) in enumerate(zip(names, first.tensors, shapes, strict=True))
    }
    batch = place(wanted)
    if batch is None:
        return None
    for i, name in enumerate(names):
        array = batch[name]
        if isinstance(array, list):
            array += [request.tensors[i] for request in requests]
            continue
        pad = plan.pads[i] if plan is not None else None
        if not array.size:
            continue
        if pad is not None:
            _fill_padded(array, [request.tensors[i] for request in requests], *pad)
            continue
        target = memoryview(array.data).cast("B")
        pieces = [
            _on_host(data) if isinstance(data := request.tensors[i].data, HeldTensor) else data
            for request in (requests[:1] if i in first.shared else requests)
        ]
        if len(target) <= _SMALL * len(pieces):
            target[:] = b"".join(pieces)
            continue
        start = 0
        for data in pieces:
            end = start + len(data)
            target[start:end] = data
            start = end
    return batch


def _fill_padded(array: Array, tensors: Sequence[Tensor], axis: int, value: Array) -> None:
    start = 0
    for dtype, shape, data in tensors:
        rows = array[start : start + shape[0]]
        before = _up_to(axis, shape[axis])
        rows[before] = data if dtype.hasobject else np.frombuffer(data, dtype).reshape(shape)
        rows[(*before[:-1], slice(shape[axis], None))] = value
        start += shape[0]


def _up_to(axis: int, length: int) -> tuple[slice, ...]:
    """Return the index of the first `length` entries of an axis."""
    return (*(slice(None),) * axis, slice(length))


def split(outputs: Any, requests: Sequence[Request]) -> list[Any]:
    """Split the model function's result into each request's rows, as views.

    `outputs` is an array, a list or tuple with one entry a row, or a dict of these. If the requests were padded,
    outputs with the padded axis are cut to each request's length. Raises ModelOutputError if an output does not have
    the batch's rows, or the padded length.
    """
    plan, rows = requests[0].padding, 0
    for request in requests:
        rows += request.rows
    # In this order, because checking whether an array is a Mapping is slow.
    named = type(outputs) is dict or (not isinstance(outputs, np.ndarray) and isinstance(outputs, Mapping))
    if named:
        for name, output in outputs.items():
            if type(output) is not np.ndarray or output.shape[:1] != (rows,):
                _check_rows(output, rows, f"output {name!r}")
    else:
        _check_rows(outputs, rows, "the model function's result")
    axes = None
    if plan is not None and plan.outputs is not None:
        axes = plan.outputs
        _check_padded_outputs(outputs, axes, padded_length(requests))
    answers: list[Any] = []
    start = 0
    for request in requests:
        stop = start + request.rows
        if axes is not None and request.padding is not None:
            answers.append(_cut_padded(outputs, start, stop, axes, request.padding.length))
        elif named:
            answer = {}
            for name, output in outputs.items():
                # A view even of all rows, because the model function may use its array again.
                answer[name] = output[start:stop]
            answers.append(answer)
        else:
            answers.append(outputs[start:stop])
        start = stop
    return answers


def own(outputs: Any) -> Any:
    """Copy views of a batch's result: they would keep all of it alive, and the function may use its array again."""
    if isinstance(outputs, Mapping):
        return {name: own(output) for name, output in outputs.items()}
    if type(outputs) in (list, tuple):
        return type(outputs)(own(row) for row in outputs)
    return outputs.copy() if isinstance(outputs, np.ndarray) and outputs.base is not None else outputs


def _check_rows(outputs: Any, rows: int, what: str) -> None:
    if isinstance(outputs, np.ndarray):
        if not outputs.shape or outputs.shape[0] != rows:
            raise ModelRowsError(
                f"{what} has shape {list(outputs.shape)}, expected {rows} rows on axis 0: one for each row of the batch"
            )
    elif isinstance(outputs, (list, tuple)):
        if len(outputs) != rows:
            raise ModelRowsError(
                f"{what} has {len(outputs)} entries, expected {rows}: one for each row of the batch"
            )
    else:
        raise ModelOutputError(
            f"{what} is of type {type(outputs).__name__}; return an array with rows on axis 0, or a dict of them"
        )


def _check_padded_outputs(outputs: Any, axes: Mapping[str, int] | int, length: int | None) -> None:
    if isinstance(axes, int) and not isinstance(outputs, Mapping):
        _check_length(outputs, axes, length, "the model function's result")
    elif isinstance(axes, Mapping) and isinstance(outputs, Mapping) and outputs.keys() >= axes.keys():
        for name, axis in axes.items():
            _check_length(outputs[name], axis, length, f"output {name!r}")
    else:
        declared = f"outputs {list(axes)}" if isinstance(axes, Mapping) else "one bare output"
        returned = list(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ModelOutputError(f"padding declares {declared}, but the model function returned {returned}")


def _check_length(output: Any, axis: int, length: int | None, what: str) -> None:
    if isinstance(output, (list, tuple)) and axis:
        for entry in output:
            _check_length(entry, axis - 1, length, what)
        return
    if isinstance(output, np.ndarray):
        size = output.shape[axis : axis + 1]
    else:
        size = (len(output),) if isinstance(output, Sized) else ()
    if size != (length,):
        found = f"has size {size[0]}" if size else "is missing"
        raise ModelOutputError(
            f"{what} is declared to carry the padded length, {length} in this batch, but the axis {found}"
        )


def _cut_padded(outputs: Any, start: int, stop: int, axes: Mapping[str, int] | int, length: int) -> Any:
    """Return the rows from `start` to `stop`, without their padding."""
    if isinstance(axes, int):
        return _cut_length(outputs[start:stop], axes, length)
    return {
        name: _cut_length(output[start:stop], axes[name], length) if name in axes else output[start:stop]
        for name, output in outputs.items()
    }


def _cut_length(output: Any, axis: int, length: int) -> Any:
    if isinstance(output, np.ndarray) or axis == 0:
        return output[_up_to(axis, length) if axis else slice(length)]
    entries = [_cut_length(entry, axis - 1, length) for entry in output]
    return entries if isinstance(output, list) else tuple(entries)


def first_row(outputs: Any) -> Any:
    """Return the only row of a one-row request's outputs, without the batch axis."""
    if isinstance(outputs, Mapping):
        return {name: output[0] for name, output in outputs.items()}
    return outputs[0]
