"""Helpers of rules for the row axis of tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tensorferry.server.onnx_graph.operators import MixesRows, Node, UnknownEffect
from tensorferry.server.onnx_graph.sizes import Size
from tensorferry.server.onnx_graph.values import RowAxis, Value


def shape_of(value: Value) -> tuple[Size, ...]:
    """Return the shape; raise UnknownEffect if the rank is unknown."""
    if value.shape is None:
        raise UnknownEffect("takes a tensor of unknown rank")
    return value.shape


def axis_of(axis: int, rank: int) -> int:
    """Return the axis as a non-negative index."""
    if not -rank <= axis < max(rank, 1):
        raise UnknownEffect(f"has axis {axis} for a tensor of rank {rank}")
    return axis + rank if axis < 0 else axis


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
