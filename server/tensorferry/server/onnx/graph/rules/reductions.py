"""Operators that compute along axes: reductions, cumulative sums, normalisations and transforms."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tensorferry.server.onnx.graph.operators import MICROSOFT, Node, axis_of, operator
from tensorferry.server.onnx.graph.row_axis import (
    broadcast,
    rearranged,
    reject_rows_on,
    require_rows_only_in,
    rows_on_first_axis,
    with_rows,
)
from tensorferry.server.onnx.graph.rules.folding import require_exact
from tensorferry.server.onnx.graph.sizes import Product, product
from tensorferry.server.onnx.graph.values import Content, MixesRows, UnknownEffect, Value, of_content


def along_axes(node: Node, how: str, default: Sequence[int], attribute: str = "axis") -> Value:
    """Keep the shape and compute along axes, where the rows must not be.

    The axes are in the attribute or else in input 1; `default` if neither is given.
    """
    if "across_channels" in node.attributes:
        raise UnknownEffect("is of an old version")
    reject_rows_on(node.input(0), node.axes(node.integers(attribute, 1) or default), how)
    return with_rows(node.shape(0), node.input(0).rows)


operator("CumSum CumProd", shape_inputs=(1,))(partial(along_axes, how="adds up along", default=[0]))
operator("LpNormalization")(partial(along_axes, how="normalises over", default=[-1]))
operator("MeanVarianceNormalization")(
    partial(along_axes, how="normalises over", default=[0, 2, 3], attribute="axes")
)


@operator(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare",
    shape_inputs=(1,),
)
def reduce(node: Node) -> Value:
    """Reduce the given axes, or all axes if none is given."""
    given = node.integers("axes", 1)
    if not given and node.attribute("noop_with_empty_axes", 0):
        return with_rows(node.shape(0), node.input(0).rows)
    return _reduced(node, set(node.axes(given or None)))


@operator("ArgMax ArgMin")
def arg_max(node: Node) -> Value:
    """Return the position of one element along an axis."""
    return _reduced(node, {node.axis(0)})


def _reduced(node: Node, axes: Collection[int]) -> Value:
    value, rank = node.input(0), len(node.shape(0))
    keep = node.attribute("keepdims", 1)
    reject_rows_on(value, axes, "reduces over")
    if value.content is not None and len(axes) == rank:
        content = _of_all(value.content, node.operator)
        if content is not None:
            return of_content(content.reshape((1,) * rank) if keep else content)
    return rearranged(
        value, [None if axis in axes else axis for axis in range(rank) if keep or axis not in axes]
    )


def _of_all(content: Content, name: str) -> Content | None:
    numbers = list(content.flat)
    made: Any
    if (
        name in ("ReduceMax", "ReduceMin")
        and numbers
        and not any(isinstance(one, Product) for one in numbers)
    ):
        made = max(numbers) if name == "ReduceMax" else min(numbers)
    # Sums and products of floats are rounded in each step, in an unknown order.
    elif name == "ReduceSum" and all(isinstance(one, int) for one in numbers):
        made = sum(numbers)
        require_exact(made)
    elif name == "ReduceProd" and all(isinstance(one, (int, Product)) for one in numbers):
        made = product(*numbers)
        require_exact(made)
    else:
        return None
    return np.array(made, object)


@operator("Softmax LogSoftmax Hardmax")
def softmax(node: Node) -> Value:
    """Normalise along one axis; before opset 13, along it and all later axes."""
    rank = len(node.shape(0))
    if node.opset < 13:
        first = int(node.attribute("axis", 1))
        axes = range(first + rank if first < 0 else first, rank)
    else:
        axes = range(node.axis(-1), node.axis(-1) + 1)
    reject_rows_on(node.input(0), axes, "normalises over")
    return with_rows(node.shape(0), node.input(0).rows)


@operator("LayerNormalization RMSNormalization SimplifiedLayerNormalization")
def layer_normalisation(node: Node) -> list[Value]:
    """Normalise over an axis and all later axes, then scale."""
    require_rows_only_in(node, 0)
    value, rank, axis = node.input(0), len(node.shape(0)), node.axis(-1)
    reject_rows_on(value, range(axis, rank), "normalises over")
    scaled = broadcast(node.given)
    if scaled.rank != rank:
        raise UnknownEffect("scales by a tensor of higher rank")
    narrow = rearranged(value, [at if at < axis else None for at in range(rank)])
    return [scaled, *[narrow] * (node.outputs - 1)]


@operator("SkipLayerNormalization SkipSimplifiedLayerNormalization", MICROSOFT)
def skip_layer_normalisation(node: Node) -> list[Value]:
    """Add two tensors and normalise over the last axis."""
    require_rows_only_in(node, 0, 1)
    both = broadcast([node.input(0), node.input(1)])
    rank = len(both.sizes)
    reject_rows_on(both, (rank - 1,), "normalises over")
    if node.input(0).rank != rank or node.input(0).rows != both.rows:
        raise UnknownEffect("adds rows to a tensor that has none")
    narrow = rearranged(both, [*range(rank - 1), None])
    return [both, narrow, narrow, both][: node.outputs]


@operator("BatchNormalization")
def batch_normalisation(node: Node) -> list[Value]:
    """Normalise by given statistics, or in training mode by those of the batch."""
    value, sizes = node.input(0), node.shape(0)
    training = node.attribute("training_mode", 0) if node.opset >= 14 else node.outputs > 1
    if value.rows is not None and training:
        raise MixesRows("normalises over the batch axis, because it is in training mode")
    if node.opset < 9 and not node.attribute("spatial", 1):
        reject_rows_on(value, range(1, len(sizes)), "has statistics for")
    made = [with_rows(sizes, value.rows), *(Value() for _ in range(node.outputs - 1))]
    if not training and value.rows is not None and value.rows.axis == 1:
        # Keras' LayerNormalization: the channels are the rows (or their parts), and each has its own statistics. Each
        # channel is scaled by the elements at its own position, so vectors with the same rows keep rows apart.
        along = replace(value.rows, axis=0)
        if all(vector.rows == along and vector.rank == 1 for vector in node.given[1:]):
            return made
    require_rows_only_in(node, 0)
    reject_rows_on(value, (1,), "has statistics along")
    return made


@operator("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss")
def loss(node: Node) -> list[Value]:
    """Return the loss of each row, or of all rows."""
    rows = rows_on_first_axis(node, (0, 1))
    sizes = node.shape(0)
    losses = Value(())
    if node.attribute("reduction", "mean") == "none":
        losses = with_rows((sizes[0], *sizes[2:]), rows)
    elif rows is not None:
        raise MixesRows("reduces the loss over the batch axis")
    return [losses, with_rows(sizes, rows)][: node.outputs]


@operator("Det Trilu")
@operator("Inverse Trilu", MICROSOFT)
def of_matrices(node: Node) -> Value:
    """Compute on the matrices in the last two axes."""
    require_rows_only_in(node, 0)
    value, rank = node.input(0), len(node.shape(0))
    how = "takes a triangle across" if node.operator == "Trilu" else "computes across"
    reject_rows_on(value, (rank - 1, rank - 2), how)
    return rearranged(value, range(rank - 2 if node.operator == "Det" else rank))


@operator("DFT", shape_inputs=(1, 2))
def fourier_transform(node: Node) -> Value:
    """Transform along one axis; the last axis has the real and the imaginary part."""
    value, sizes = node.input(0), node.shape(0)
    given = node.integers("axis", 2) or [1 if node.opset < 20 else -2]
    axes = axis_of(given[0], len(sizes)), len(sizes) - 1
    reject_rows_on(value, axes, "transforms along")
    return with_rows(tuple(node.fresh() if at in axes else size for at, size in enumerate(sizes)), value.rows)
