"""Recurrent layers and attention."""

from __future__ import annotations

from tensorferry.server.onnx.graph.operators import MICROSOFT, Node, operator
from tensorferry.server.onnx.graph.row_axis import (
    on_axis,
    reject_rows_on,
    rows_on_axes,
    rows_on_first_axis,
    with_rows,
)
from tensorferry.server.onnx.graph.rules.per_row import shaped
from tensorferry.server.onnx.graph.sizes import Size
from tensorferry.server.onnx.graph.values import AlwaysFails, MixesRows, UnknownEffect, Value

# Batch, length, features.
_SEQUENCE_AXES = 3
# Batch, heads, queries, keys.
_SCORE_AXES = 4


@operator("RNN GRU LSTM")
def recurrent(node: Node) -> list[Value]:
    """Process one sequence for each row; the row axis depends on the layout."""
    if len(node.shape(0)) != _SEQUENCE_AXES:
        raise AlwaysFails
    first = bool(node.attribute("layout", 0))
    batch_axis = 0 if first else 1
    rows = rows_on_axes(node, {0: batch_axis, 4: 0, 5: batch_axis, 6: batch_axis})
    batch, length = node.shape(0)[batch_axis], node.shape(0)[1 - batch_axis]
    directions = 2 if node.attribute("direction", "forward") == "bidirectional" else 1
    hidden: Size = int(node.attribute("hidden_size", 0)) or node.fresh()
    if first:
        whole = with_rows((batch, length, directions, hidden), on_axis(rows, 0))
        last = with_rows((batch, directions, hidden), on_axis(rows, 0))
    else:
        whole = with_rows((length, directions, batch, hidden), on_axis(rows, 2))
        last = with_rows((directions, batch, hidden), on_axis(rows, 1))
    return [whole, last, last][: node.outputs]


def _check_mask(node: Node, index: int) -> None:
    """Check a mask that is broadcast to the scores; their first axis is the batch axis."""
    if not node.has(index):
        return
    mask = node.input(index)
    sizes = mask.sizes
    if mask.rows is None:
        if len(sizes) >= _SCORE_AXES and sizes[-_SCORE_AXES] != 1:
            raise UnknownEffect("takes a mask that has no rows")
    elif len(sizes) - mask.rows.axis != _SCORE_AXES:
        raise MixesRows("applies the mask of one row to another")


@operator("Attention")
def attention(node: Node) -> list[Value]:
    """Compute attention within each row."""
    rows = rows_on_axes(node, dict.fromkeys(range(7), 0), optional=(3,))
    _check_mask(node, 3)
    cache = shaped(node, "0 ? ? ?", rows)
    return [with_rows((*node.shape(0)[:-1], node.fresh()), rows), cache, cache, cache][: node.outputs]


@operator("RotaryEmbedding")
def rotary_embedding(node: Node) -> Value:
    """Rotate each position by its angle."""
    value = node.input(0)
    if node.has(3):
        rows = rows_on_first_axis(node, (0, 3))
    elif value.rows is not None and all(node.input(index).rows is not None for index in (1, 2)):
        rows = rows_on_first_axis(node, (0, 1, 2))
    else:
        raise UnknownEffect("takes angles that have no rows")
    return with_rows(value.sizes, rows)


@operator("Attention", MICROSOFT)
def fused_attention(node: Node) -> list[Value]:
    """Self-attention; inputs: input, weights, bias, mask, past, bias of the scores."""
    rows = rows_on_axes(node, {0: 0, 3: 0, 4: 1}, optional=(3,))
    _check_mask(node, 5)
    if node.has(3) and node.input(3).rows is None and rows is not None:
        raise UnknownEffect("takes a mask that has no rows")
    cache = with_rows((2, node.shape(0)[0], *node.fresh_shape(3)), on_axis(rows, 1))
    return [shaped(node, "0 1 ?", rows), cache][: node.outputs]


@operator("MultiHeadAttention", MICROSOFT)
def multi_head_attention(node: Node) -> list[Value]:
    """Attention; inputs: query, key, value, bias, padding mask, bias of the scores, past key and value."""
    rows = rows_on_axes(node, dict.fromkeys((0, 1, 2, 4, 5, 6, 7), 0), optional=(5,))
    _check_mask(node, 5)
    cache = shaped(node, "0 ? ? ?", rows)
    return [shaped(node, "0 1 ?", rows), cache, cache][: node.outputs]


@operator("TensorScatter")
def tensor_scatter(node: Node) -> Value:
    """Replace a part of each row of a cache, starting at the row's own index."""
    rows = rows_on_first_axis(node, (0, 1, 2))
    reject_rows_on(node.input(0), (node.axis(-2),), "writes along")
    return with_rows(node.shape(0), rows)
