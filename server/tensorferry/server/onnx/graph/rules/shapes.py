"""Operators that compute shapes or change the shape of tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnx import numpy_helper

from tensorferry.server.onnx.graph.model_file import constant
from tensorferry.server.onnx.graph.operators import USES_ROW_INDICES, Node, axis_of, operator
from tensorferry.server.onnx.graph.row_axis import rearranged, with_rows
from tensorferry.server.onnx.graph.rules.folding import require_exact
from tensorferry.server.onnx.graph.sizes import (
    NUMBER_OF_ROWS,
    ROWS,
    Product,
    Size,
    counts_rows,
    fixed,
    is_size,
    product,
    quotient,
)
from tensorferry.server.onnx.graph.values import (
    ALL,
    MixesRows,
    RowAxis,
    UnknownEffect,
    Value,
    of_content,
    vector_of,
)

# Longer ranges are not kept.
_MOST = 256


@operator("Constant")
def constant_of(node: Node) -> Value:
    """Return the tensor in an attribute."""
    for name, value in node.attributes.items():
        if name == "value":
            return constant(value)
        if name in ("value_int", "value_float", "value_ints", "value_floats"):
            return constant(numpy_helper.from_array(np.array(value)))
        if name in ("value_string", "value_strings"):
            return Value(() if name == "value_string" else (len(value),))
    raise UnknownEffect("has no tensor of a known kind")


@operator("Shape", shape_only=True, row_indices=True)
def shape(node: Node) -> Value:
    """Return the sizes of the axes, or of some of them."""
    sizes = node.shape(0)
    return of_content(vector_of(sizes[slice(node.attribute("start"), node.attribute("end"))]))


@operator("Size", shape_only=True)
def element_count(node: Node) -> Value:
    """Return the number of elements."""
    return of_content(np.array(product(*node.shape(0)), object))


@operator("Transpose")
def transpose(node: Node) -> Value:
    """Permute the axes."""
    value = node.input(0)
    order = node.axes(node.attribute("perm") or reversed(range(len(value.sizes))))
    if value.content is not None:
        return of_content(value.content.transpose(order))
    return rearranged(value, order)


@operator("Reshape", shape_inputs=(1,), row_indices=True)
def reshape(node: Node) -> Value:
    """Change the shape. Rows stay independent if their number is a factor of one axis of the new shape."""
    value = node.input(0)
    target = node.sizes("shape", 1)
    if target is None:
        raise UnknownEffect("has no shape")
    old = value.shape
    if value.rows is None and value.content is None and old is None:
        return Value(
            tuple(size if isinstance(size, int) and size > 0 else node.fresh(size) for size in target)
        )
    old = value.sizes
    # A number that may be 0 or -1 stands for another size.
    sizes: list[Size] = [size if is_size(size) or size == -1 else node.fresh(size) for size in target]
    if not node.attribute("allowzero", 0):
        sizes = [old[at] if size == 0 and at < len(old) else size for at, size in enumerate(sizes)]
        # If one of its own sizes is 0, the tensor is empty. Another that is 0 copies a size.
        own = {ROWS, *(symbol for size in old if isinstance(size, Product) for symbol in size.symbols)}
        sizes = [
            node.fresh(size) if isinstance(size, Product) and not own.issuperset(size.symbols) else size
            for size in sizes
        ]
    if -1 in sizes:
        at = sizes.index(-1)
        others = [*sizes[:at], *sizes[at + 1 :]]
        sizes[at] = _inferred(node, old, others)
    return _numbered(value, _reshaped(value, tuple(sizes)))


def _numbered(value: Value, made: Value) -> Value:
    """Return the reshaped tensor `made`, with the row indices of `value` if it has any."""
    if not value.row_indices:
        return made
    if value.row_indices != ALL or made.rows is None or (made.rows.outer, made.rows.inner) != (1, 1):
        raise UnknownEffect(USES_ROW_INDICES)
    return replace(made, row_indices=ALL)


@operator("Flatten")
def flatten_axes(node: Node) -> Value:
    """Merge the axes before the given axis, and those from it on."""
    sizes, axis = node.shape(0), int(node.attribute("axis", 1))
    at = axis + len(sizes) if axis < 0 else axis
    return _reshaped(node.input(0), (product(*sizes[:at]), product(*sizes[at:])))


@operator("Squeeze", shape_inputs=(1,), row_indices=True)
def squeeze(node: Node) -> Value:
    """Remove axes of size 1."""
    value, sizes = node.input(0), node.shape(0)
    axes = node.integers("axes", 1)
    # ONNX Runtime takes an empty list for none.
    if not axes:
        if value.rows is not None:
            raise UnknownEffect("removes the batch axis if there is one row")
        if any(isinstance(size, Product) for size in sizes):
            raise UnknownEffect("removes axes depending on their sizes")
        axes = [axis for axis, size in enumerate(sizes) if size == 1]
    left_out = node.axes(axes)
    if value.rows is not None and value.rows.axis in left_out:
        raise MixesRows("removes the batch axis")
    return _with_axes(value, [axis for axis in range(len(sizes)) if axis not in left_out])


def _with_axes(value: Value, origins: Sequence[int | None]) -> Value:
    """Return the tensor with axes of size 1 added or removed, as `rearranged` does."""
    made = rearranged(value, origins)
    if value.content is not None:
        return of_content(value.content.reshape(fixed(made.sizes)))
    return _numbered(value, made)


@operator("Unsqueeze", shape_inputs=(1,), row_indices=True)
def unsqueeze(node: Node) -> Value:
    """Insert axes of size 1."""
    axes = node.integers("axes", 1)
    if axes is None:
        raise UnknownEffect("has no axes")
    old = len(node.shape(0))
    new_axes = {axis_of(axis, old + len(axes)) for axis in axes}
    if len(new_axes) != len(axes):
        raise UnknownEffect("has the same axis twice")
    numbers = iter(range(old))
    return _with_axes(
        node.input(0), [None if axis in new_axes else next(numbers) for axis in range(old + len(axes))]
    )


@operator("Expand", shape_inputs=(1,), row_indices=True)
def expand(node: Node) -> Value:
    """Repeat along axes of size 1, up to the given shape."""
    value = node.input(0)
    old = value.sizes
    target = node.sizes("shape", 1)
    if target is None:
        raise UnknownEffect("has no shape")
    rank = max(len(old), len(target))
    old = (1,) * (rank - len(old)) + old
    wanted = [1] * (rank - len(target)) + target
    new = tuple(_stretched(node, *pair) for pair in zip(old, wanted, strict=True))
    if value.rows is None:
        return constant_along_axes(new)
    rows = RowAxis(value.rows.axis + rank - len(value.sizes), value.rows.outer, value.rows.inner)
    if wanted[rows.axis] not in (1, rows.size):
        raise UnknownEffect(f"stretches the batch axis to the size {wanted[rows.axis]}")
    return _numbered(value, with_rows(new, rows))


def _stretched(node: Node, old: Size, wanted: Size) -> Size:
    if isinstance(wanted, int) and wanted < 0:
        raise UnknownEffect(f"has the size {wanted} in its shape")
    if old == wanted or wanted == 1 or (isinstance(old, int) and old != 1):
        return old
    return wanted if old == 1 or isinstance(wanted, int) else node.fresh(old, wanted)


def constant_along_axes(sizes: tuple[Size, ...]) -> Value:
    """Return a tensor that is constant along its axes. An axis whose size counts rows has equal rows."""
    counting = [axis for axis, size in enumerate(sizes) if counts_rows(size)]
    if not counting:
        return Value(sizes)
    inner = quotient(sizes[counting[0]], NUMBER_OF_ROWS)
    if len(counting) > 1 or inner is None or counts_rows(inner):
        raise UnknownEffect("makes several axes, or a part of one, from the number of rows in the batch")
    return with_rows(sizes, RowAxis(counting[0], 1, inner))


@operator("ConstantOfShape", shape_inputs=(0,))
def constant_of_shape(node: Node) -> Value:
    """Fill a shape with one number."""
    sizes = node.sizes("shape", 0) or []
    if len(sizes) <= 1 and all(isinstance(size, int) and size <= _MOST for size in sizes):
        given = node.attribute("value")
        found = of_content(np.array([0.0], object)) if given is None else constant(given)
        if found.content is not None:
            return of_content(np.full(tuple(sizes), found.content.reshape(-1)[0], object))
    return constant_along_axes(tuple(size if is_size(size) else node.fresh(size) for size in sizes))


@operator("Range", shape_inputs=(0, 1, 2))
def numbers_in_a_range(node: Node) -> Value:
    """Return the numbers of a range."""
    contents = [node.content(index) for index in range(3)]
    start, limit, delta = (None if content is None else content.reshape(-1)[0] for content in contents)
    if start == 0 and limit == NUMBER_OF_ROWS and delta == 1:
        return Value((NUMBER_OF_ROWS,), RowAxis(0), row_indices=ALL)
    if counts_rows(start) or counts_rows(limit) or counts_rows(delta):
        raise UnknownEffect("makes a range from the number of rows in the batch")
    if isinstance(start, Product) or isinstance(limit, Product) or isinstance(delta, Product):
        simple = start == 0 and delta == 1 and is_size(limit)
        return Value((product(limit or 0) if simple else node.fresh(),))
    if start is None or limit is None or not delta:
        raise UnknownEffect("lacks a limit")
    count = max(math.ceil((limit - start) / delta), 0)
    if count > _MOST:
        return Value((count,))
    numbers = [start + at * delta for at in range(count)]
    for number in (limit - start, *numbers):
        require_exact(number)
    return of_content(vector_of(numbers))


@operator("Tile", shape_inputs=(1,))
def tile(node: Node) -> Value:
    """Repeat whole axes."""
    value = node.input(0)
    sizes = value.sizes
    repeats = node.sizes("repeats", 1)
    if repeats is None or len(repeats) != len(sizes):
        raise UnknownEffect("has no number of repeats for each axis")
    new = tuple(product(*pair) for pair in zip(sizes, repeats, strict=True))
    if value.rows is None:
        once = [axis for axis, times in enumerate(repeats) if times == NUMBER_OF_ROWS]
        if len(once) == 1:
            # A whole axis for each row, as relative positions are repeated for heads.
            return with_rows(new, RowAxis(once[0], 1, sizes[once[0]]))
        if all(size == 1 or times == 1 for size, times in zip(sizes, repeats, strict=True)):
            return constant_along_axes(new)
        return Value(new)
    axis = value.rows.axis
    if counts_rows(repeats[axis]):
        raise UnknownEffect("repeats the batch axis once per row of the batch")
    return with_rows(new, RowAxis(axis, product(repeats[axis], value.rows.outer), value.rows.inner))


def _inferred(node: Node, old: Sequence[Size], others: Sequence[Size]) -> Size:
    """Return the size for which -1 stands."""
    exact = quotient(product(*old), product(*others))
    if exact is not None:
        return exact
    # Factors on both sides are left out, so that the size does not seem to depend on them.
    above = Counter(symbol for one in old if isinstance(one, Product) for symbol in one.symbols)
    below = Counter(symbol for one in others if isinstance(one, Product) for symbol in one.symbols)
    left = [Product(1, (symbol,)) for symbol in ((above - below) + (below - above))]
    return node.fresh(*left)


def _reshaped(value: Value, sizes: tuple[Size, ...]) -> Value:
    if value.content is not None:
        known = fixed(sizes)
        if len(known) == len(sizes):
            return of_content(value.content.reshape(known))
    return with_rows(sizes, value.rows and row_axis_after_reshape(value.sizes, value.rows, sizes))


def row_axis_after_reshape(old: Sequence[Size], rows: RowAxis, new: Sequence[Size]) -> RowAxis:
    """Return the row axis in the new shape, in which each row has the same elements in the same order.

    Raises MixesRows or UnknownEffect if there is no such axis.
    """
    before = product(*old[: rows.axis], rows.outer)
    after = product(rows.inner, *old[rows.axis + 1 :])
    for axis, size in enumerate(new):
        outer = quotient(before, product(*new[:axis]))
        inner = quotient(after, product(*new[axis + 1 :]))
        # Reshape fails unless the elements before and after are as many. So if those before the axis match, those after it
        # match too whenever the node runs, although unknown sizes may be written otherwise: from [rows, h*w, 8] to
        # [rows, 1, w, 8] it runs only if h is 1.
        if outer is not None:
            inner = quotient(size, product(outer, NUMBER_OF_ROWS))
        elif inner is not None:
            outer = quotient(size, product(inner, NUMBER_OF_ROWS))
        if outer is None or inner is None or product(outer, NUMBER_OF_ROWS, inner) != size:
            continue
        if not counts_rows(outer) and not counts_rows(inner):
            return RowAxis(axis, outer, inner)
    sizes = f"from shape {_written(old)} to {_written(new)}"
    if all(_simple(size) for size in (*old, *new)):
        raise MixesRows(f"splits the batch axis across rows, {sizes}")
    raise UnknownEffect(f"moves the batch axis to an unknown position, {sizes}")


def _simple(size: Size) -> bool:
    return isinstance(size, int) or size.symbols == NUMBER_OF_ROWS.symbols


def _written(sizes: Sequence[Size]) -> str:
    return f"[{', '.join('?' if str(size).startswith('?') else str(size) for size in sizes)}]"
