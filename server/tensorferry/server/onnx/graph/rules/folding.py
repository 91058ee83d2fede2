"""Constant folding: arithmetic on known numbers and symbolic sizes, which graphs use to compute shapes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tensorferry.server.onnx.graph.operators import Node
from tensorferry.server.onnx.graph.sizes import Product, is_size, product, quotient, total, unknown
from tensorferry.server.onnx.graph.values import Content

# Larger results are not folded.
_MOST = 256


def fold(node: Node) -> Content | None:
    """Return the result of an elementwise operator on known inputs; None if it is unknown."""
    compute = _OPERATORS.get(node.operator)
    known = [value.content for value in node.given if value.content is not None]
    if compute is None or not known or len(known) != len(node.inputs) or node.attribute("fmod", 0):
        return None
    try:
        arrays = np.broadcast_arrays(*known)
        if arrays[0].size > _MOST:
            return None
        result = np.empty(arrays[0].shape, object)
        for at in np.ndindex(*result.shape):
            numbers = [array[at] for array in arrays]
            result[at] = _one(node.operator, compute, numbers)
    except (ArithmeticError, ValueError, TypeError):
        return None
    return result


def _one(name: str, compute: Callable[..., Any], numbers: list[Any]) -> Any:
    found = compute(*numbers)
    if found not in (None, *numbers):
        require_exact(found)
    return (
        unknown(f"{name}({','.join(map(str, numbers))})", *numbers, is_size=False) if found is None else found
    )


def require_exact(number: float | Product) -> None:
    """Raise ArithmeticError if a datatype of the graph may hold another number: INT32 wraps around, FLOAT rounds."""
    if isinstance(number, Product):
        number = number.factor
    if isinstance(number, int):
        exact = abs(number) < 2**31
    else:
        exact = struct.unpack("f", struct.pack("f", number))[0] == number
    if not exact:
        raise OverflowError("the number depends on its datatype")


def _either(
    of_numbers: Callable[..., Any], of_sizes: Callable[..., Any] = lambda *_: None
) -> Callable[..., Any]:
    """Return a function that takes `of_sizes` if one of its arguments is a symbolic size; None is an unknown result."""
    return lambda *given: (of_sizes if any(isinstance(one, Product) for one in given) else of_numbers)(*given)


def _exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the arithmetic function of sizes; its result is unknown if it may be rounded, as beside a fraction."""

    def compute(*given: Any) -> Any:
        if any(isinstance(one, float) and not one.is_integer() for one in given):
            return None
        found = function(*given)
        # A number that is no size may be a fraction.
        sizes = all(symbol.is_size for one in given if isinstance(one, Product) for symbol in one.symbols)
        return found if sizes or found in given else None

    return compute


def _divided(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b))
    return a / b


def _ratio(a: Any, b: Any) -> Any:
    # A number that is no size may be 0, and then the ratio of equal ones is not 1.
    found = quotient(a, b) if not isinstance(b, Product) or is_size(b) else None
    if not isinstance(found, Product) and isinstance(a, Product) and isinstance(b, Product):
        # An integer or a fraction: the two must not have the same name, and divide others differently.
        raise ArithmeticError("the ratio depends on its datatype")
    return found


def _negative(number: Any) -> bool:
    return not isinstance(number, Product) and number < 0


def _equal(a: Any, b: Any) -> Any:
    if a == b:
        return True
    return False if (is_size(a) and _negative(b)) or (is_size(b) and _negative(a)) else None


def _less(a: Any, b: Any) -> Any:
    return False if (is_size(a) and _negative(b)) or a == b else None


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Product):
        return a if a == b else None
    return a if condition else b


def _if_size(a: Any) -> Any:
    # Another number may be negative or a fraction.
    return a if is_size(a) else None


def _greatest(*numbers: Any) -> Any:
    sizes = {number for number in numbers if not _negative(number) and number != 0}
    return sizes.pop() if len(sizes) == 1 and all(map(is_size, sizes)) else None


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Add": _either(lambda a, b: a + b, _exact(total)),
    "Sub": _either(lambda a, b: a - b, _exact(lambda a, b: total(a, product(-1, b)))),
    "Mul": _either(lambda a, b: a * b, _exact(product)),
    "Div": _either(_divided, _exact(_ratio)),
    "Mod": _either(lambda a, b: a % b),
    "Neg": _either(lambda a: -a),
    "Abs": _either(abs, _if_size),
    "Sqrt": _either(math.sqrt),
    "Floor": _either(lambda a: float(math.floor(a)), _if_size),
    "Ceil": _either(lambda a: float(math.ceil(a)), _if_size),
    "Round": _either(lambda a: float(round(a)), _if_size),
    "Min": _either(lambda *given: min(given), lambda a, *more: a if all(a == one for one in more) else None),
    "Max": _either(lambda *given: max(given), _greatest),
    "Equal": _either(lambda a, b: a == b, _equal),
    "Less": _either(lambda a, b: a < b, _less),
    "Greater": _either(lambda a, b: a > b, lambda a, b: _less(b, a)),
    "LessOrEqual": _either(lambda a, b: a <= b),
    "GreaterOrEqual": _either(lambda a, b: a >= b),
    "Not": _either(lambda a: not a),
    "And": _either(lambda a, b: bool(a and b)),
    "Or": _either(lambda a, b: bool(a or b)),
    "Where": _where,
    "Identity": lambda a: a,
}
