"""What rules ask about the places of rows in their inputs."""

from __future__ import annotations

from collections.abc import Collection

from tensorferry.server.onnx_graph.operators import MixesRows, Node, NotKnown
from tensorferry.server.onnx_graph.sizes import Size, counts_rows
from tensorferry.server.onnx_graph.values import Rows, Value


def shape_of(value: Value) -> tuple[Size, ...]:
    """The shape; NotKnown when the rank is unknown."""
    if value.shape is None:
        raise NotKnown("takes a tensor of unknown rank")
    return value.shape


def axis_of(axis: int, rank: int) -> int:
    """The axis counted from the first."""
    if not -rank <= axis < max(rank, 1):
        raise NotKnown(f"has axis {axis} for a tensor of rank {rank}")
    return axis + rank if axis < 0 else axis


def only_rows_in(node: Node, *indices: int) -> None:
    """NotKnown when another input has rows."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.rows is not None and index not in indices:
            raise NotKnown(f"takes rows in its input {index}")


def keep_apart(value: Value, axes: Collection[int], how: str) -> None:
    """MixesRows when the rows are on one of the axes."""
    if value.rows is not None and value.rows.axis in axes:
        raise MixesRows(f"{how} the batch axis")


def with_rows_of(value: Value, shape: tuple[Size, ...]) -> Value:
    """A tensor with that shape and its rows in the same place."""
    return placed(shape, value.rows)


def placed(shape: tuple[Size, ...], rows: Rows | None) -> Value:
    """A tensor with that shape, and rows in that place."""
    if rows is None:
        return Value(shape)
    return Value((*shape[: rows.axis], rows.size, *shape[rows.axis + 1 :]), rows)


def moved(rows: Rows | None, axis: int) -> Rows | None:
    """The rows on another axis."""
    return None if rows is None else Rows(axis, rows.outer, rows.inner)


def only_first_axis(node: Node, batched: Collection[int], how: str = "computes across") -> Rows | None:
    """Where the rows are in the outputs of an operator that has them on axis 0 of the inputs `batched`.

    These must all have rows there if one has, because none of them is broadcast. The others must have none.
    """
    only_rows_in(node, *batched)
    found: Rows | None = None
    for index in batched:
        if node.has(index) and (rows := node.input(index).rows) is not None:
            if rows.axis:
                raise MixesRows(f"{how} the batch axis")
            if found is not None and (found.outer, found.inner) != (rows.outer, rows.inner):
                raise NotKnown("combines rows that are merged with other axes in different ways")
            found = rows
    if found is not None:
        for index in batched:
            if node.has(index) and node.input(index).rows is None:
                raise NotKnown(f"takes rows, but none in its input {index}")
    return found


def no_size_counts_rows(sizes: Collection[object]) -> bool:
    """Whether none of the sizes depends on how many rows a batch has."""
    return not any(counts_rows(size) for size in sizes)
