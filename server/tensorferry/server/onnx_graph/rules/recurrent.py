"""Recurrent layers and attention."""

from __future__ import annotations

from tensorferry.server.onnx_graph.operators import MICROSOFT, MixesRows, Node, UnknownEffect, operator
from tensorferry.server.onnx_graph.row_axis import (
    axis_of,
    on_axis,
    reject_rows_on,
    require_rows_only_in,
    rows_on_axes,
    rows_on_first_axis,
    shape_of,
    with_rows,
)
from tensorferry.server.onnx_graph.sizes import Size
from tensorferry.server.onnx_graph.values import RowAxis, Value

# Batch, heads, queries, keys.
_SCORE_AXES = 4


@operator("RNN", "GRU", "LSTM")
def recurrent(node: Node) -> list[Value]:
    """Process one sequence for each row; the row axis depends on the layout."""
    first = bool(node.attribute("layout", 0))
    in_x, in_state = (0, 0) if first else (1, 1)
    rows = rows_on_axes(node, {0: in_x, 4: 0, 5: in_state, 6: in_state})
    sizes = shape_of(node.input(0))
    batch = sizes[in_x]
    length = sizes[1 - in_x]
    directions = 2 if node.attribute("direction", "forward") == "bidirectional" else 1
    hidden: Size = int(node.attribute("hidden_size", 0)) or node.fresh()
    if first:
        whole = _on((batch, length, directions, hidden), rows, 0)
        last = _on((batch, directions, hidden), rows, 0)
    else:
        whole = _on((length, directions, batch, hidden), rows, 2)
        last = _on((directions, batch, hidden), rows, 1)
    return [whole, last, last][: node.outputs]


@operator("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamically_quantised_lstm(node: Node) -> list[Value]:
    """Quantise with one scale for all rows."""
    if any(value.rows is not None for value in node.given):
        raise MixesRows("takes one scale from the values of all rows (dynamic quantisation)")
    return [Value()] * node.outputs


def _on(sizes: tuple[Size, ...], rows: RowAxis | None, axis: int) -> Value:
    return with_rows(sizes, on_axis(rows, axis))


def _check_mask(node: Node, index: int) -> None:
    """Check a mask that is broadcast to the scores; their first axis is the batch axis."""
    if not node.has(index):
        return
    mask = node.input(index)
    sizes = shape_of(mask)
    if mask.rows is None:
        if len(sizes) >= _SCORE_AXES and sizes[-_SCORE_AXES] != 1:
            raise UnknownEffect("takes a mask that has no rows")
    elif len(sizes) - mask.rows.axis != _SCORE_AXES:
        raise MixesRows("applies the mask of one row to another")


@operator("Attention")
def attention(node: Node) -> list[Value]:
    """Compute attention within each row."""
    rows = rows_on_axes(node, {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0}, optional=(3,))
    _check_mask(node, 3)
    sizes = shape_of(node.input(0))
    found = with_rows((*sizes[:-1], node.fresh()), rows)
    cache = with_rows((sizes[0], *node.fresh_shape(3)), rows)
    return [found, cache, cache, cache][: node.outputs]


@operator("LinearAttention")
def linear_attention(node: Node) -> list[Value]:
    """Update a state for each row from its own positions."""
    rows = rows_on_first_axis(node, range(6))
    sizes = shape_of(node.input(0))
    return [with_rows((*sizes[:2], node.fresh()), rows), with_rows((sizes[0], *node.fresh_shape(3)), rows)][
        : node.outputs
    ]


@operator("CausalConvWithState")
def causal_convolution(node: Node) -> list[Value]:
    """Convolve along the positions of each row, and return the state."""
    rows = rows_on_first_axis(node, (0, 3), "convolves over")
    sizes = shape_of(node.input(0))
    return [with_rows(sizes, rows), with_rows((*sizes[:2], node.fresh()), rows)][: node.outputs]


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
    return with_rows(shape_of(value), rows)


@operator("Attention", domain=MICROSOFT)
def fused_attention(node: Node) -> list[Value]:
    """Self-attention; inputs: input, weights, bias, mask, past, bias of the scores."""
    rows = rows_on_axes(node, {0: 0, 3: 0, 4: 1}, optional=(3,))
    _check_mask(node, 5)
    require_rows_only_in(node, 0, 3, 4, 5)
    if node.has(3) and node.input(3).rows is None and rows is not None:
        raise UnknownEffect("takes a mask that has no rows")
    sizes = shape_of(node.input(0))
    found = with_rows((*sizes[:2], node.fresh()), rows)
    return [found, _on((2, sizes[0], *node.fresh_shape(3)), rows, 1)][: node.outputs]


@operator("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(node: Node) -> list[Value]:
    """Attention; inputs: query, key, value, bias, padding mask, bias of the scores, past key and value."""
    bias = node.input(5) if node.has(5) else None
    given = [value if at != 5 else None for at, value in enumerate(node.inputs)]
    inner = Node(node.operator, node.opset, given, node.outputs, node.attributes, node.label)
    rows = rows_on_axes(inner, {0: 0, 1: 0, 2: 0, 4: 0, 6: 0, 7: 0})
    _check_mask(node, 5)
    if rows is None and bias is not None and bias.rows is not None:
        raise UnknownEffect("has no rows in its query")
    sizes = shape_of(node.input(0))
    found = with_rows((*sizes[:2], node.fresh()), rows)
    cache = with_rows((sizes[0], *node.fresh_shape(3)), rows)
    return [found, cache, cache][: node.outputs]


@operator("EmbedLayerNormalization", domain=MICROSOFT)
def embedding(node: Node) -> list[Value]:
    """Add and normalise the embeddings of words, positions and segments."""
    rows = rows_on_first_axis(node, (0, 1, 7, 8))
    sizes = shape_of(node.input(0))
    found = with_rows((*sizes[:2], node.fresh()), rows)
    return [found, with_rows((sizes[0],), rows), found][: node.outputs]


@operator("TensorScatter")
def tensor_scatter(node: Node) -> Value:
    """Replace a part of each row of a cache, starting at the row's own index."""
    rows = rows_on_first_axis(node, (0, 1, 2))
    sizes = shape_of(node.input(0))
    reject_rows_on(node.input(0), (axis_of(int(node.attribute("axis", -2)), len(sizes)),), "writes along")
    return with_rows(sizes, rows)
