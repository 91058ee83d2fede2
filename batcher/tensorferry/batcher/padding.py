"""Padding of inputs that differ in length along one axis, so that their requests can share a batch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.batcher.errors import InvalidRequest

Array = npt.NDArray[Any]


class PadInput(NamedTuple):
    """The axis of an input to pad, at least 1 because axis 0 has the rows, and the pad value."""

    axis: int
    value: Any


class PadPlan(NamedTuple):
    """Padding of one request: each of its rows from `length` to `padded_length`.

    A batch of such requests has the least multiple of `step` that holds its longest row, at most `padded_length`.

    `shapes` are the padded inputs' shapes behind axis 0, equal for requests that share a batch. `added_bytes` is the size
    of the padding. `pads` has for each input its axis and a 0-d array of the pad value, or None if it is not padded.
    `outputs` are those of the `Padding`. `stacked` is how many positions of all rows are padding already, because shorter
    rows were stacked to one of `length`.
    """

    length: int
    padded_length: int
    step: int
    shapes: tuple[tuple[int, ...], ...]
    added_bytes: int
    pads: tuple[tuple[int, Array] | None, ...]
    outputs: Mapping[str, int] | int | None
    stacked: int = 0


@dataclass(frozen=True, slots=True)
class Padding:
    """Which inputs are padded, to which lengths, and which outputs are cut back.

    `lengths` ascend. A request is padded to the smallest length that holds it, and shares batches with all others padded
    to that length. `inputs` gives the axis and pad value of each padded input. `outputs` gives the axis of each output
    that has the padded length, and is cut back to the request's own; outputs are never guessed by their size. Both are by
    name; for a model function of one bare array they are the one value itself.

    With `steps` greater than 1, a batch is padded no further than its longest row needs: to the least of that many equal
    steps up to its length of `lengths`. The model then sees more lengths.

    A request is not padded if its length is 0 or beyond the last of `lengths`, or its inputs differ in length. It then
    shares batches with requests of its own shape. So an answer never depends on the other requests. The model must make
    sure that it does not depend on the padding.
    """

    lengths: tuple[int, ...]
    inputs: Mapping[str, PadInput] | PadInput
    outputs: Mapping[str, int] | int | None = None
    steps: int = 1
    # Pad values by input and dtype, as arrays. Two threads may make the same one, which is harmless.
    _values: dict[tuple[str, np.dtype[Any]], Array] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.lengths or any(b <= a for a, b in zip((0, *self.lengths), self.lengths, strict=False)):
            raise ValueError(f"lengths are {self.lengths}; they must ascend, from at least 1")
        if self.steps < 1:
            raise ValueError(f"steps are {self.steps}; there must be at least 1")
        if not self.inputs:
            raise ValueError("inputs are empty; name at least one input that is padded")
        axes = [pad.axis for pad in self._inputs.values()]
        if isinstance(self.outputs, Mapping):
            axes += self.outputs.values()
        elif self.outputs is not None:
            axes.append(self.outputs)
        for axis in axes:
            if axis < 1:
                raise ValueError(f"an axis is {axis}; it must be at least 1, since axis 0 counts the rows")

    @property
    def _inputs(self) -> Mapping[str, PadInput]:
        return {"x": self.inputs} if isinstance(self.inputs, PadInput) else self.inputs

    def plan(
        self, names: Sequence[str] | None, layout: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
    ) -> PadPlan | None:
        """Return the padding of a request with inputs of these names, dtypes and shapes; None if it is not padded.

        `names` is None for one bare array. Raises InvalidRequest if a declared input is missing, lacks the axis, or has a
        dtype that cannot hold its pad value.
        """
        pads = self._pads(names, layout)
        lengths = {shape[pad[0]] for (_, shape), pad in zip(layout, pads, strict=True) if pad is not None}
        length = lengths.pop()
        index = bisect_left(self.lengths, length)
        # Inputs that differ in length are left to the model: padding would make them look equal.
        if lengths or length == 0 or index == len(self.lengths):
            return None
        padded_length = self.lengths[index]
        shapes, added_bytes = [], 0
        for (dtype, shape), pad in zip(layout, pads, strict=True):
            if pad is None:
                shapes.append(shape[1:])
                continue
            axis = pad[0]
            shapes.append((*shape[1:axis], padded_length, *shape[axis + 1 :]))
            added_bytes += (padded_length - length) * math.prod(shape) // length * dtype.itemsize
        step = math.ceil(padded_length / self.steps)
        return PadPlan(length, padded_length, step, tuple(shapes), added_bytes, pads, self.outputs)

    def _pads(
        self, names: Sequence[str] | None, layout: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
    ) -> tuple[tuple[int, Array] | None, ...]:
        if (names is None) is not isinstance(self.inputs, PadInput):
            given, declared = (
                ("one bare array", "by name") if names is None else ("a dict", "for a bare array")
            )
            raise InvalidRequest(
                f"the input is {given}, but the padding of the inputs is declared {declared}"
            )
        names, inputs = names or ("x",), self._inputs
        missing = [name for name in inputs if name not in names]
        if missing:
            raise InvalidRequest(
                f"input {missing[0]!r} is declared as padded, but the request has {sorted(names)}"
            )
        pads: list[tuple[int, Array] | None] = []
        for name, (dtype, shape) in zip(names, layout, strict=True):
            pad = inputs.get(name)
            if pad is None:
                pads.append(None)
                continue
            if len(shape) <= pad.axis:
                raise InvalidRequest(
                    f"input {name!r} has shape {list(shape)} with its rows, but its axis {pad.axis} is padded"
                )
            value = self._values.get((name, dtype))
            if value is None:
                value = self._values[name, dtype] = _value(name, pad.value, dtype)
            pads.append((pad.axis, value))
        return tuple(pads)


def _value(name: str, value: Any, dtype: np.dtype[Any]) -> Array:
    """Return the pad value in the input's dtype, as a 0-d array; raise InvalidRequest if that cannot hold it."""
    if dtype.hasobject:
        held = np.empty((), object)
        held[()] = value
        return held
    try:
        with np.errstate(all="ignore"):
            held = np.asarray(value).astype(dtype)
            exact = dtype.kind not in "iub" or bool(held == value)
            finite = dtype.kind != "f" or bool(np.isfinite(held)) is math.isfinite(value)
        if held.ndim == 0 and exact and finite:
            return held
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidRequest(
        f"input {name!r} is of dtype {dtype}, which cannot hold its pad value {value!r}; "
        "give the input another dtype, or the padding another value"
    )
