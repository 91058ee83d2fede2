"""Tables of operators that compute each row of the first axis alone, and of operators that must not take rows."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from tensorferry.server.onnx.graph.operators import MICROSOFT, ML, Node, Rule, operator
from tensorferry.server.onnx.graph.row_axis import rows_on_first_axis, with_rows
from tensorferry.server.onnx.graph.sizes import Size
from tensorferry.server.onnx.graph.values import MixesRows, RowAxis, UnknownEffect, Value


def per_row(
    *outputs: str, how: str = "computes across", inputs: Collection[int] = (0,), rank: int = 0
) -> Rule:
    """Return the rule of an operator that has rows on axis 0 of some inputs and of all outputs.

    If one of these inputs has rows, all must; other inputs must not. `outputs` are shapes as `shaped` reads them. `rank` is
    that of input 0 with which it has rows there; 0 allows any.
    """

    def rule(node: Node) -> list[Value]:
        rows = node.input(0).rows
        if rank and rows is not None and len(node.shape(0)) != rank:
            raise UnknownEffect("takes features that are not a matrix")
        rows = rows_on_first_axis(node, inputs, how)
        return [shaped(node, text, rows) for text in outputs][: node.outputs]

    return rule


def without_rows(*outputs: str, why: str, error: type[Exception] = UnknownEffect) -> Rule:
    """Return the rule of an operator whose inputs must not have rows, because of its effect on all rows together."""

    def rule(node: Node) -> list[Value]:
        if any(value.rows is not None for value in node.given):
            raise error(why)
        return [shaped(node, text) for text in outputs][: node.outputs]

    return rule


def shaped(node: Node, text: str, rows: RowAxis | None = None) -> Value:
    """Return a tensor whose shape is written as the sizes of its axes.

    A number is that axis of input 0, "?" an unknown size, "name=1" an attribute with its default, and "=2" the number 2.
    "*" stands for the remaining axes of input 0, "?*" and "1*" for unknown sizes and ones as many as these. "..." is a
    tensor of unknown rank.
    """
    if text == "...":
        return Value()
    sizes: list[Size] = []
    for part in text.split():
        name, given, default = part.partition("=")
        if part.endswith("*"):
            left = node.shape(0)[len(sizes) :]
            sizes += {"*": left, "1*": (1,) * len(left), "?*": node.fresh_shape(len(left))}[part]
        elif given:
            sizes.append(int(node.attribute(name, default)))
        elif part == "?":
            sizes.append(node.fresh())
        else:
            sizes += node.shape(0)[int(part) :][:1]
    return with_rows(tuple(sizes), rows)


operator("InstanceNormalization GroupNormalization LRN")(per_row("*", how="normalises over"))
operator("GroupNorm", MICROSOFT)(per_row("*", how="normalises over"))
operator("GlobalAveragePool GlobalMaxPool GlobalLpPool")(per_row("0 1 1*", how="pools over"))
operator("DepthToSpace SpaceToDepth")(per_row("0 ?*", how="moves elements along"))
operator("STFT", shape_inputs=(1, 3))(per_row("0 ? ? =2", how="transforms along"))
operator("LinearAttention")(per_row("0 1 ?", "0 ? ? ?", inputs=range(6)))
operator("CausalConvWithState")(per_row("*", "0 1 ?", how="convolves over", inputs=(0, 3)))
operator("EmbedLayerNormalization", MICROSOFT)(per_row("0 1 ?", "0", "0 1 ?", inputs=(0, 1, 7, 8)))

_of_features = partial(per_row, how="takes features along", rank=2)
operator("TreeEnsembleClassifier LinearClassifier SVMClassifier", ML)(_of_features("0", "0 ?"))
operator("TreeEnsembleRegressor TreeEnsemble SVMRegressor", ML)(_of_features("0 n_targets=1"))
operator("LinearRegressor", ML)(_of_features("0 targets=1"))
operator("Scaler Imputer Normalizer", ML)(_of_features("*"))

_by_values = partial(without_rows, why="computes a shape that depends on the rows' values")
operator("NonMaxSuppression", shape_from_values=True)(_by_values("? =3"))
operator("HannWindow HammingWindow BlackmanWindow", shape_inputs=(0,))(_by_values("?"))
operator("MelWeightMatrix", shape_inputs=range(5))(_by_values("? ?"))
operator("MaxUnpool", shape_inputs=(2,))(
    without_rows("?*", why="takes indices that count through the whole batch")
)
_mixing = partial(without_rows, error=MixesRows)
_dynamically_quantised = partial(
    _mixing, why="takes one scale from the values of all rows (dynamic quantisation)"
)
operator("DynamicQuantizeLinear")(_dynamically_quantised("*", "", ""))
operator("DynamicQuantizeLSTM", MICROSOFT)(_dynamically_quantised("...", "...", "..."))
operator("ImageDecoder", shape_from_values=True)(_mixing("? ? =3", why="reads one file along the batch axis"))
operator("EyeLike", shape_only=True)(_mixing("*", why="makes a diagonal across the batch axis"))
operator("StringSplit", shape_from_values=True)(
    _mixing("* ?", "*", why="makes as many parts as the longest string of all rows has")
)
