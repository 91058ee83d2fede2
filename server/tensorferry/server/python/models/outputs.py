"""Outputs of Python functions: their check against the declaration, and rows of different lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorferry.batcher import stack_rows
from tensorferry.protos.tensors import from_numbers
from tensorferry.server.runtime.checks.sampling import Array
from tensorferry.server.signature import TensorSpec


class WrongOutputs(Exception):
    """A function returned something else than it declares. The text says what it returned, and what was declared."""


class RaggedRows(list[Array]):
    """The rows of an output, which may differ in length.

    As an array, rows are padded to the longest: with `pad`, or without it with 0 or empty strings. So the batcher gives each
    request its own rows, and their padding does not depend on the other requests. A slice stays `RaggedRows`, also if its
    rows are equally long, because the batcher may join it with longer rows.
    """

    def __init__(self, rows: Iterable[Array], pad: Any = None) -> None:
        super().__init__(rows)
        self.pad = pad

    def __getitem__(self, index: Any) -> Any:
        rows = super().__getitem__(index)
        return RaggedRows(rows, self.pad) if isinstance(index, slice) else rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return stack_rows(self, "an output", self.pad)


def joined_rows(spec: TensorSpec, rows: Sequence[Array], pad: Any = None) -> Array | RaggedRows:
    """Return copies of an output's rows: as `RaggedRows` if the declaration lets them differ in length, else as an array."""
    if any(not isinstance(dim, int) for dim in spec.dims[1:]):
        return RaggedRows([row.copy() for row in rows], pad)
    return stack_rows(rows, f"output {spec.name!r}")


class DeclaredOutputs:
    """The outputs that a function declares. Thread-safe."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        *,
        batched: bool,
        copy: bool,
        pads: Mapping[str, Any] | None = None,
    ) -> None:
        """`pads` has the pad values of rows of different lengths, by output; by default 0 or empty strings.

        `copy` is for a function that may write to an array that it has returned, before that is sent or a later step reads
        it. Rows that are given one by one are copied anyway.
        """
        self._specs = tuple(specs)
        self._copy = copy
        self._pads = pads or {}
        self._names = [spec.name for spec in specs]
        self._batched = batched

    def checked(self, result: Any, rows: int) -> dict[str, Any]:
        """Return what a function returned as outputs by name: arrays, or `RaggedRows`. Raises WrongOutputs.

        `rows` is the number of rows of its inputs; it is not checked if tensors have no rows.
        """
        return {
            spec.name: self._checked(spec, value, rows)
            for spec, value in zip(self._specs, self._by_spec(result), strict=True)
        }

    def _by_spec(self, result: Any) -> Sequence[Any]:
        if result is None:
            raise WrongOutputs("it returned None: add `return` with its outputs")
        if isinstance(result, Mapping):
            if result.keys() != set(self._names):
                raise WrongOutputs(
                    f"it returned outputs {sorted(map(str, result))}, and declares {self._names}"
                )
            return [result[name] for name in self._names]
        if isinstance(result, tuple):
            if len(result) != len(self._names):
                raise WrongOutputs(
                    f"it returned {len(result)} outputs, and declares {len(self._names)}: {self._names}"
                )
            return result
        if len(self._names) > 1:
            raise WrongOutputs(
                f"it returned one {type(result).__name__}, and declares {len(self._names)} outputs: {self._names}; return a "
                "dict or a tuple of them"
            )
        return [result]

    def _checked(self, spec: TensorSpec, value: Any, rows: int) -> Any:
        array = value if isinstance(value, np.ndarray) else self._array_of(spec, value)
        if isinstance(array, RaggedRows):
            if len(array) != rows:
                raise WrongOutputs(f"output {spec.name!r} has {len(array)} rows, and its input has {rows}")
            return array
        array = _stored(spec, array)
        if not fits(spec, array.shape):
            message = (
                f"output {spec.name!r} has shape {list(array.shape)}, and is declared as {list(spec.shape)}"
            )
            if self._batched and array.ndim < len(spec.shape):
                message += "; give each row of the batch its own, on axis 0, or declare batched=False"
            raise WrongOutputs(message)
        if self._batched and array.shape[0] != rows:
            raise WrongOutputs(
                f"output {spec.name!r} has {array.shape[0]} rows (shape {list(array.shape)}), and its input has {rows}"
            )
        return array.copy() if self._copy else array

    def _array_of(self, spec: TensorSpec, value: Any) -> Array | RaggedRows:
        """Return a list or another value as an array; a list of arrays that may differ in length as `RaggedRows`."""
        if isinstance(value, list) and value and all(isinstance(row, np.ndarray) for row in value):
            parts = [_stored(spec, row) for row in value]
            for row in parts:
                if not fits(spec, (len(parts), *row.shape)):
                    raise WrongOutputs(
                        f"output {spec.name!r} has a row of shape {list(row.shape)}, and is declared as "
                        f"{list(spec.shape)}, whose axis 0 counts the rows"
                    )
            pad = self._pads.get(spec.name)
            if self._batched:
                return joined_rows(spec, parts, pad)
            return stack_rows(parts, f"output {spec.name!r}", pad)
        try:
            return from_numbers(value, spec.datatype) if spec.datatype.size else np.asarray(value, object)
        except (TypeError, ValueError) as error:
            raise WrongOutputs(
                f"output {spec.name!r} is of type {type(value).__name__}, which is no array of {spec.datatype.name} ({error})"
            ) from None


def _stored(spec: TensorSpec, array: Array) -> Array:
    """Return an array in the datatype's storage form; raise WrongOutputs if it has another datatype."""
    storage = spec.datatype.storage
    if not spec.datatype.size and array.dtype.kind in "SUT":
        array = array.astype(object)
    if array.dtype == storage:
        if array.dtype.hasobject:
            return _strings(spec, array)
        return _zeros_and_ones(array) if array.dtype == bool else array
    raise WrongOutputs(
        f"output {spec.name!r} has dtype {array.dtype}, and is declared as {spec.datatype.name}: convert it with "
        f".astype({str(storage)!r})"
    )


def _strings(spec: TensorSpec, array: Array) -> Array:
    """Return an array with elements that a later function gets as they are declared; raise WrongOutputs for others."""
    try:
        return spec.elements(array)
    except UnicodeError as error:
        raise WrongOutputs(
            f"output {spec.name!r} has an element that is not UTF-8 ({error}); declare it as BYTES, and return bytes"
        ) from None
    except TypeError as error:
        raise WrongOutputs(f"output {spec.name!r} has {error}") from None


def _zeros_and_ones(array: Array) -> Array:
    """Return an array of booleans whose bytes are 0 or 1: a copy if a byte is larger, as in a view of other numbers."""
    # ONNX Runtime counts such bytes as they are, and then reads beyond its buffers.
    octets = array.view(np.uint8)
    return octets.astype(bool) if octets.max(initial=0) > 1 else array


def fits(spec: TensorSpec, shape: tuple[int, ...]) -> bool:
    """Return whether a shape has the declared axes and sizes."""
    return len(shape) == len(spec.dims) and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(spec.dims, shape, strict=True)
    )
