"""The row axis after broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.server.onnx_graph.operators import MixesRows, UnknownEffect
from tensorferry.server.onnx_graph.row_axis import reject_one_row, require_same_merging
from tensorferry.server.onnx_graph.sizes import Size, unknown
from tensorferry.server.onnx_graph.values import RowAxis, Value


def broadcast(values: Sequence[Value]) -> Value:
    """Return the shape and the row axis of tensors that are broadcast together."""
    reject_one_row(values)
    shapes = [value.shape for value in values]
    position = row_axis_from_right(values)
    if any(shape is None for shape in shapes):
        if position is None:
            return Value()
        raise UnknownEffect("takes a tensor of unknown rank")
    known = [shape for shape in shapes if shape is not None]
    rank = max(map(len, known), default=0)
    shape = tuple(_longest(known, rank - at) for at in range(rank))
    if position is None:
        return Value(shape)
    from_right, rows = position
    for value in values:
        if value.rows is None and value.shape is not None and len(value.shape) >= from_right:
            _check_stretched(value.shape[-from_right])
    axis = rank - from_right
    found = RowAxis(axis, rows.outer, rows.inner)
    return Value((*shape[:axis], found.size, *shape[axis + 1 :]), found)


def row_axis_from_right(values: Sequence[Value]) -> tuple[int, RowAxis] | None:
    """Return the row axis, counted from the last axis, that all tensors with rows share; None if none has rows.

    Raises MixesRows or UnknownEffect if the tensors differ.
    """
    found: tuple[int, RowAxis] | None = None
    for value in values:
        if value.rows is None or value.shape is None:
            continue
        position = len(value.shape) - value.rows.axis, value.rows
        if found is None:
            found = position
        elif found[0] != position[0]:
            raise MixesRows("combines rows along one axis with rows along another")
        else:
            require_same_merging(found[1], position[1])
    return found


def _check_stretched(size: Size) -> None:
    """Raise unless a tensor without rows has size 1 on the row axis of the others."""
    if size == 1:
        return
    if isinstance(size, int):
        raise MixesRows(f"combines the batch axis with a fixed axis of size {size}")
    raise UnknownEffect(f"combines the batch axis with an axis of size {size}")


def _longest(shapes: Sequence[tuple[Size, ...]], from_right: int) -> Size:
    sizes = {shape[-from_right] for shape in shapes if len(shape) >= from_right} - {1}
    if not sizes:
        return 1
    if len(sizes) == 1:
        return sizes.pop()
    fixed = [size for size in sizes if isinstance(size, int)]
    return fixed[0] if fixed else unknown(f"broadcast({','.join(sorted(map(str, sizes)))})", *sizes)
