"""Operators that join tensors along an axis or take parts of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from tensorferry.server.onnx.graph.operators import MICROSOFT, ML, USES_ROW_INDICES, Node, axis_of, operator
from tensorferry.server.onnx.graph.row_axis import (
    rearranged,
    reject_rows_on,
    require_rows_only_in,
    require_same_merging,
    with_rows,
)
from tensorferry.server.onnx.graph.sizes import NUMBER_OF_ROWS, Product, Size, fixed, product, quotient, total
from tensorferry.server.onnx.graph.values import ALL, MixesRows, RowAxis, UnknownEffect, Value, of_content

# A Slice end of at least this value means the end of the axis: tf2onnx writes it for "all". No message has as many rows.
_END = 10**9


@operator("Concat", row_indices=True)
def concat(node: Node) -> Value:
    """Concatenate tensors along an axis."""
    axis = int(node.attribute("axis", 1))
    made = joined_along(node.given, axis)
    if any(value.row_indices for value in node.given):
        return replace(made, row_indices=_numbers(node.given, axis))
    return made


def _numbers(values: Sequence[Value], axis: int) -> frozenset[int]:
    """Return the positions of row indices on the last axis after concatenation."""
    if axis_of(axis, len(values[0].sizes)) != len(values[0].sizes) - 1:
        raise UnknownEffect(USES_ROW_INDICES)
    found: set[int] = set()
    before = 0
    for value in values:
        width = value.sizes[-1]
        if not isinstance(width, int):
            raise UnknownEffect(USES_ROW_INDICES)
        found |= {before + at for at in (range(width) if value.row_indices == ALL else value.row_indices)}
        before += width
    return frozenset(found)


@operator("QLinearConcat", MICROSOFT)
def quantised_concat(node: Node) -> Value:
    """Concatenate every third input; the others are scales and zero points."""
    tensors = range(2, len(node.inputs), 3)
    require_rows_only_in(node, *tensors)
    return joined_along([node.input(index) for index in tensors], int(node.attribute("axis", 1)))


@operator("FeatureVectorizer", ML)
def features(node: Node) -> Value:
    """Concatenate the features of each row."""
    if any(len(value.sizes) != 2 for value in node.given):
        raise UnknownEffect("joins tensors that are not matrices")
    return joined_along(node.given, 1)


def joined_along(values: Sequence[Value], axis: int) -> Value:
    """Return the values concatenated along the axis."""
    shapes = [value.sizes for value in values]
    rank = len(shapes[0])
    axis = axis_of(axis, rank)
    if any(len(one) != rank for one in shapes):
        raise UnknownEffect("joins tensors of different ranks")
    known = [value.content for value in values if value.content is not None]
    if len(known) == len(values):
        return of_content(np.concatenate(known, axis))
    length = reduce(total, [one[axis] for one in shapes])
    sizes = tuple(
        length if at == axis else next((one[at] for one in shapes if isinstance(one[at], int)), shapes[0][at])
        for at in range(rank)
    )
    row_axes = [value.rows for value in values if value.rows is not None]
    if not row_axes:
        return Value(sizes)
    first_rows = row_axes[0]
    if any(rows.axis != first_rows.axis for rows in row_axes):
        raise MixesRows("joins rows along one axis with rows along another")
    if len(row_axes) != len(values):
        how = "along the batch axis" if first_rows.axis == axis else "that are not broadcast"
        raise UnknownEffect(f"joins rows with other values {how}")
    if first_rows.axis != axis:
        for rows in row_axes:
            require_same_merging(first_rows, rows)
        return with_rows(sizes, first_rows)
    if any(rows.inner != first_rows.inner for rows in row_axes):
        raise UnknownEffect("joins rows of different lengths along the batch axis")
    return with_rows(sizes, replace(first_rows, outer=reduce(total, [rows.outer for rows in row_axes])))


@operator("Split", shape_inputs=(1,))
def split_axis(node: Node) -> list[Value]:
    """Split an axis. The batch axis may be split only into copies of all rows."""
    value, sizes, axis = node.input(0), node.shape(0), node.axis(0)
    parts = node.sizes("split", 1)
    if parts is None:
        parts = _equal_parts(node, sizes[axis])
    if len(parts) != node.outputs:
        raise UnknownEffect("has a different number of outputs than parts")
    if value.content is not None and all(isinstance(part, int) for part in parts):
        ends = np.cumsum(fixed(parts))[:-1]
        return [of_content(part) for part in np.split(value.content, ends, axis)]
    made = []
    for part in parts:
        new = (*sizes[:axis], part, *sizes[axis + 1 :])
        rows = value.rows
        if rows is not None and rows.axis == axis:
            copies = quotient(part, product(NUMBER_OF_ROWS, rows.inner))
            if copies is None:
                raise MixesRows("takes a part of the batch axis")
            rows = replace(rows, outer=copies)
        made.append(with_rows(new, rows))
    return made


def _equal_parts(node: Node, size: Size) -> list[Size]:
    count = int(node.attribute("num_outputs", node.outputs))
    if isinstance(size, int):
        longest = -(-size // count)
        return [*[longest] * (count - 1), size - longest * (count - 1)]
    exact = quotient(size, count)
    # All parts but the last have the same length.
    return [exact] * count if exact is not None else [*[node.fresh(size)] * (count - 1), node.fresh(size)]


@operator("Slice", shape_inputs=(1, 2, 3, 4))
def slice_of(node: Node) -> Value:
    """Take a part of each of some axes."""
    value, sizes = node.input(0), list(node.shape(0))
    starts, ends = _bounds(node, "starts", 1), _bounds(node, "ends", 2)
    given = node.integers("axes", 3)
    count = len(starts or ends or given or sizes)
    axes = node.axes(range(count) if given is None else given)
    # Steps that are computed at run time are unknown, not left out.
    steps = _bounds(node, "steps", 4) if node.has(4) or "steps" in node.attributes else [1] * count
    rows = value.rows
    varying = frozenset[str]().union(*(bound.iterations for bound in node.inputs[1:] if bound is not None))
    picked = frozenset[str]()
    numbers = (*(starts or [None]), *(ends or [None]), *(steps or [None]))
    if value.content is not None and all(isinstance(number, int) for number in numbers):
        pick = [slice(None)] * len(sizes)
        for axis, *bounds in zip(axes, starts or (), ends or (), steps or (), strict=True):
            pick[axis] = _slice(value.content.shape[axis], *bounds)
        return of_content(value.content[tuple(pick)])
    for at, axis in enumerate(axes):
        start, end, step = (None if part is None else part[at] for part in (starts, ends, steps))
        if rows is not None and rows.axis == axis and varying and len(axes) == 1:
            rows, picked, sizes[axis] = None, varying, node.fresh()
        elif rows is not None and rows.axis == axis:
            rows = _rows_of_part(rows, start, end, step)
        else:
            sizes[axis] = _length(node, sizes[axis], start, end, step)
    return replace(with_rows(tuple(sizes), rows), picked=picked)


def _bounds(node: Node, name: str, index: int) -> list[Any] | None:
    """Return the numbers; None if they are computed at run time or left out."""
    if node.has(index) and node.input(index).content is None:
        return None
    return node.sizes(name, index)


def _slice(size: int, start: int, end: int, step: int) -> slice:
    if step > 0:
        return slice(start, end, step)
    # ONNX begins at the first element or later, and in numpy only None is an end before it. ONNX Runtime takes the largest
    # integers for that.
    beyond = end < -size or end in (2**31 - 1, 2**63 - 1)
    return slice(max(start, -size), None if beyond else end, step)


def _rows_of_part(rows: RowAxis, start: Any, end: Any, step: Any) -> RowAxis:
    if start is None or end is None or step is None:
        raise UnknownEffect("takes a part of the batch axis that is computed at run time")
    if step == 1 and start == 0 and (end == rows.size or (isinstance(end, int) and end >= _END)):
        return rows
    one = product(NUMBER_OF_ROWS, rows.inner)
    first = 0 if start == 0 else quotient(start, one)
    last = rows.outer if isinstance(end, int) and end >= _END else quotient(end, one)
    if step != 1 or not (isinstance(first, int) and isinstance(last, int) and isinstance(rows.outer, int)):
        if isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
            raise MixesRows("takes a part of the batch axis")
        raise UnknownEffect("may take a part of the batch axis")
    if not 0 <= first < last <= rows.outer:
        raise UnknownEffect("may take a part of the batch axis")
    return RowAxis(rows.axis, last - first, rows.inner)


def _length(node: Node, size: Size, start: Any, end: Any, step: Any) -> Size:
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        return len(range(size)[_slice(size, start, end, step)])
    if step == 1 and start == 0:
        if end == size or (isinstance(end, int) and end >= _END):
            return size
        if isinstance(end, Product) and isinstance(size, int):
            # The end may be beyond the axis, so the length is a new unknown.
            return node.fresh(end)
    return node.fresh(size, start, end, step)


@operator("Pad", shape_inputs=(1, 3))
@operator("Pad", MICROSOFT, shape_inputs=(1,))
def pad(node: Node) -> Value:
    """Add elements at both ends of axes."""
    require_rows_only_in(node, 0)
    value, sizes = node.input(0), list(node.shape(0))
    pads = node.sizes("pads" if "pads" in node.attributes else "paddings", 1)
    if pads is None:
        raise UnknownEffect("has no pads")
    axes = node.axes(node.integers("axes", 3))
    if len(pads) != 2 * len(axes):
        raise UnknownEffect("does not have two pads for each axis")
    for at, axis in enumerate(axes):
        before, after = pads[at], pads[at + len(axes)]
        if value.rows is not None and value.rows.axis == axis:
            if isinstance(before, Product) or isinstance(after, Product):
                raise UnknownEffect("may pad the batch axis")
            if before or after:
                raise MixesRows("pads the batch axis")
        else:
            sizes[axis] = total(total(sizes[axis], before), after)
    return with_rows(tuple(sizes), value.rows)


@operator("Compress NonZero Unique", shape_from_values=True)
@operator("Unique", MICROSOFT, shape_from_values=True)
def value_dependent_size(node: Node) -> list[Value]:
    """Select elements; the output's shape depends on values."""
    if node.operator == "Compress" and node.input(1).rows is None and "axis" in node.attributes:
        axis = node.axis(0)
        reject_rows_on(node.input(0), (axis,), "leaves out elements along", node.input(1))
        origins = [*range(axis), None, *range(axis + 1, len(node.shape(0)))]
        return [rearranged(node.input(0), origins, node.fresh())]
    if any(value.rows is not None for value in node.given):
        raise UnknownEffect("computes a shape that depends on the rows' values")
    if node.operator == "NonZero":
        rank = node.input(0).rank
        return [Value(None if rank is None else (max(rank, 1), node.fresh()))]
    if "axis" in node.attributes:
        return [Value()] * node.outputs
    return [Value(node.fresh_shape(1)) for _ in range(node.outputs)]
