"""Tables of operators that compute each row of the first axis alone, and of operators that must not take rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tensorferry.server.onnx.graph.operators import MICROSOFT, ML, Node, operator
from tensorferry.server.onnx.graph.row_axis import rows_on_first_axis, with_rows
from tensorferry.server.onnx.graph.sizes import Size
from tensorferry.server.onnx.graph.values import MixesRows, RowAxis, UnknownEffect, Value


@dataclass(frozen=True, slots=True)
class PerRow:
    """The rule of an operator that has rows on axis 0 of some inputs and of all outputs.

    If one of these inputs has rows, all must; other inputs must not. `outputs` are shapes as `shaped` reads them. `rank` is
    that of input 0 with which it has rows there; 0 allows any.
    """

    outputs: Sequence[str]
    how: str = "computes across"
    inputs: Collection[int] = (0,)
    rank: int = 0

    def __call__(self, node: Node) -> list[Value]:
        """Return the outputs."""
        rows = node.input(0).rows
        if self.rank and rows is not None and len(node.shape(0)) != self.rank:
            raise UnknownEffect("takes features that are not a matrix")
        rows = rows_on_first_axis(node, self.inputs, self.how)
        return [shaped(node, text, rows) for text in self.outputs][: node.outputs]


@dataclass(frozen=True, slots=True)
class WithoutRows:
    """The rule of an operator whose inputs must not have rows, because of its effect on all rows together."""

    outputs: Sequence[str]
    why: str
    error: type[Exception] = UnknownEffect

    def __call__(self, node: Node) -> list[Value]:
        """Return the outputs."""
        if any(value.rows is not None for value in node.given):
            raise self.error(self.why)
        return [shaped(node, text) for text in self.outputs][: node.outputs]


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


_FEATURES = "takes features along"
_DYNAMIC = "takes one scale from the values of all rows (dynamic quantisation)"
_BY_VALUES = "computes a shape that depends on the rows' values"

operator("InstanceNormalization GroupNormalization LRN")(PerRow(("*",), "normalises over"))
operator("GroupNorm", MICROSOFT)(PerRow(("*",), "normalises over"))
operator("GlobalAveragePool GlobalMaxPool GlobalLpPool")(PerRow(("0 1 1*",), "pools over"))
operator("DepthToSpace SpaceToDepth")(PerRow(("0 ?*",), "moves elements along"))
operator("STFT", shape_inputs=(1, 3))(PerRow(("0 ? ? =2",), "transforms along"))
operator("LinearAttention")(PerRow(("0 1 ?", "0 ? ? ?"), inputs=range(6)))
operator("CausalConvWithState")(PerRow(("*", "0 1 ?"), "convolves over", (0, 3)))
operator("EmbedLayerNormalization", MICROSOFT)(PerRow(("0 1 ?", "0", "0 1 ?"), inputs=(0, 1, 7, 8)))
operator("TreeEnsembleClassifier LinearClassifier SVMClassifier", ML)(PerRow(("0", "0 ?"), _FEATURES, rank=2))
operator("TreeEnsembleRegressor TreeEnsemble SVMRegressor", ML)(PerRow(("0 n_targets=1",), _FEATURES, rank=2))
operator("LinearRegressor", ML)(PerRow(("0 targets=1",), _FEATURES, rank=2))
operator("Scaler Imputer Normalizer", ML)(PerRow(("*",), _FEATURES, rank=2))

operator("MaxUnpool", shape_inputs=(2,))(
    WithoutRows(("?*",), "takes indices that count through the whole batch")
)
operator("NonMaxSuppression", shape_from_values=True)(WithoutRows(("? =3",), _BY_VALUES))
operator("StringSplit", shape_from_values=True)(
    WithoutRows(("* ?", "*"), "makes as many parts as the longest string of all rows has", MixesRows)
)
operator("DynamicQuantizeLSTM", MICROSOFT)(WithoutRows(("...",) * 3, _DYNAMIC, MixesRows))
operator("EyeLike", shape_only=True)(WithoutRows(("*",), "makes a diagonal across the batch axis", MixesRows))
operator("HannWindow HammingWindow BlackmanWindow", shape_inputs=(0,))(WithoutRows(("?",), _BY_VALUES))
operator("MelWeightMatrix", shape_inputs=(0, 1, 2, 3, 4))(WithoutRows(("? ?",), _BY_VALUES))
