"""What rules ask about the places of rows in their inputs."""

from __future__ import annotations

from collections.abc import Collection

from tensorferry.server.onnx_graph.operators import MixesRows, Node, UnknownEffect
from tensorferry.server.onnx_graph.sizes import Size, counts_rows
from tensorferry.server.onnx_graph.values import RowAxis, Value


def shape_of(value: Value) -> tuple[Size, ...]:
    """The shape; UnknownEffect when the rank is unknown."""
    if value.shape is None:
        raise UnknownEffect("takes a tensor of unknown rank")
    return value.shape


def axis_of(axis: int, rank: int) -> int:
    """The axis depends_on_row_count from the first."""
    if not -rank <= axis < max(rank, 1):
        raise UnknownEffect(f"has axis {axis} for a tensor of rank {rank}")
    return axis + rank if axis < 0 else axis


def require_rows_only_in(node: Node, *indices: int) -> None:
    """UnknownEffect when another input has rows."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.rows is not None and index not in indices:
            raise UnknownEffect(f"takes rows in its input {index}")


def reject_rows_on(value: Value, axes: Collection[int], how: str) -> None:
    """MixesRows when the rows are on one of the axes."""
    if value.rows is not None and value.rows.axis in axes:
        raise MixesRows(f"{how} the batch axis")


def with_rows_of(value: Value, shape: tuple[Size, ...]) -> Value:
    """A tensor with that shape and its rows in the same place."""
    return with_rows(shape, value.rows)


def with_rows(shape: tuple[Size, ...], rows: RowAxis | None) -> Value:
    """A tensor with that shape, and rows in that place."""
    if rows is None:
        return Value(shape)
    return Value((*shape[: rows.axis], rows.size, *shape[rows.axis + 1 :]), rows)


def on_axis(rows: RowAxis | None, axis: int) -> RowAxis | None:
    """The rows on another axis."""
    return None if rows is None else RowAxis(axis, rows.outer, rows.inner)


def rows_on_first_axis(node: Node, batched: Collection[int], how: str = "computes across") -> RowAxis | None:
    """Where the rows are in the outputs of an operator that has them on axis 0 of the inputs `batched`.

    These must all have rows there if one has, because none of them is broadcast. The others must have none.
    """
    require_rows_only_in(node, *batched)
    found: RowAxis | None = None
    for index in batched:
        if node.has(index) and (rows := node.input(index).rows) is not None:
            if rows.axis:
                raise MixesRows(f"{how} the batch axis")
            if found is not None and (found.outer, found.inner) != (rows.outer, rows.inner):
                raise UnknownEffect("combines rows that are merged with other axes in different ways")
            found = rows
    if found is not None:
        for index in batched:
            if node.has(index) and node.input(index).rows is None:
                raise UnknownEffect(f"takes rows, but none in its input {index}")
    return found


def no_size_counts_rows(sizes: Collection[object]) -> bool:
    """Whether none of the sizes depends on how many rows a batch has."""
    return not any(counts_rows(size) for size in sizes)
