"""Matrix products and other sums of products over axes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from tensorferry.server.onnx.graph.operators import MICROSOFT, Node, operator
from tensorferry.server.onnx.graph.row_axis import (
    broadcast,
    longest,
    on_axis,
    rearranged,
    reject_one_row,
    reject_rows_on,
    require_rows_only_in,
    require_same_merging,
    with_rows,
)
from tensorferry.server.onnx.graph.sizes import Size
from tensorferry.server.onnx.graph.values import MixesRows, RowAxis, UnknownEffect, Value


@operator("MatMul MatMulInteger")
@operator("MatMulIntegerToFloat FusedMatMul", MICROSOFT)
def multiply(
    node: Node,
    other: int = 1,
    having_rows: Collection[int] = (0, 1),
    scales_of_first: Collection[int] = (2, 4),
) -> Value:
    """Multiply input 0 with another one. The factors are transposed first if the attributes say so.

    Only `having_rows` may have rows. Other inputs are scales and zero points: `scales_of_first` are those of input 0.
    """
    if node.attribute("transBatchA", 0) or node.attribute("transBatchB", 0):
        raise UnknownEffect("moves the first axis of its inputs")
    require_rows_only_in(node, *having_rows)
    found = matrix_product(_factor(node, 0, "transA"), _factor(node, other, "transB"))
    if found.rows is None:
        return found
    rows_are_columns = found.rows.axis == len(found.sizes) - 1
    for index, scale in enumerate(node.inputs):
        if scale is None or index in having_rows or scale.sizes in ((), (1,)):
            continue
        # One for each row of input 0, or for each column of the product.
        if index in scales_of_first or rows_are_columns:
            raise UnknownEffect("has scales or zero points along the batch axis")
    return found


operator("QLinearMatMul")(partial(multiply, other=3, having_rows=(0, 3), scales_of_first=(1, 2)))
operator("QGemm", MICROSOFT)(partial(multiply, other=3, having_rows=(0,), scales_of_first=(1, 2)))


@operator("Gemm")
@operator("FusedGemm", MICROSOFT)
def multiply_and_add(node: Node) -> Value:
    """Multiply two inputs, and add input 2 if it is given."""
    found = multiply(node, having_rows=(0, 1, 2))
    return broadcast([found, node.input(2)]) if node.has(2) else found


@operator("DynamicQuantizeMatMul", MICROSOFT)
def dynamically_quantised_matmul(node: Node) -> Value:
    """Multiply after quantising input 0 with one scale for all elements."""
    if node.input(0).rows is not None:
        raise MixesRows("takes one scale from the values of all rows (dynamic quantisation)")
    require_rows_only_in(node)
    return matrix_product(node.input(0), node.input(1))


@operator("MatMulNBits", MICROSOFT)
def matmul_of_few_bits(node: Node) -> Value:
    """Multiply by a matrix of N columns that is stored in few bits."""
    require_rows_only_in(node, 0)
    value, sizes = node.input(0), node.shape(0)
    reject_rows_on(value, (len(sizes) - 1,), "adds up over")
    return with_rows((*sizes[:-1], int(node.attribute("N"))), value.rows)


def _factor(node: Node, index: int, transposes: str) -> Value:
    """Return an input, with its last two axes exchanged if the attribute says so."""
    value = node.input(index)
    if not node.attribute(transposes, 0) or len(value.sizes) < 2:
        return value
    return rearranged(value, [*range(len(value.sizes) - 2), len(value.sizes) - 1, len(value.sizes) - 2])


def matrix_product(one: Value, other: Value) -> Value:
    """Return the product of two stacks of matrices."""
    if one.rows is None and other.rows is None and (one.shape is None or other.shape is None):
        return Value()
    left, right = one.sizes, other.sizes
    if not left or not right:
        raise UnknownEffect("multiplies scalars")
    reject_rows_on(one, (len(left) - 1,), "adds up over")
    reject_rows_on(other, (max(len(right) - 2, 0),), "adds up over")
    # As einsum: labels count from the last axis of the batch of matrices.
    batch = [f"b{at}" for at in range(max(len(left), len(right), 2) - 2)]
    first = [*batch, "m"][-len(left) + 1 :] if len(left) > 1 else []
    second = [*batch[len(batch) - (len(right) - 2) :], "k", "n"] if len(right) > 1 else ["k"]
    out = [*batch, *(["m"] if len(left) > 1 else []), *(["n"] if len(right) > 1 else [])]
    return sum_of_products([one, other], [[*first, "k"], second], out)


def sum_of_products(values: Sequence[Value], terms: Sequence[Sequence[str]], out: Sequence[str]) -> Value:
    """Return the sum of products over the axes whose labels are not in `out`."""
    reject_one_row(values)
    row_label: tuple[str, RowAxis] | None = None
    for value, labels in zip(values, terms, strict=True):
        if value.rows is None:
            continue
        label = labels[value.rows.axis]
        if labels.count(label) > 1:
            raise MixesRows("takes a diagonal across the batch axis")
        if label not in out:
            raise MixesRows("adds up over the batch axis")
        if row_label is not None and row_label[0] != label:
            raise MixesRows("multiplies rows along one axis with rows along another")
        if row_label is not None:
            require_same_merging(row_label[1], value.rows)
        row_label = label, value.rows
    sizes: dict[str, list[Size]] = {}
    for value, labels in zip(values, terms, strict=True):
        for label, size in zip(labels, value.sizes, strict=True):
            sizes.setdefault(label, []).append(size)
            if row_label is not None and label == row_label[0] and value.rows is None and size != 1:
                raise UnknownEffect(f"multiplies the batch axis with an axis of size {size}")
    shape = tuple(longest(sizes[label]) for label in out)
    if row_label is None:
        return Value(shape)
    return with_rows(shape, on_axis(row_label[1], list(out).index(row_label[0])))


@operator("Einsum")
def einsum(node: Node) -> Value:
    """Sum products over the axes that the equation leaves out."""
    equation = str(node.attribute("equation", "")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(node.inputs):
        raise UnknownEffect("has an equation for another number of inputs")
    values = [node.input(index) for index in range(len(terms))]
    ranks = [len(value.sizes) for value in values]
    spread = max(rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True))
    labels = [_labels(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    if arrow:
        out = _labels(right, len(right.replace("...", "")) + (spread if "..." in right else 0))
    else:
        letters = left.replace("...", "").replace(",", "")
        single = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        dots = [f".{at}" for at in reversed(range(spread))] if "..." in left else []
        out = [*dots, *single]
    return sum_of_products(values, labels, out)


def _labels(term: str, rank: int) -> list[str]:
    before, dots, after = term.partition("...")
    count = rank - len(before) - len(after)
    if count < 0 or (count and not dots):
        raise UnknownEffect("has an equation for tensors of another rank")
    return [*before, *(f".{at}" for at in reversed(range(count))), *after]
