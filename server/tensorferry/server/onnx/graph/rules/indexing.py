"""Operators that gather or scatter elements by indices."""

from __future__ import annotations

from tensorferry.server.onnx.graph.operators import ML, USES_ROW_INDICES, Node, axis_of, operator
from tensorferry.server.onnx.graph.row_axis import (
    on_axis,
    rearranged,
    reject_rows_on,
    require_rows_only_in,
    with_rows,
)
from tensorferry.server.onnx.graph.sizes import Product, Size, fixed, product
from tensorferry.server.onnx.graph.values import ALL, MixesRows, RowAxis, UnknownEffect, Value, of_content


@operator("Gather", row_indices=True)
def gather(node: Node) -> Value:
    """Take parts of an axis, at indices of any shape."""
    data, indices = node.input(0), node.input(1)
    sizes, at, axis = data.sizes, indices.sizes, node.axis(0)
    new = (*sizes[:axis], *at, *sizes[axis + 1 :])
    if data.content is not None and indices.content is not None:
        chosen = list(indices.content.flat)
        if all(isinstance(index, int) for index in chosen):
            return of_content(data.content.take(chosen, axis).reshape(fixed(new)))
    if data.row_indices or indices.row_indices:
        if data.row_indices or data.rows is None or data.rows.axis != axis or indices.row_indices != ALL:
            raise UnknownEffect(USES_ROW_INDICES)
        _check_own_rows(data, indices, -1)
        return with_rows(new, indices.rows and on_axis(indices.rows, axis + indices.rows.axis))
    if data.rows is not None and data.rows.axis == axis and indices.rows is None and indices.iterations:
        return Value(new, picked=indices.iterations)
    reject_rows_on(data, (axis,), "picks elements along")
    if data.rows is not None and indices.rows is not None:
        raise MixesRows("picks for each row from all rows")
    if data.rows is not None:
        shift = len(at) - 1 if data.rows.axis > axis else 0
        return with_rows(new, on_axis(data.rows, data.rows.axis + shift))
    return with_rows(new, indices.rows and on_axis(indices.rows, indices.rows.axis + axis))


@operator("GatherElements")
def gather_elements(node: Node) -> Value:
    """Take, for each index, the element at the same position on all axes but one."""
    data, indices = node.input(0), node.input(1)
    sizes = indices.sizes
    axis = axis_of(int(node.attribute("axis", 0)), len(sizes))
    if data.rows is None:
        if indices.rows is not None and indices.rows.axis != axis:
            raise MixesRows("picks by a row's index in the batch")
        return with_rows(sizes, indices.rows)
    reject_rows_on(data, (axis,), "picks elements along", indices)
    if indices.rows is None:
        raise UnknownEffect("picks elements at fixed positions of the batch axis")
    if indices.rows != data.rows:
        raise MixesRows("picks rows along one axis by rows along another")
    return with_rows(sizes, data.rows)


@operator("GatherND", row_indices=True)
def gather_nd(node: Node) -> Value:
    """Take parts at indices of several axes."""
    data, indices = node.input(0), node.input(1)
    sizes, at = data.sizes, indices.sizes
    batch = int(node.attribute("batch_dims", 0))
    width = at[-1] if at else None
    if not isinstance(width, int):
        raise UnknownEffect("takes indices of unknown length")
    reject_rows_on(indices, (len(at) - 1,), "takes indices along")
    new = (*at[:-1], *sizes[batch + width :])
    if data.row_indices or (indices.row_indices and (batch or data.rows is None)):
        raise UnknownEffect(USES_ROW_INDICES)
    if data.rows is None:
        if indices.rows is not None and indices.rows.axis < batch:
            raise UnknownEffect("has a batch axis that its data lacks")
        return with_rows(new, indices.rows)
    axis = data.rows.axis
    if axis < batch:
        if indices.rows != data.rows:
            raise UnknownEffect("takes indices that have no rows beside data that has")
        return with_rows(new, data.rows)
    if indices.row_indices:
        _check_own_rows(data, indices, axis)
        return with_rows(new, indices.rows)
    if axis < batch + width and indices.rows is None and indices.iterations:
        return Value(new, picked=indices.iterations)
    reject_rows_on(data, range(batch, batch + width), "picks elements along")
    if indices.rows is not None:
        raise MixesRows("picks for each row from all rows")
    return with_rows(new, on_axis(data.rows, axis - batch - width + len(at) - 1))


def _check_own_rows(data: Value, indices: Value, position: int) -> None:
    """Raise UnknownEffect unless the indices are known to select each row's own index on the batch axis."""
    whole = all(
        value.rows is not None and (value.rows.outer, value.rows.inner) == (1, 1) for value in (data, indices)
    )
    if not whole or position not in indices.row_indices:
        raise UnknownEffect(USES_ROW_INDICES)


@operator("ScatterElements Scatter")
def scatter_elements(node: Node) -> Value:
    """Put elements into the data: the index gives the position on one axis, its own position the others."""
    values = [node.input(index) for index in range(3)]
    axis = node.axis(0)
    for value in values:
        reject_rows_on(value, (axis,), "puts elements along", values[1])
    if len({value.rows for value in values}) > 1:
        raise UnknownEffect(
            "puts elements of rows among elements that have none, or rows along one axis along another"
        )
    return with_rows(node.shape(0), values[0].rows)


@operator("ScatterND", row_indices=True)
def scatter_nd(node: Node) -> Value:
    """Put parts into the data, at indices of several axes."""
    data, indices, updates = (node.input(index) for index in range(3))
    sizes, at = data.sizes, indices.sizes
    if data.rows is indices.rows is updates.rows is None:
        return Value(sizes)
    width = at[-1] if at else None
    if indices.row_indices and not data.row_indices and not updates.row_indices and data.rows is not None:
        _check_own_rows(data, indices, data.rows.axis)
        if updates.rows != indices.rows:
            raise UnknownEffect("puts elements that have no rows, or have them on another axis")
        return with_rows(sizes, data.rows)
    if any(value.row_indices for value in (data, indices, updates)):
        raise UnknownEffect(USES_ROW_INDICES)
    if data.rows is None or indices.rows is not None or not isinstance(width, int):
        raise UnknownEffect(
            "puts rows at positions that are computed at run time, or into a tensor without rows"
        )
    reject_rows_on(data, range(width), "puts elements along", indices)
    expected = on_axis(data.rows, len(at) - 1 + data.rows.axis - width)
    if updates.rows != expected:
        raise UnknownEffect("puts elements that have no rows, or have them on another axis")
    return with_rows(sizes, data.rows)


@operator("OneHot", shape_inputs=(1,))
def one_hot(node: Node) -> Value:
    """Add an axis for the classes."""
    require_rows_only_in(node, 0)
    rank, axis = len(node.shape(0)), node.axis(-1, more=1)
    numbers = node.input(1).content
    depth: Size = node.fresh() if numbers is None else numbers.reshape(-1)[0]
    depth = depth if isinstance(depth, Product) else int(depth)
    return rearranged(node.input(0), [*range(axis), None, *range(axis, rank)], depth)


@operator("TopK", shape_inputs=(1,))
def top_k(node: Node) -> list[Value]:
    """Return the greatest elements along an axis, and their positions on it."""
    value, rank, axis = node.input(0), len(node.shape(0)), node.axis(-1)
    reject_rows_on(value, (axis,), "sorts along")
    count: Size = node.fresh()
    if "k" in node.attributes:
        count = int(node.attributes["k"])
    elif (content := node.input(1).content) is not None:
        count = content.reshape(-1)[0]
    return [rearranged(value, [*range(axis), None, *range(axis + 1, rank)], count)] * 2


@operator("ArrayFeatureExtractor", ML)
def array_feature_extractor(node: Node) -> Value:
    """Take parts of the last axis."""
    data, indices = node.input(0), node.input(1)
    sizes, at = data.sizes, indices.sizes
    count = product(*at)
    if data.rows is not None:
        if indices.rows is not None:
            raise MixesRows("picks for each row from all rows")
        reject_rows_on(data, (len(sizes) - 1,), "picks elements along", indices)
    new = (*(sizes[:-1] if len(sizes) > 1 else (1,)), count)
    rows = data.rows
    if indices.rows is not None:
        outer = product(*at[: indices.rows.axis], indices.rows.outer)
        inner = product(indices.rows.inner, *at[indices.rows.axis + 1 :])
        rows = RowAxis(len(new) - 1, outer, inner)
    return with_rows(new, rows)


@operator("ReverseSequence")
def reverse_sequence(node: Node) -> Value:
    """Reverse a part of the time axis; each row has its own length."""
    value, lengths = node.input(0), node.input(1)
    batch, time = int(node.attribute("batch_axis", 1)), int(node.attribute("time_axis", 0))
    if value.rows is None:
        if lengths.rows is not None:
            raise UnknownEffect("takes lengths for rows that its data lacks")
        return Value(value.sizes)
    reject_rows_on(value, (time,), "turns round")
    if value.rows.axis == batch and (lengths.rows is None or lengths.rows != on_axis(value.rows, 0)):
        raise UnknownEffect("takes lengths that have no rows")
    if value.rows.axis != batch and lengths.rows is not None:
        raise MixesRows("takes lengths for rows along another axis")
    return with_rows(value.sizes, value.rows)
