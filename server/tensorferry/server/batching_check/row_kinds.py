"""Rows of many kinds: zeros, quiet, loud, negative, one-hot, NaN, infinite; as a model accepts them.

A row maps each input to an array whose first dimension is 1, where the input has a batch axis. Inputs without one
are the same in every row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.server.runtime.sampling import Array, Run
from tensorferry.server.signature import Signature, TensorSpec

Row = Mapping[str, Array]

# What integers grow by, and how far, while the model accepts them.
_GROWTH = 8
_MOST_INTEGER = 8**7
# Growing ends where a run takes this many times as long as with 0 and 1: the values may be sizes or counts.
_SLOWER = 4
_SLOWER_SECONDS = 5e-3
# FP16 ends at 65504.
_MOST_FP16 = 6e4
_LONG_TEXT = "long text " * 200


@dataclass(frozen=True, slots=True)
class RowKind:
    """How one kind of row is filled, by the datatypes of the inputs.

    `floats` gives numbers of a shape, None where the kind changes nothing of floats; `scales` are the magnitudes
    tried in turn until the model runs. `integer` gives integers of a shape, at most and at least those given.
    """

    name: str
    floats: Callable[[np.random.Generator, tuple[int, ...]], Array] | None
    integer: Callable[[np.random.Generator, tuple[int, ...], int, int], Any] | None = None
    text: str | None = None
    scales: tuple[float, ...] = (1.0,)


def _normal(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return generator.standard_normal(shape)


def _spread(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return generator.choice([-1.0, 1.0], shape) * 10 ** generator.uniform(-6, 6, shape)


def _one_hot(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    array = np.zeros(shape)
    if array.size:
        array.reshape(-1)[generator.integers(array.size)] = 1
    return array


def _all(value: float) -> Callable[[np.random.Generator, tuple[int, ...]], Array]:
    return lambda generator, shape: np.full(shape, value)


_LOUD = (1e6, 1e4, 1e2, 10.0)

ROW_KINDS: tuple[RowKind, ...] = (
    RowKind("loud", _normal, lambda g, shape, least, most: np.full(shape, most), _LONG_TEXT, _LOUD),
    RowKind("zeros", _all(0), lambda g, shape, least, most: np.zeros(shape), ""),
    RowKind("NaN", _all(np.nan)),
    RowKind("+inf", _all(np.inf)),
    RowKind("-inf", _all(-np.inf)),
    RowKind(
        "negative",
        lambda g, shape: -np.abs(_normal(g, shape)),
        lambda g, shape, least, most: np.full(shape, least),
        "-1",
        _LOUD,
    ),
    RowKind("quiet", _normal, None, "\N{LATIN SMALL LETTER E WITH ACUTE}", (1e-6,)),
    RowKind("spread", _spread, lambda g, shape, least, most: g.integers(least, most, shape, endpoint=True)),
    RowKind("constant", _all(1), lambda g, shape, least, most: np.ones(shape), "1", (1e3, 1.0)),
    RowKind("one-hot", _one_hot, lambda g, shape, least, most: _one_hot(g, shape)),
)


@dataclass(frozen=True, slots=True)
class IntegerRange:
    """The integers that a model accepts for an input, as far as was tried."""

    least: int = 0
    most: int = 1


def has_rows(spec: TensorSpec) -> bool:
    """Whether an input has a batch axis."""
    return bool(spec.dims) and not isinstance(spec.dims[0], int)


def join(signature: Signature, rows: Sequence[Row]) -> dict[str, Array]:
    """The rows as one batch; inputs without a batch axis are those of the first row."""
    return {
        spec.name: np.concatenate([row[spec.name] for row in rows]) if has_rows(spec) else rows[0][spec.name]
        for spec in signature.inputs
    }


def accepted_integers(
    signature: Signature, run: Run, row: Row, clock: Callable[[], float] = time.perf_counter
) -> dict[str, IntegerRange]:
    """For each input of integers the values that the model runs with, the other inputs as in `row`.

    Growing ends at values that fail, change a shape of the outputs or take much longer: these are sizes.
    """
    inputs = [spec for spec in signature.inputs if has_rows(spec) and _is_integer(spec)]
    if not inputs:
        return {}
    started = clock()
    usual = run(row)
    took = clock() - started

    def accepts(spec: TensorSpec, value: int) -> bool:
        array = np.full_like(row[spec.name], value)
        began = clock()
        try:
            outputs = run({**row, spec.name: array})
        except Exception:
            return False
        if clock() - began > _SLOWER * took + _SLOWER_SECONDS:
            return False
        return all(outputs[name].shape == output.shape for name, output in usual.items())

    return {spec.name: _grown(spec, accepts) for spec in inputs}


def _grown(spec: TensorSpec, accepts: Callable[[TensorSpec, int], bool]) -> IntegerRange:
    limits = np.iinfo(spec.datatype.storage)
    # The least of a signed datatype is left out: what divides it by -1 ends the process.
    greatest, least = int(limits.max), int(limits.min) + 1 if limits.min else 0
    found, value = IntegerRange(), _GROWTH
    while value <= _MOST_INTEGER:
        value = min(value, greatest)
        if not accepts(spec, value):
            break
        found = IntegerRange(0, value)
        if value == greatest:
            break
        value *= _GROWTH
    if least < 0:
        for value in (max(-found.most, least), -1):
            if accepts(spec, value):
                return IntegerRange(value, found.most)
    return found


def rows_of_kind(
    signature: Signature,
    kind: RowKind,
    usual: Row,
    ranges: Mapping[str, IntegerRange],
    generator: np.random.Generator,
) -> list[dict[str, Array]]:
    """Rows of a kind, the most extreme first; none if the kind changes no input.

    `usual` is a row that the model runs with; its values stay where the kind has none for a datatype.
    """
    inputs = [spec for spec in signature.inputs if has_rows(spec)]
    if not any(_applies(kind, spec) for spec in inputs):
        return []
    # Integers may be too much together, though the model accepts each input's alone.
    without = replace(kind, integer=None)
    kinds = [kind, without] if any(_applies(without, spec) for spec in inputs) else [kind]
    scales = kind.scales if any(is_float(spec) for spec in inputs) else kind.scales[:1]
    return [_filled(signature, one, usual, ranges, generator, scale) for one in kinds for scale in scales]


def _applies(kind: RowKind, spec: TensorSpec) -> bool:
    if spec.datatype.name == "BYTES":
        return kind.text is not None
    return (kind.floats if is_float(spec) else kind.integer) is not None


def _filled(
    signature: Signature,
    kind: RowKind,
    usual: Row,
    ranges: Mapping[str, IntegerRange],
    generator: np.random.Generator,
    scale: float,
) -> dict[str, Array]:
    return {
        spec.name: _values(kind, spec, usual[spec.name], ranges, generator, scale)
        if has_rows(spec) and _applies(kind, spec)
        else usual[spec.name]
        for spec in signature.inputs
    }


def _values(
    kind: RowKind,
    spec: TensorSpec,
    usual: Array,
    ranges: Mapping[str, IntegerRange],
    generator: np.random.Generator,
    scale: float,
) -> Array:
    name, storage, shape = spec.datatype.name, spec.datatype.storage, usual.shape
    if kind.floats is not None and is_float(spec):
        return _stored(kind.floats(generator, shape) * scale, spec)
    if kind.integer is not None and storage.kind in "iub":
        allowed = ranges.get(spec.name, IntegerRange())
        return np.asarray(kind.integer(generator, shape, allowed.least, allowed.most)).astype(storage)
    assert name == "BYTES"
    return np.full(shape, kind.text, dtype=object)


def _stored(numbers: npt.NDArray[Any], spec: TensorSpec) -> Array:
    """Numbers as a tensor of floats holds them; finite ones stay so."""
    if spec.datatype.name == "FP16":
        numbers = np.where(np.isfinite(numbers), np.clip(numbers, -_MOST_FP16, _MOST_FP16), numbers)
    if spec.datatype.name == "BF16":
        bits = np.ascontiguousarray(numbers, "<f4").view("<u4")
        # Cut off, as `random_array` does; NaN keeps its highest bit.
        return (bits >> 16).astype("<u2")
    return numbers.astype(spec.datatype.storage)


def is_float(spec: TensorSpec) -> bool:
    """Whether a tensor has floats, BF16 among them."""
    return spec.datatype.storage.kind == "f" or spec.datatype.name == "BF16"


def _is_integer(spec: TensorSpec) -> bool:
    return spec.datatype.storage.kind in "iu" and spec.datatype.name != "BF16"
