"""The row axis of tensors: checks of rules, and the axis after broadcasting."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from tensorferry.server.onnx.graph.operators import Node
from tensorferry.server.onnx.graph.sizes import Size, unknown
from tensorferry.server.onnx.graph.values import MixesRows, RowAxis, UnknownEffect, Value


def require_rows_only_in(node: Node, *indices: int) -> None:
    """Raise UnknownEffect if an input other than those given has rows."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.rows is not None and index not in indices:
            raise UnknownEffect(f"takes rows in its input {index}")


def reject_rows_on(value: Value, axes: Collection[int], how: str, positions: Value | None = None) -> None:
    """Raise MixesRows if the rows are on one of the axes.

    Raise UnknownEffect if the operator takes these positions on the axis, and they may be those of a loop's iteration.
    """
    if value.rows is not None and value.rows.axis in axes:
        if positions is not None and positions.iterations:
            raise UnknownEffect(f"{how} the batch axis at the number of a loop's iteration")
        raise MixesRows(f"{how} the batch axis")


def reject_one_row(values: Collection[Value]) -> None:
    """Raise MixesRows if values of all rows are combined with those of the row of a loop's iteration."""
    if any(value.picked and value.rows is None for value in values) and any(
        value.rows is not None and value.value_dependent for value in values
    ):
        raise MixesRows("combines all rows with one of them")


def with_rows(shape: tuple[Size, ...], rows: RowAxis | None) -> Value:
    """Return a tensor with that shape and that row axis."""
    if rows is None:
        return Value(shape)
    return Value((*shape[: rows.axis], rows.size, *shape[rows.axis + 1 :]), rows)


def on_axis(rows: RowAxis | None, axis: int) -> RowAxis | None:
    """Return the rows on another axis."""
    return None if rows is None else RowAxis(axis, rows.outer, rows.inner)


def rearranged(value: Value, origins: Sequence[int | None], new: Size = 1) -> Value:
    """Return a tensor with axes of `value`, by their numbers. None is a new axis of size `new`; no row axis is left out."""
    sizes = tuple(new if axis is None else value.sizes[axis] for axis in origins)
    return with_rows(sizes, value.rows and on_axis(value.rows, origins.index(value.rows.axis)))


def require_same_merging(one: RowAxis, other: RowAxis) -> None:
    """Raise UnknownEffect if Reshape merged other axes with the two row axes in different ways."""
    if (one.outer, one.inner) != (other.outer, other.inner):
        raise UnknownEffect("combines rows that are merged with other axes in different ways")


def rows_on_axes(
    node: Node, axes: Mapping[int, int], *, optional: Collection[int] = (), how: str = "computes across"
) -> RowAxis | None:
    """Return the rows of an operator whose inputs have them on these axes, by number of the input.

    If one of these inputs has rows, all but the `optional` ones must have, because the operator does not broadcast them.
    Other inputs must not have rows.
    """
    require_rows_only_in(node, *axes)
    found: RowAxis | None = None
    for index, axis in axes.items():
        if not node.has(index) or (rows := node.input(index).rows) is None:
            continue
        if rows.axis != axis:
            raise MixesRows(f"{how} the batch axis")
        if found is not None:
            require_same_merging(found, rows)
        found = rows
    if found is not None:
        for index in axes:
            if node.has(index) and node.input(index).rows is None and index not in optional:
                raise UnknownEffect(f"has rows, but not in its input {index}")
    return found


def rows_on_first_axis(node: Node, batched: Collection[int], how: str = "computes across") -> RowAxis | None:
    """Return the row axis of an operator whose inputs `batched` have rows on axis 0, as `rows_on_axes` does."""
    return rows_on_axes(node, dict.fromkeys(batched, 0), how=how)


def broadcast(values: Sequence[Value]) -> Value:
    """Return the shape and the row axis of tensors that are broadcast together."""
    reject_one_row(values)
    # Row axes, counted from the last axis.
    found = [(len(value.sizes) - value.rows.axis, value.rows) for value in values if value.rows is not None]
    for from_right, rows in found[1:]:
        if from_right != found[0][0]:
            raise MixesRows("combines rows along one axis with rows along another")
        require_same_merging(found[0][1], rows)
    if not found and any(value.shape is None for value in values):
        return Value()
    shapes = [value.sizes for value in values]
    rank = max(map(len, shapes), default=0)
    shape = tuple(
        longest(shape[at - rank] for shape in shapes if len(shape) >= rank - at) for at in range(rank)
    )
    if not found:
        return Value(shape)
    from_right, rows = found[0]
    for value in values:
        size = value.sizes[-from_right] if value.rows is None and len(value.sizes) >= from_right else 1
        if isinstance(size, int) and size != 1:
            raise MixesRows(f"combines the batch axis with a fixed axis of size {size}")
        if size != 1:
            raise UnknownEffect(f"combines the batch axis with an axis of size {size}")
    return with_rows(shape, on_axis(rows, rank - from_right))


def longest(broadcast: Iterable[Size]) -> Size:
    """Return the size of an axis of which tensors with these sizes are broadcast together."""
    sizes = {*broadcast} - {1}
    if not sizes:
        return 1
    if len(sizes) == 1:
        return sizes.pop()
    fixed = [size for size in sizes if isinstance(size, int)]
    return fixed[0] if fixed else unknown(f"broadcast({','.join(sorted(map(str, sizes)))})", *sizes)
