"""Operators that compute along axes: reductions, cumulative sums, normalisations and transforms."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from tensorferry.server.onnx_graph.broadcasting import broadcast
from tensorferry.server.onnx_graph.operators import MICROSOFT, ML, MixesRows, Node, UnknownEffect, operator
from tensorferry.server.onnx_graph.row_axis import (
    axis_of,
    on_axis,
    reject_rows_on,
    require_rows_only_in,
    rows_on_first_axis,
    shape_of,
    with_rows,
)
from tensorferry.server.onnx_graph.sizes import Product, Size, product
from tensorferry.server.onnx_graph.values import Content, Value, of_content

_REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]


@operator(*(f"Reduce{name}" for name in _REDUCTIONS), shape_inputs=(1,))
def reduce(node: Node) -> Value:
    """Reduce the given axes, or all axes if none is given."""
    value = node.input(0)
    sizes = shape_of(value)
    given = node.integers("axes", 1)
    if not given and node.attribute("noop_with_empty_axes", 0):
        return with_rows(sizes, value.rows)
    axes = {axis_of(axis, len(sizes)) for axis in (given or range(len(sizes)))}
    return _reduced(value, axes, bool(node.attribute("keepdims", 1)), node.operator)


@operator("ArgMax", "ArgMin")
def arg_max(node: Node) -> Value:
    """Return the position of one element along an axis."""
    value = node.input(0)
    axis = axis_of(int(node.attribute("axis", 0)), len(shape_of(value)))
    return _reduced(value, {axis}, bool(node.attribute("keepdims", 1)), "")


def _reduced(value: Value, axes: Collection[int], keep: bool, name: str) -> Value:
    sizes = shape_of(value)
    reject_rows_on(value, axes, "reduces over")
    left = [axis for axis in range(len(sizes)) if axis not in axes]
    if value.content is not None and len(axes) == len(sizes):
        content = _of_all(value.content, name)
        if content is not None:
            return of_content(content.reshape((1,) * len(sizes)) if keep else content)
    if keep:
        return with_rows(tuple(1 if axis in axes else size for axis, size in enumerate(sizes)), value.rows)
    rows = None if value.rows is None else on_axis(value.rows, left.index(value.rows.axis))
    return with_rows(tuple(sizes[axis] for axis in left), rows)


def _of_all(content: Content, name: str) -> Content | None:
    numbers = list(content.flat)
    result = np.empty((), object)
    if name == "ReduceProd" and all(isinstance(one, (int, Product)) for one in numbers):
        result[()] = product(*numbers)
    elif any(isinstance(one, Product) for one in numbers) or not numbers:
        return None
    elif name in ("ReduceMax", "ReduceMin", "ReduceSum"):
        result[()] = (
            max(numbers) if name == "ReduceMax" else min(numbers) if name == "ReduceMin" else sum(numbers)
        )
    else:
        return None
    return result


@operator("Softmax", "LogSoftmax", "Hardmax")
def softmax(node: Node) -> Value:
    """Normalise along one axis; before opset 13, along it and all later axes."""
    value = node.input(0)
    sizes = shape_of(value)
    if node.opset < 13:
        first = int(node.attribute("axis", 1))
        axes = range(first + len(sizes) if first < 0 else first, len(sizes))
    else:
        last = axis_of(int(node.attribute("axis", -1)), len(sizes))
        axes = range(last, last + 1)
    reject_rows_on(value, axes, "normalises over")
    return with_rows(sizes, value.rows)


@operator("CumSum", "CumProd", shape_inputs=(1,))
def cumulative_sum(node: Node) -> Value:
    """Combine each element with those before it along an axis."""
    value = node.input(0)
    sizes = shape_of(value)
    axes = node.integers("axis", 1) or [0]
    reject_rows_on(value, [axis_of(axis, len(sizes)) for axis in axes], "adds up along")
    return with_rows(sizes, value.rows)


@operator("LpNormalization")
def lp_normalisation(node: Node) -> Value:
    """Divide by the norm along one axis."""
    value = node.input(0)
    sizes = shape_of(value)
    reject_rows_on(value, (axis_of(int(node.attribute("axis", -1)), len(sizes)),), "normalises over")
    return with_rows(sizes, value.rows)


@operator("MeanVarianceNormalization")
def mean_variance_normalisation(node: Node) -> Value:
    """Normalise by mean and variance over some axes."""
    value = node.input(0)
    sizes = shape_of(value)
    axes = node.attribute("axes", [0, 2, 3])
    if "across_channels" in node.attributes:
        raise UnknownEffect("is of an old version")
    reject_rows_on(value, [axis_of(axis, len(sizes)) for axis in axes], "normalises over")
    return with_rows(sizes, value.rows)


@operator("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def layer_normalisation(node: Node) -> list[Value]:
    """Normalise over an axis and all later axes, then scale."""
    require_rows_only_in(node, 0)
    value = node.input(0)
    sizes = shape_of(value)
    axis = axis_of(int(node.attribute("axis", -1)), len(sizes))
    reject_rows_on(value, range(axis, len(sizes)), "normalises over")
    scaled = broadcast(node.given)
    if scaled.rank != len(sizes):
        raise UnknownEffect("scales by a tensor of higher rank")
    narrow = with_rows((*sizes[:axis], *(1 for _ in sizes[axis:])), value.rows)
    return [scaled, *[narrow] * (node.outputs - 1)]


@operator("BatchNormalization")
def batch_normalisation(node: Node) -> list[Value]:
    """Normalise by given statistics, or in training mode by those of the batch."""
    value = node.input(0)
    sizes = shape_of(value)
    training = node.attribute("training_mode", 0) if node.opset >= 14 else node.outputs > 1
    if value.rows is not None and training:
        raise MixesRows("normalises over the batch axis, because it is in training mode")
    if node.opset < 9 and not node.attribute("spatial", 1):
        reject_rows_on(value, range(1, len(sizes)), "has statistics for")
    if not training and value.rows is not None and value.rows.axis == 1:
        # Keras' LayerNormalization: the channels are the rows (or their parts), and each has its own statistics. Each
        # channel is scaled by the elements at its own position, so vectors with the same rows keep rows apart.
        along = replace(value.rows, axis=0)
        if all(vector.rows == along and vector.rank == 1 for vector in node.given[1:]):
            return [with_rows(sizes, value.rows), *(Value() for _ in range(node.outputs - 1))]
    require_rows_only_in(node, 0)
    reject_rows_on(value, (1,), "has statistics along")
    return [with_rows(sizes, value.rows), *(Value() for _ in range(node.outputs - 1))]


@operator("InstanceNormalization", "GroupNormalization", "LRN")
@operator("GroupNorm", domain=MICROSOFT)
def per_instance(node: Node) -> Value:
    """Normalise over the axes behind axis 0."""
    rows = rows_on_first_axis(node, (0,), "normalises over")
    return with_rows(shape_of(node.input(0)), rows)


@operator("Normalizer", domain=ML)
def normaliser(node: Node) -> Value:
    """Divide each row of a matrix by its norm."""
    value = node.input(0)
    sizes = shape_of(value)
    if value.rows is not None:
        if len(sizes) != 2:
            raise UnknownEffect("normalises a tensor that is not a matrix")
        reject_rows_on(value, (1,), "normalises over")
    return with_rows(sizes, value.rows)


@operator("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def loss(node: Node) -> list[Value]:
    """Return the loss of each row, or of all rows."""
    rows = rows_on_first_axis(node, (0, 1))
    sizes = shape_of(node.input(0))
    probabilities = with_rows(sizes, rows)
    if node.attribute("reduction", "mean") == "none":
        return [with_rows((sizes[0], *sizes[2:]), rows), probabilities][: node.outputs]
    if rows is not None:
        raise MixesRows("reduces the loss over the batch axis")
    return [Value(()), probabilities][: node.outputs]


@operator("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_layer_normalisation(node: Node) -> list[Value]:
    """Add two tensors and normalise over the last axis."""
    require_rows_only_in(node, 0, 1)
    both = broadcast([node.input(0), node.input(1)])
    sizes = shape_of(both)
    reject_rows_on(both, (len(sizes) - 1,), "normalises over")
    if node.input(0).rank != len(sizes) or node.input(0).rows != both.rows:
        raise UnknownEffect("adds rows to a tensor that has none")
    narrow = with_rows((*sizes[:-1], 1), both.rows)
    return [both, narrow, narrow, both][: node.outputs]


@operator("Det")
@operator("Inverse", domain=MICROSOFT)
def of_matrices(node: Node) -> Value:
    """Compute on the matrices in the last two axes."""
    value = node.input(0)
    sizes = shape_of(value)
    reject_rows_on(value, (len(sizes) - 1, len(sizes) - 2), "computes across")
    new: tuple[Size, ...] = sizes[:-2] if node.operator == "Det" else sizes
    return with_rows(new, value.rows)


@operator("DFT", shape_inputs=(1, 2))
def fourier_transform(node: Node) -> Value:
    """Transform along one axis; the last axis has the real and the imaginary part."""
    value = node.input(0)
    sizes = shape_of(value)
    given = node.integers("axis", 2) or [1 if node.opset < 20 else -2]
    axis = axis_of(given[0], len(sizes))
    reject_rows_on(value, (axis, len(sizes) - 1), "transforms along")
    new = [node.fresh() if at in (axis, len(sizes) - 1) else size for at, size in enumerate(sizes)]
    return with_rows(tuple(new), value.rows)


@operator("STFT", shape_inputs=(1, 3))
def short_time_fourier_transform(node: Node) -> Value:
    """Transform each row of the signal."""
    rows = rows_on_first_axis(node, (0,), "transforms along")
    sizes = shape_of(node.input(0))
    return with_rows((sizes[0], *node.fresh_shape(2), 2), rows)


@operator("HannWindow", "HammingWindow", "BlackmanWindow", shape_inputs=(0,))
def window(node: Node) -> Value:
    """Return a window of the given size."""
    return Value(node.fresh_shape(1))


@operator("MelWeightMatrix", shape_inputs=(0, 1, 2, 3, 4))
def mel_weights(node: Node) -> Value:
    """Return a matrix from frequencies to bands."""
    return Value(node.fresh_shape(2))
