"""Operators that compute each element from the elements at the same position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from onnx import TensorProto

from tensorferry.server.onnx.graph.operators import MICROSOFT, ML, USES_ROW_INDICES, Node, operator
from tensorferry.server.onnx.graph.row_axis import broadcast, reject_rows_on, require_rows_only_in
from tensorferry.server.onnx.graph.rules.folding import fold, require_exact
from tensorferry.server.onnx.graph.sizes import Product, is_size, unknown
from tensorferry.server.onnx.graph.values import (
    Content,
    RowProblems,
    UnknownEffect,
    Value,
    of_content,
)

_ELEMENTWISE = """
    Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu
    HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu
    Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Affine
    ImageScaler ParametricSoftplus ScaledTanh Clip
    Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual
    Max Mean Min Mod Mul Or PRelu Pow StringConcat Sub Sum Where Xor
"""


@operator(_ELEMENTWISE, row_indices=True)
@operator("BiasGelu FastGelu Gelu QuickGelu", MICROSOFT)
def elementwise(node: Node) -> Value:
    """Broadcast all inputs together."""
    # Before version 7, arithmetic on two tensors had an attribute that says how the second is aligned.
    if node.opset < 7 and node.attribute("broadcast"):
        raise UnknownEffect("is aligned by the attributes of an old version")
    content = fold(node)
    if content is not None:
        return of_content(content)
    if node.operator in ("BiasGelu", "FastGelu") and node.has(1):
        reject_rows_on(node.input(0), (len(node.shape(0)) - 1,), "adds a bias along")
    value = broadcast(node.given)
    if any(one.row_indices for one in node.given):
        # The shape stays known, because some exporters use only that.
        return Value(value.shape, problems=RowProblems(unknown=(f"{node.label} {USES_ROW_INDICES}",)))
    return value


@operator("Binarizer LabelEncoder CategoryMapper", ML)
@operator("RegexFullMatch BitCast")
@operator("QLinearSigmoid QLinearLeakyRelu", MICROSOFT)
def broadcast_inputs(node: Node, inputs: Sequence[int] = (0,)) -> Value:
    """Broadcast only these inputs together. The others, such as scales and zero points, must not have rows."""
    require_rows_only_in(node, *inputs)
    return broadcast([node.input(index) for index in inputs])


operator("QLinearAdd QLinearMul", MICROSOFT)(partial(broadcast_inputs, inputs=(0, 3)))
operator("QLinearWhere", MICROSOFT)(partial(broadcast_inputs, inputs=(0, 1, 4)))


@operator("CastLike")
def cast_like(node: Node) -> Value:
    """Convert each element; only the datatype of input 1 matters."""
    return broadcast([node.input(0)])


@operator("Cast", row_indices=True)
def cast(node: Node) -> Value:
    """Convert each element; known numbers stay known."""
    value = node.input(0)
    content = None if value.content is None else _converted(value.content, node.attribute("to"))
    if content is not None:
        return of_content(content)
    if value.row_indices and node.attribute("to") not in (TensorProto.INT32, TensorProto.INT64):
        raise UnknownEffect(USES_ROW_INDICES)
    return replace(broadcast([value]), row_indices=value.row_indices)


# Datatypes that hold all sizes. Numbers are not followed into others, where they may wrap around or be rounded.
_CONVERSIONS: Mapping[object, Callable[[Any], float]] = {
    TensorProto.BOOL: bool,
    TensorProto.INT32: int,
    TensorProto.INT64: int,
    TensorProto.FLOAT: float,
    TensorProto.DOUBLE: float,
}


def _converted(content: Content, to: object) -> Content | None:
    """Return the numbers in another datatype; None if they are unknown there."""
    convert = _CONVERSIONS.get(to)
    if convert is None:
        return None
    result = content.copy()
    for at, number in enumerate(content.flat):
        if not isinstance(number, Product):
            try:
                result.flat[at] = converted = convert(number)
                if to in (TensorProto.INT32, TensorProto.FLOAT) or (
                    convert is int and isinstance(number, float)
                ):
                    require_exact(converted)
            except (ArithmeticError, ValueError):
                return None
        elif convert is bool or (convert is float and not is_size(number)):
            # A fraction is rounded otherwise in the other datatype.
            return None
        elif to == TensorProto.DOUBLE:
            # A fraction of it is another number than that of a FLOAT.
            result.flat[at] = unknown(f"double({number})", number)
        elif not is_size(number):
            # It may be a fraction.
            result.flat[at] = unknown(f"int({number})", number, is_size=False)
    return result


@operator("QuantizeLinear DequantizeLinear")
@operator("QuantizeLinear DequantizeLinear", MICROSOFT)
def quantise(node: Node) -> Value:
    """Quantise each element, with scales along one axis or for blocks along it."""
    require_rows_only_in(node, 0)
    value = node.input(0)
    scale = node.input(1)
    if value.rows is not None:
        scales = scale.sizes
        if len(scales) > 1:
            raise UnknownEffect("has scales for blocks")
        if scales and scales[0] != 1:
            reject_rows_on(value, (int(node.attribute("axis", 1)) % len(value.sizes),), "has scales along")
    return broadcast([value])
