"""Types of tensors in declarations: a datatype and a shape, written `INT64[-1, 384]`. Annotations may have them, too."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsIndex

from tensorferry.serving.errors import DeclarationError

Dim = int | str

# The name of an annotated output.
_OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class TensorType:
    """The datatype and shape of an input or output.

    `datatype` is the protocol's name. A dimension is a size, -1 for any size, or a name: dimensions of the same name have
    the same size in a request. `text` says that elements of BYTES are `str`, else they are `bytes`.
    """

    datatype: str
    dims: tuple[Dim, ...]
    text: bool = False

    def __str__(self) -> str:
        return f"{'STRING' if self.text else self.datatype}{list(self.dims)}"


@dataclass(frozen=True, slots=True)
class TensorDatatype:
    """A datatype. Give it a shape by an index.

    >>> print(INT64[-1, "tokens"])
    INT64[-1, 'tokens']
    """

    datatype: str
    text: bool = False

    def __getitem__(self, dims: SupportsIndex | str | tuple[SupportsIndex | str, ...]) -> TensorType:
        given = dims if isinstance(dims, tuple) else (dims,)
        return TensorType(self.datatype, tuple(map(self._dim, given)), self.text)

    def _dim(self, dim: SupportsIndex | str) -> Dim:
        """Return a dimension; integers of numpy as `int`."""
        if isinstance(dim, str) and dim:
            return dim
        # TypeError of what is no integer.
        with suppress(TypeError):
            size = index(dim)  # type: ignore[arg-type]
            if size >= -1 and size and not isinstance(dim, bool):
                return size
        raise DeclarationError(
            f"a dimension of {self}[...] is {dim!r}; it must be a size of at least 1, -1 for any size, or a name"
        )

    def __str__(self) -> str:
        return "STRING" if self.text else self.datatype


INT8, INT16, INT32, INT64 = map(TensorDatatype, ("INT8", "INT16", "INT32", "INT64"))
UINT8, UINT16, UINT32, UINT64 = map(TensorDatatype, ("UINT8", "UINT16", "UINT32", "UINT64"))
FP16, FP32, FP64 = map(TensorDatatype, ("FP16", "FP32", "FP64"))
BOOL, BYTES = TensorDatatype("BOOL"), TensorDatatype("BYTES")
# BYTES on the wire; a function gets and returns `str` elements, which must be UTF-8.
STRING = TensorDatatype("BYTES", text=True)


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
