"""Types of a function's inputs and outputs from its annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tensorferry.serving.errors import DeclarationError
from tensorferry.serving.tensor_types import TensorType

# The name of an annotated output.
_OUTPUT = "output"


def types_of_hints(function: Callable[..., Any]) -> tuple[Mapping[str, TensorType], Mapping[str, TensorType]]:
    """Return the types of inputs and outputs that annotations declare; those of `__call__` if it is a class.

    An annotation is a `TensorType`, or `Annotated` with one. Other annotations are ignored. DeclarationError if they cannot
    be evaluated.
    """
    called = function.__call__ if inspect.isclass(function) else function
    try:
        hints = inspect.get_annotations(called, eval_str=True)
    except Exception as error:
        # Annotations are expressions of the user.
        raise DeclarationError(
            f"the annotations of {getattr(function, '__name__', function)!r} cannot be read ({error}); declare inputs and "
            "outputs by @model(inputs=..., outputs=...)"
        ) from None
    returned = hints.pop("return", None)
    inputs = {name: found for name, hint in hints.items() if (found := _type_of(hint)) is not None}
    if isinstance(returned, Mapping):
        return inputs, {
            name: found for name, hint in returned.items() if (found := _type_of(hint)) is not None
        }
    output = _type_of(returned)
    return inputs, {} if output is None else {_OUTPUT: output}


def _type_of(hint: Any) -> TensorType | None:
    for candidate in (hint, *getattr(hint, "__metadata__", ())):
        if isinstance(candidate, TensorType):
            return candidate
    return None
