"""Convolutions, pools and other operators whose first axis is that of the batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from tensorferry.server.onnx.graph.operators import MICROSOFT, Node, operator
from tensorferry.server.onnx.graph.row_axis import rows_on_first_axis, with_rows
from tensorferry.server.onnx.graph.rules.per_row import shaped
from tensorferry.server.onnx.graph.sizes import Size, is_size, product
from tensorferry.server.onnx.graph.values import MixesRows, RowProblems, UnknownEffect, Value


@operator("Conv ConvInteger ConvTranspose")
def convolution(node: Node, weights: int = 1, batched: Collection[int] = (0,)) -> Value:
    """Convolve each row of input 0 with the input `weights`; `batched` have a row for each row."""
    rows = rows_on_first_axis(node, batched, "convolves over")
    sizes, kernel = node.shape(0), node.input(weights).shape
    if node.attribute("channels_last", 0):
        return with_rows(node.fresh_shape(len(sizes)), rows)
    if kernel is not None and node.operator == "ConvTranspose":
        channels = product(kernel[1], int(node.attribute("group", 1)))
        return with_rows((sizes[0], channels, *node.fresh_shape(len(sizes) - 2)), rows)
    if kernel is None or len(kernel) != len(sizes):
        return with_rows((sizes[0], *node.fresh_shape(len(sizes) - 1)), rows)
    return with_rows((sizes[0], kernel[0], *_windows(node, sizes[2:], kernel[2:])), rows)


operator("QLinearConv")(partial(convolution, weights=3))
operator("QLinearConv", MICROSOFT)(partial(convolution, weights=3))
# Input 2 has the offsets and input 4 the mask of each row.
operator("DeformConv")(partial(convolution, batched=(0, 2, 4)))
# Input 3 is added to the result.
operator("FusedConv", MICROSOFT)(partial(convolution, batched=(0, 3)))


def _windows(node: Node, sizes: Sequence[Size], kernel: Sequence[Size]) -> list[Size]:
    """Return the number of windows along each axis."""
    count = len(sizes)
    strides = node.attribute("strides") or [1] * count
    dilations = node.attribute("dilations") or [1] * count
    pads = node.attribute("pads") or [0] * (2 * count)
    auto = node.attribute("auto_pad", "NOTSET")
    found: list[Size] = []
    for at, (size, width) in enumerate(zip(sizes, kernel, strict=True)):
        if not isinstance(size, int) or not isinstance(width, int):
            found.append(node.fresh(size))
            continue
        if auto.startswith("SAME"):
            # Pools count windows otherwise than convolutions.
            same = dilations[at] == 1 or "Pool" not in node.operator
            found.append(-(-size // strides[at]) if same else node.fresh(size))
            continue
        padded = size if auto == "VALID" else size + pads[at] + pads[at + count]
        room = padded - (width - 1) * dilations[at] - 1
        if room < 0 or (node.attribute("ceil_mode", 0) and room % strides[at]):
            # ONNX Runtime may count a window that does not fit. The last one counts only if it begins within the tensor.
            found.append(node.fresh(size))
        else:
            found.append(room // strides[at] + 1)
    return found


@operator("MaxPool AveragePool LpPool")
@operator("QLinearAveragePool QLinearGlobalAveragePool", MICROSOFT)
def pool(node: Node) -> list[Value]:
    """Pool windows of each row. The indices that MaxPool also returns count through the whole batch."""
    rows = rows_on_first_axis(node, (0,), "pools over")
    if node.attribute("channels_last", 0):
        return [shaped(node, "0 ?*", rows)]
    if node.operator == "QLinearGlobalAveragePool":
        return [shaped(node, "0 1 1*", rows)]
    sizes = node.shape(0)
    found = with_rows((*sizes[:2], *_windows(node, sizes[2:], node.attribute("kernel_shape", []))), rows)
    why = f"{node.label} returns indices that count through the whole batch"
    indices = found if rows is None else Value(problems=RowProblems(unknown=(why,)))
    return [found, indices][: node.outputs]


@operator("GridSample")
def grid_sample(node: Node) -> Value:
    """Sample each row of input 0 at the coordinates in the same row of input 1."""
    rows = rows_on_first_axis(node, (0, 1), "samples over")
    sizes, grid = node.shape(0), node.shape(1)
    return with_rows((*sizes[:2], *grid[1:-1]), rows)


@operator("AffineGrid", shape_inputs=(1,))
def affine_grid(node: Node) -> Value:
    """Make a grid for each row."""
    rows = rows_on_first_axis(node, (0,), "makes grids over")
    size = node.sizes("size", 1)
    if size is None:
        raise UnknownEffect("has no size")
    if rows is not None and size[0] != rows.size:
        raise UnknownEffect("has a size with another number of rows")
    spatial = [one if is_size(one) else node.fresh(one) for one in size[2:]]
    return with_rows((size[0], *spatial, len(spatial)), rows)


@operator("RoiAlign")
def regions(node: Node) -> Value:
    """Return one result for each region, from the image selected by the region's index."""
    if node.input(0).rows is not None:
        raise UnknownEffect("selects the image of each region by its index in the batch")
    rows = rows_on_first_axis(node, (1, 2), "crops over")
    sizes = node.shape(0)
    return with_rows((node.shape(1)[0], sizes[1], *node.fresh_shape(2)), rows)


@operator("Col2Im", shape_inputs=(1, 2))
def columns_to_image(node: Node) -> Value:
    """Make an image from the columns of each row."""
    rows = rows_on_first_axis(node, (0,), "adds up over")
    image = node.sizes("image_shape", 1) or []
    return with_rows((node.shape(0)[0], node.fresh(), *image), rows)


@operator("CenterCropPad", shape_inputs=(1,))
def centre_crop(node: Node) -> Value:
    """Crop or pad axes to sizes."""
    value, sizes = node.input(0), list(node.shape(0))
    target = node.sizes("shape", 1) or []
    for axis, size in zip(node.axes(node.attribute("axes")), target, strict=True):
        if value.rows is not None and value.rows.axis == axis:
            if size != value.rows.size:
                raise UnknownEffect(f"crops or pads the batch axis to size {size}")
        else:
            sizes[axis] = size
    return with_rows(tuple(sizes), value.rows)


@operator("Resize", shape_inputs=(1, 2, 3))
@operator("Upsample", shape_inputs=(1,))
def resize(node: Node) -> Value:
    """Resize axes."""
    value, new = node.input(0), list(node.shape(0))
    scales, wanted = _scales(node)
    stretches = node.attribute("keep_aspect_ratio_policy", "stretch") == "stretch"
    for at, axis in enumerate(node.axes(node.attribute("axes"))):
        scale: Any = scales[at] if scales else None
        size: Any = wanted[at] if wanted else None
        if value.rows is not None and value.rows.axis == axis:
            if _interpolates(node, axis, len(new)):
                raise MixesRows("interpolates along the batch axis")
            if node.attribute("coordinate_transformation_mode", "") == "tf_crop_and_resize":
                raise UnknownEffect("may crop the batch axis")
            if size is not None and not stretches:
                raise UnknownEffect("may resize the batch axis")
            if size is not None and size != value.rows.size:
                raise UnknownEffect(f"resizes the batch axis to the size {size}")
            if size is None and scale != 1:
                if isinstance(scale, (int, float)):
                    raise MixesRows(f"resizes the batch axis by {scale}")
                raise UnknownEffect("resizes the batch axis by a number computed at run time")
        elif size is not None and stretches and is_size(size):
            new[axis] = size
        else:
            before: Any = new[axis]
            known = isinstance(scale, (int, float)) and isinstance(before, int)
            # In 32 bits, as ONNX Runtime multiplies.
            found = int(np.float32(before) * np.float32(scale)) if known else None
            new[axis] = node.fresh(before, scale, size) if found is None else found
    return with_rows(tuple(new), value.rows)


def _interpolates(node: Node, axis: int, rank: int) -> bool:
    """Return whether a row's output has its neighbours' numbers, also with weights of 0: 0 times infinity is NaN.

    ONNX Runtime leaves out the first axes of tensors of rank 4 and 5 only, or axes of scale 1 if they antialias.
    """
    if node.attribute("mode", "nearest") == "nearest" or node.attribute("antialias", 0):
        return False
    return rank < 4 or axis > 0


def _scales(node: Node) -> tuple[list[Any] | None, list[Any] | None]:
    """Return scales or sizes; the other is None."""
    if node.operator == "Upsample" or node.opset < 11:
        return node.sizes("scales", 1), None
    # An empty tensor means that the input is left out.
    wanted = node.sizes("sizes", 3)
    return (None, wanted) if wanted else (node.sizes("scales", 2), None)
