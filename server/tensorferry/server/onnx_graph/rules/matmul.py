"""Matrix products and other sums of products over axes."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.server.onnx_graph.broadcasting import broadcast
from tensorferry.server.onnx_graph.operators import MICROSOFT, MixesRows, Node, UnknownEffect, operator
from tensorferry.server.onnx_graph.row_axis import (
    reject_one_row,
    reject_rows_on,
    require_rows_only_in,
    require_same_merging,
    shape_of,
    with_rows,
)
from tensorferry.server.onnx_graph.sizes import Size
from tensorferry.server.onnx_graph.values import RowAxis, Value


@operator("MatMul")
def matmul(node: Node) -> Value:
    """Multiply as numpy's matmul does."""
    return matrix_product(node.input(0), node.input(1))


@operator("MatMulInteger")
@operator("MatMulIntegerToFloat", domain=MICROSOFT)
def integer_matmul(node: Node) -> Value:
    """Multiply integers; other inputs are scales and zero points."""
    require_rows_only_in(node, 0, 1)
    return matrix_product(node.input(0), node.input(1))


@operator("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamically_quantised_matmul(node: Node) -> Value:
    """Multiply after quantising input 0 with one scale for all elements."""
    if node.input(0).rows is not None:
        raise MixesRows("takes one scale from the values of all rows (dynamic quantisation)")
    require_rows_only_in(node, 0)
    return matrix_product(node.input(0), node.input(1))


@operator("QLinearMatMul")
def quantised_matmul(node: Node) -> Value:
    """Multiply inputs 0 and 3; the others are scales and zero points."""
    require_rows_only_in(node, 0, 3)
    return matrix_product(node.input(0), node.input(3))


@operator("FusedMatMul", domain=MICROSOFT)
def fused_matmul(node: Node) -> Value:
    """Multiply matrices, transposed first if the attributes say so."""
    if node.attribute("transBatchA", 0) or node.attribute("transBatchB", 0):
        raise UnknownEffect("moves the first axis of its inputs")
    return matrix_product(_factor(node, 0, "transA"), _factor(node, 1, "transB"))


@operator("MatMulNBits", domain=MICROSOFT)
def matmul_of_few_bits(node: Node) -> Value:
    """Multiply by a matrix of N columns that is stored in few bits."""
    require_rows_only_in(node, 0)
    value = node.input(0)
    sizes = shape_of(value)
    reject_rows_on(value, (len(sizes) - 1,), "adds up over")
    return with_rows((*sizes[:-1], int(node.attribute("N"))), value.rows)


@operator("Gemm")
@operator("FusedGemm", domain=MICROSOFT)
def gemm(node: Node) -> Value:
    """Multiply two matrices and add a third tensor."""
    found = matrix_product(_factor(node, 0, "transA"), _factor(node, 1, "transB"))
    return broadcast([found, node.input(2)]) if node.has(2) else found


@operator("QGemm", domain=MICROSOFT)
def quantised_gemm(node: Node) -> Value:
    """Multiply inputs 0 and 3, with a bias that has no rows."""
    require_rows_only_in(node, 0)
    return matrix_product(_factor(node, 0, "transA"), _factor(node, 3, "transB"))


def _factor(node: Node, index: int, transposes: str) -> Value:
    """Return an input, with its last two axes exchanged if the attribute says so."""
    value = node.input(index)
    if not node.attribute(transposes, 0):
        return value
    sizes = shape_of(value)
    if len(sizes) < 2:
        return value
    last = len(sizes) - 1
    rows = value.rows
    if rows is not None and rows.axis >= last - 1:
        rows = RowAxis(2 * last - 1 - rows.axis, rows.outer, rows.inner)
    return with_rows((*sizes[:-2], sizes[-1], sizes[-2]), rows)


def matrix_product(one: Value, other: Value) -> Value:
    """Return the product of two stacks of matrices."""
    if one.rows is None and other.rows is None and (one.shape is None or other.shape is None):
        return Value()
    left, right = shape_of(one), shape_of(other)
    if not left or not right:
        raise UnknownEffect("multiplies scalars")
    reject_rows_on(one, (len(left) - 1,), "adds up over")
    reject_rows_on(other, (max(len(right) - 2, 0),), "adds up over")
    # As einsum: labels count from the last axis of the batch of matrices.
    rank = max(len(left), len(right), 2) - 2
    batch = [f"b{at}" for at in range(rank)]
    first = [
        *(batch[rank - (len(left) - 2) :] if len(left) > 1 else []),
        *(["m"] if len(left) > 1 else []),
        "k",
    ]
    second = [*(batch[rank - (len(right) - 2) :] if len(right) > 2 else []), "k", "n"][
        : len(right) if len(right) < 2 else None
    ]
    out = [*batch, *(["m"] if len(left) > 1 else []), *(["n"] if len(right) > 1 else [])]
    return sum_of_products([one, other], [first, second], out)


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
    sizes: dict[str, Size] = {}
    for value, labels in zip(values, terms, strict=True):
        for label, size in zip(labels, shape_of(value), strict=True):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
            if row_label is not None and label == row_label[0] and value.rows is None and size != 1:
                raise UnknownEffect(f"multiplies the batch axis with an axis of size {size}")
    shape = tuple(sizes[label] for label in out)
    if row_label is None:
        return Value(shape)
    return with_rows(shape, RowAxis(list(out).index(row_label[0]), row_label[1].outer, row_label[1].inner))


@operator("Einsum")
def einsum(node: Node) -> Value:
    """Sum products over the axes that the equation leaves out."""
    equation = str(node.attribute("equation", "")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(node.inputs):
        raise UnknownEffect("has an equation for another number of inputs")
    values = [node.input(index) for index in range(len(terms))]
    ranks = [len(shape_of(value)) for value in values]
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
