"""Random rows, and rows of extreme kinds as far as a model accepts them: zeros, tiny, huge, negative, one-hot, NaN, infinite.

Random rows have values that are valid for indices, masks and categories, and strings from the model's file.

A row maps each input to an array. Its first dimension is 1 if the input has a batch axis. Inputs without a batch axis
are the same in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.server.runtime.checks.sampling import Array, Run, array_of_floats, random_inputs
from tensorferry.server.signature import Signature, TensorSpec

Row = Mapping[str, Array]

RANDOM_ROWS = 5
# Most draws until the random rows differ in every input.
_DRAWS = 16
# The factor by which integers grow while the model accepts them, and their limit.
_GROWTH = 8
_MOST_INTEGER = 8**7
# Integers stop growing if a run takes this many times as long as with 0 and 1, because they may be sizes or counts.
_SLOWER = 4
_SLOWER_SECONDS = 5e-3
# The greatest FP16 number is 65504.
_MOST_FP16 = 6e4
_LONG_TEXT = "long text " * 200


def rows_of(signature: Signature, inputs: Mapping[str, Array]) -> list[Row]:
    """Return the rows of a batch as batches of one row."""
    return [
        {
            spec.name: np.ascontiguousarray(inputs[spec.name][[row]])
            if spec.has_row_axis
            else inputs[spec.name]
            for spec in signature.inputs
        }
        for row in range(RANDOM_ROWS)
    ]


def with_vocabulary(
    signature: Signature, inputs: Mapping[str, Array], vocabulary: Sequence[str]
) -> dict[str, Array]:
    """Return the inputs with every second string replaced by one of the vocabulary, in turn."""
    filled = dict(inputs)
    for spec in signature.inputs:
        if spec.datatype.name == "BYTES":
            array = inputs[spec.name].copy()
            flat = array.reshape(-1)
            for at in range(0, len(flat), 2):
                flat[at] = spec.element(vocabulary[at // 2 % len(vocabulary)])
            filled[spec.name] = array
    return filled


def distinct_rows(signature: Signature, size: int, seed: int = 0) -> dict[str, Array]:
    """Return random rows that are not all equal in any input, if the input can differ.

    Five random bits are equal once in sixteen draws. A model that requires them to be equal, for instance because they
    are axes, would then seem to have independent rows.
    """
    first = seed * _DRAWS
    inputs = random_inputs(signature, RANDOM_ROWS, size, first)
    for other in range(first + 1, first + _DRAWS):
        rows = {spec.name: inputs[spec.name] for spec in signature.inputs if spec.has_row_axis}
        alike = [name for name, array in rows.items() if np.array_equal(array[1:], array[:-1])]
        if not alike:
            break
        drawn = random_inputs(signature, RANDOM_ROWS, size, other)
        inputs.update({name: drawn[name] for name in alike})
    return inputs


@dataclass(frozen=True, slots=True)
class RowKind:
    """One kind of row: how inputs of each type are filled.

    `floats` returns numbers of a shape; None leaves floats unchanged. `scales` are magnitudes, tried in turn until the
    model runs. `integer` returns integers of a shape within a minimum and a maximum.
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


_HUGE = (1e6, 1e4, 1e2, 10.0)

ROW_KINDS: tuple[RowKind, ...] = (
    RowKind("huge", _normal, lambda g, shape, least, most: np.full(shape, most), _LONG_TEXT, _HUGE),
    RowKind("zeros", _all(0), lambda g, shape, least, most: np.zeros(shape), ""),
    RowKind("NaN", _all(np.nan)),
    RowKind("+inf", _all(np.inf)),
    RowKind("-inf", _all(-np.inf)),
    RowKind(
        "negative",
        lambda g, shape: -np.abs(_normal(g, shape)),
        lambda g, shape, least, most: np.full(shape, least),
        "-1",
        _HUGE,
    ),
    RowKind("tiny", _normal, None, "\N{LATIN SMALL LETTER E WITH ACUTE}", (1e-6,)),
    RowKind("spread", _spread, lambda g, shape, least, most: g.integers(least, most, shape, endpoint=True)),
    RowKind("constant", _all(1), lambda g, shape, least, most: np.ones(shape), "1", (1e3, 1.0)),
    RowKind("one-hot", _one_hot, lambda g, shape, least, most: _one_hot(g, shape)),
)


@dataclass(frozen=True, slots=True)
class IntegerRange:
    """The integers that a model accepts for an input, as far as tried."""

    least: int = 0
    most: int = 1


def batch_of_rows(signature: Signature, rows: Sequence[Row]) -> dict[str, Array]:
    """Return the rows as one batch. Inputs without a batch axis come from the first row."""
    return {
        spec.name: np.concatenate([row[spec.name] for row in rows])
        if spec.has_row_axis
        else rows[0][spec.name]
        for spec in signature.inputs
    }


def accepted_integers(
    signature: Signature, run: Run, row: Row, clock: Callable[[], float]
) -> dict[str, IntegerRange]:
    """Return the range of values that the model accepts for each integer input, with the other inputs as in `row`.

    The search ends at values that fail, change the shape of an output or take much longer, because these are sizes.
    """
    inputs = [spec for spec in signature.inputs if spec.has_row_axis and _is_integer(spec)]
    if not inputs:
        return {}
    started = clock()
    expected = run(row)
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
        return all(outputs[name].shape == output.shape for name, output in expected.items())

    return {spec.name: _grown(spec, accepts) for spec in inputs}


def _grown(spec: TensorSpec, accepts: Callable[[TensorSpec, int], bool]) -> IntegerRange:
    limits = np.iinfo(spec.datatype.storage)
    # The minimum of a signed datatype is left out, because dividing it by -1 crashes the process.
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
    base: Row,
    ranges: Mapping[str, IntegerRange],
    generator: np.random.Generator,
) -> list[dict[str, Array]]:
    """Return rows of a kind, the most extreme first; empty if the kind changes no input.

    `base` is a row that the model accepts. Its values stay for the datatypes that the kind does not change.
    """
    inputs = [spec for spec in signature.inputs if spec.has_row_axis]
    scales = kind.scales if any(spec.is_float for spec in inputs) else kind.scales[:1]
    rows: list[dict[str, Array]] = []
    # The model may reject several extreme integer inputs together, although it accepts each one.
    for one in (kind, replace(kind, integer=None)):
        for scale in scales:
            made = {spec.name: _values(one, spec, base, ranges, generator, scale) for spec in inputs}
            changed = {name: values for name, values in made.items() if values is not None}
            if changed:
                rows.append({**base, **changed})
    return rows


def _values(
    kind: RowKind,
    spec: TensorSpec,
    base: Row,
    ranges: Mapping[str, IntegerRange],
    generator: np.random.Generator,
    scale: float,
) -> Array | None:
    """Return the values of an input in a row of a kind; None if the kind does not change it."""
    shape = base[spec.name].shape
    if spec.datatype.name == "BYTES":
        return None if kind.text is None else np.full(shape, spec.element(kind.text), dtype=object)
    if spec.is_float:
        return None if kind.floats is None else _stored(kind.floats(generator, shape) * scale, spec)
    if kind.integer is None:
        return None
    allowed = ranges.get(spec.name, IntegerRange())
    integers = kind.integer(generator, shape, allowed.least, allowed.most)
    return np.asarray(integers).astype(spec.datatype.storage)


def _stored(numbers: npt.NDArray[Any], spec: TensorSpec) -> Array:
    """Return numbers in the storage type of a float tensor; finite numbers stay finite."""
    if spec.datatype.name == "FP16":
        numbers = np.where(np.isfinite(numbers), np.clip(numbers, -_MOST_FP16, _MOST_FP16), numbers)
    return array_of_floats(numbers, spec.datatype)


def _is_integer(spec: TensorSpec) -> bool:
    return spec.datatype.storage.kind in "iu" and not spec.is_float
