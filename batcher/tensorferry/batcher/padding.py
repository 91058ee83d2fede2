"""Padding: requests whose inputs differ in length along one axis share a batch at a common length."""

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
    """The axis of an input that is padded (rows are axis 0, so at least 1), and with what."""

    axis: int
    value: Any


class PadPlan(NamedTuple):
    """How one request is padded: each of its rows from `length` to `padded_length`.

    `shapes` are the inputs' shapes behind axis 0 once they are padded, which requests that
    share a batch have in common, `added_bytes` what that takes more. `pads` has for each input
    its axis and a 0-d array of the pad value, or None where the input does not carry the axis;
    `outputs` are those of the `Padding`.
    """

    length: int
    padded_length: int
    shapes: tuple[tuple[int, ...], ...]
    added_bytes: int
    pads: tuple[tuple[int, Array] | None, ...]
    outputs: Mapping[str, int] | int | None


@dataclass(frozen=True, slots=True)
class Padding:
    """Which inputs are padded, to which lengths, and which outputs are cut back.

    `lengths` ascend; a request is padded to the least of them that holds it, and shares its
    batches with all others of that length. `inputs` says for each input that carries the axis
    where it is and with what it is padded; `outputs` which axis of an output has the padded
    length, and is cut back to the request's own. Both are by name, or for a model function of
    one bare array the one value itself. Outputs are declared, never guessed by their size.

    A request whose length is 0 or beyond the last of `lengths`, or whose inputs differ in
    length, is not padded: it shares batches with those of its own shape. So an answer never
    depends on the neighbours; that it does not depend on the padding is up to the model.
    """

    lengths: tuple[int, ...]
    inputs: Mapping[str, PadInput] | PadInput
    outputs: Mapping[str, int] | int | None = None
    # Pad values by input and dtype, as arrays; racing threads at worst make one twice.
    _values: dict[tuple[str, np.dtype[Any]], Array] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.lengths or any(b <= a for a, b in zip((0, *self.lengths), self.lengths, strict=False)):
            raise ValueError(f"lengths are {self.lengths}; they must ascend, from at least 1")
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
        """How a request is padded whose inputs have these names, dtypes and shapes; None if it is not.

        `names` is None for one bare array. InvalidRequest when a declared input is missing,
        lacks the axis, or has a dtype that cannot hold its pad value.
        """
        pads = self._pads(names, layout)
        lengths = {shape[pad[0]] for (_, shape), pad in zip(layout, pads, strict=True) if pad is not None}
        length = lengths.pop()
        rung = bisect_left(self.lengths, length)
        # Inputs that differ in length are for the model to judge: padded, they would look alike.
        if lengths or length == 0 or rung == len(self.lengths):
            return None
        padded_length = self.lengths[rung]
        shapes, added_bytes = [], 0
        for (dtype, shape), pad in zip(layout, pads, strict=True):
            if pad is None:
                shapes.append(shape[1:])
                continue
            axis = pad[0]
            shapes.append((*shape[1:axis], padded_length, *shape[axis + 1 :]))
            added_bytes += (padded_length - length) * math.prod(shape) // length * dtype.itemsize
        return PadPlan(length, padded_length, tuple(shapes), added_bytes, pads, self.outputs)

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
    """The pad value in the input's dtype, as a 0-d array; InvalidRequest when it cannot hold it."""
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
