"""Constant folding: arithmetic on known numbers and symbolic sizes, which graphs use to compute shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tensorferry.server.onnx_graph.operators import Node
from tensorferry.server.onnx_graph.sizes import Product, is_size, product, quotient, total, unknown
from tensorferry.server.onnx_graph.values import Content

# Larger results are not folded.
_MOST = 256


def fold(node: Node) -> Content | None:
    """Return the result of an elementwise operator on known inputs; None if it is unknown."""
    compute = _OPERATORS.get(node.operator)
    contents = [value.content for value in node.inputs if value is not None]
    if compute is None or not contents or len(contents) != len(node.inputs):
        return None
    known = [content for content in contents if content is not None]
    if len(known) != len(contents):
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
    if isinstance(found, int) and abs(found) >= 2**63:
        raise OverflowError("a number is too large")
    return (
        unknown(f"{name}({','.join(map(str, numbers))})", *numbers, is_size=False) if found is None else found
    )


def _exact(numbers: tuple[Any, ...]) -> bool:
    """Whether symbolic arithmetic is exact: there is a size, and no number is a fraction."""
    return any(isinstance(number, Product) for number in numbers) and not any(
        isinstance(number, float) and not number.is_integer() for number in numbers
    )


def _add(*numbers: Any) -> Any:
    if not any(isinstance(number, Product) for number in numbers):
        return sum(numbers)
    if not _exact(numbers):
        return None
    found: Any = 0
    for number in numbers:
        found = total(found, number)
    return found


def _subtract(a: Any, b: Any) -> Any:
    if isinstance(a, Product) or isinstance(b, Product):
        return total(a, product(-1, b)) if _exact((a, b)) else None
    return a - b


def _multiply(a: Any, b: Any) -> Any:
    if isinstance(a, Product) or isinstance(b, Product):
        return product(a, b) if _exact((a, b)) else None
    return a * b


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, Product) or isinstance(b, Product):
        return quotient(a, b) if _exact((a, b)) else None
    if isinstance(a, int) and isinstance(b, int):
        return int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b))
    return a / b


def _equal(a: Any, b: Any) -> Any:
    if not isinstance(a, Product) and not isinstance(b, Product):
        return a == b
    if a == b:
        return True
    if (is_size(a) and _negative(b)) or (is_size(b) and _negative(a)):
        return False
    return None


def _negative(number: Any) -> bool:
    return not isinstance(number, Product) and number < 0


def _less(a: Any, b: Any) -> Any:
    if isinstance(a, Product) or isinstance(b, Product):
        return False if (is_size(a) and _negative(b)) or a == b else None
    return a < b


def _greater(a: Any, b: Any) -> Any:
    return _less(b, a)


def _not(a: Any) -> Any:
    return None if isinstance(a, Product) else not a


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Product):
        return a if a == b else None
    return a if condition else b


def _least(*numbers: Any) -> Any:
    if any(isinstance(number, Product) for number in numbers):
        return numbers[0] if all(number == numbers[0] for number in numbers) else None
    return min(numbers)


def _greatest(*numbers: Any) -> Any:
    if any(isinstance(number, Product) for number in numbers):
        sizes = [number for number in numbers if not _negative(number) and number != 0]
        if len(set(sizes)) == 1 and is_size(sizes[0]):
            return sizes[0]
        return None
    return max(numbers)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function restricted to numbers; its result is unknown for symbolic sizes."""
    return lambda *numbers: None if any(isinstance(one, Product) for one in numbers) else function(*numbers)


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Add": _add,
    "Sum": _add,
    "Sub": _subtract,
    "Mul": _multiply,
    "Div": _divide,
    "Equal": _equal,
    "Less": _less,
    "Greater": _greater,
    "Not": _not,
    "Where": _where,
    "Min": _least,
    "Max": _greatest,
    "And": _plain(lambda a, b: bool(a and b)),
    "Or": _plain(lambda a, b: bool(a or b)),
    "LessOrEqual": _plain(lambda a, b: a <= b),
    "GreaterOrEqual": _plain(lambda a, b: a >= b),
    "Mod": _plain(lambda a, b: a % b),
    "Neg": _plain(lambda a: -a),
    "Abs": lambda a: a if is_size(a) else _plain(abs)(a),
    "Floor": lambda a: a if isinstance(a, Product) else float(math.floor(a)),
    "Ceil": lambda a: a if isinstance(a, Product) else float(math.ceil(a)),
    "Round": lambda a: a if isinstance(a, Product) else float(round(a)),
    "Sqrt": _plain(math.sqrt),
    "Identity": lambda a: a,
}
