"""What running a model shows: whether a row's outputs depend on the rows beside it.

There are two comparisons. A row alone against the same row among others shows what depends on the number of rows or
on the place among them; kernels may differ there, so rounding is allowed for. A row at one place against the same
row at the same place beside other neighbours shows what depends on their values. The neighbours are extreme
there: loud, quiet, zero, NaN, infinite. Rounding explains almost nothing of what differs.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from tensorferry.server.batching_check.compare import dependence
from tensorferry.server.batching_check.rows import (
    KINDS,
    Range,
    Row,
    accepted_integers,
    batched,
    candidates,
    join,
)
from tensorferry.server.proof import Array, Run, difference_of, sample, working_size
from tensorferry.server.signature import Signature

# Usual rows, and how many draws are tried until they differ in every input.
_USUAL = 5
_DRAWS = 16
# Draws of the extreme rows, where time is left.
_ROUNDS = 3
# The largest batch is at most so large, in bytes of inputs and outputs; and in time, but for the least.
_MOST_BYTES = 256 * 2**20
_LEAST_LARGE = 8


class Outcome(enum.Enum):
    """What running showed."""

    APART = "rows run together equal rows run alone"
    MIXES = "a row changes with its neighbours"
    UNSTABLE = "a row gives different outputs from run to run"
    DOES_NOT_RUN = "the model runs on no random input"


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of running, and on what it rests.

    `size` is that of the dimensions that vary besides the batch axis, None where the model ran with none of those
    tried. `batches` are the sizes of batches that were compared, by how often; `left_out` the kinds of rows that
    the model does not accept.
    """

    outcome: Outcome
    reason: str
    size: int | None
    batches: Mapping[int, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def extent(self) -> str:
        """What was run, in words."""
        sizes = ", ".join(map(str, sorted(self.batches)))
        out = (
            f"; left out, as the model fails on them: rows of {', '.join(self.left_out)}"
            if self.left_out
            else ""
        )
        return f"{sum(self.batches.values())} batches of {sizes} rows{out}"


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a model is tried with, and for how long.

    `most` is the largest batch; `words` are lists of strings that the model knows; `precision` is that to which the
    device computes, relative to the greatest magnitude, where the outputs' datatypes do not show it. Once `seconds`
    have passed, only the least is run: one draw of each kind of row, all in one batch, and if `thorough` each in a
    batch of its own.
    """

    most: int = 32
    words: Sequence[Sequence[str]] = ()
    precision: float = 0.0
    seconds: float = 2.0
    thorough: bool = True
    clock: Callable[[], float] = time.perf_counter


class _Mixes(Exception):
    """Running has shown that rows cannot share a batch."""


def try_rows(signature: Signature, run: Run, conditions: Conditions, first_run: Run | None = None) -> Trial:
    """Tries a model whose signature has a batch axis; never raises.

    `first_run` runs a row of a new kind for the first time; it may end runs that take too long. By default `run`.
    """
    size, reason = working_size(signature, run)
    if size is None:
        return Trial(
            Outcome.DOES_NOT_RUN,
            f"it does not run on random input ({reason}), so running it shows nothing",
            None,
        )
    trying = _Trying(signature, run, first_run or run, conditions, size)
    outcome, reason = Outcome.APART, "rows run together equal rows run alone"
    try:
        trying.usual_rows()
        trying.extreme_rows()
    except _Unstable as error:
        outcome, reason = Outcome.UNSTABLE, str(error)
    except _Mixes as error:
        outcome, reason = Outcome.MIXES, str(error)
    except Exception as error:
        outcome, reason = Outcome.MIXES, f"it runs one row, but not several together ({error})"
    return Trial(outcome, reason, size, trying.batches, tuple(trying.left_out))


class _Unstable(Exception):
    """The same row gives different outputs from run to run."""


class _Trying:
    """One trial while it goes on."""

    def __init__(
        self, signature: Signature, run: Run, first_run: Run, conditions: Conditions, size: int
    ) -> None:
        self._signature = signature
        self._run = run
        self._first_run = first_run
        self._conditions = conditions
        self._size = size
        self._generator = np.random.default_rng(1)
        self._ends = conditions.clock() + conditions.seconds
        self._usual: list[Row] = []
        self._row_seconds = 0.0
        self._row_bytes = 1
        self.batches: dict[int, int] = {}
        self.left_out: list[str] = []

    def usual_rows(self) -> None:
        """Compares usual rows run alone with the same in batches, in other orders and with other neighbours."""
        inputs = _differing(self._signature, self._size)
        self._usual = _rows_of(self._signature, inputs)
        alone = self._alone(self._usual)
        self._check_again(alone[0])
        self._compare(self._usual, alone)
        if any(spec.datatype.name == "BYTES" for spec in self._signature.inputs):
            for words in self._conditions.words:
                spoken = _rows_of(self._signature, _spoken(self._signature, inputs, words))
                try:
                    alone = self._alone(spoken)
                except Exception:
                    # Not all strings in the file are for this input.
                    continue
                self._compare(spoken, alone)

    def extreme_rows(self) -> None:
        """Holds rows beside extreme ones against the same beside usual ones."""
        ranges = accepted_integers(self._signature, self._first_run, self._usual[0], self._conditions.clock)
        kinds, refused = self._accepted(ranges)
        self.left_out.extend(refused)
        victims = [self._usual[0], *(kinds[name] for name in ("quiet", "zeros", "spread") if name in kinds)]
        self._large(victims, kinds)
        if self._conditions.thorough:
            self._beside(3, victims, kinds, at=(0, 2))
        for round_ in range(_ROUNDS):
            if round_:
                kinds = self._mixed(self._accepted(ranges)[0])
                victims = [*kinds.values(), self._usual[round_]]
            for rows, at in ((3, (1,)), (2, (0,)), (2, (1,)), (3, (0, 2))):
                if self._late():
                    return
                self._beside(rows, victims[round_:] + victims[:round_], kinds, at)
            if round_ and not self._late():
                self._large(victims, kinds)

    def _late(self) -> bool:
        return self._conditions.clock() >= self._ends

    def _alone(self, rows: Sequence[Row]) -> list[Mapping[str, Array]]:
        began = self._conditions.clock()
        outputs = [self._run(join(self._signature, [row])) for row in rows]
        self._row_seconds = (self._conditions.clock() - began) / len(rows)
        arrays = [*rows[0].values(), *outputs[0].values()]
        self._row_bytes = max(1, sum(array.nbytes for array in arrays))
        return outputs

    def _check_again(self, alone: Mapping[str, Array]) -> None:
        again = self._run(join(self._signature, [self._usual[0]]))
        for spec in self._signature.outputs:
            difference = difference_of(spec, alone[spec.name], again[spec.name], self._conditions.precision)
            if difference:
                raise _Unstable(f"output {spec.name!r} of one row differs from run to run: {difference}")

    def _compare(self, rows: Sequence[Row], alone: Sequence[Mapping[str, Array]]) -> None:
        for order in ([3, 0, 4, 2, 1], [1, 3], [4, 2, 0]):
            together = self._together([rows[row] for row in order])
            for spec in self._signature.outputs:
                output = together[spec.name]
                for at, row in enumerate(order):
                    difference = difference_of(
                        spec, alone[row][spec.name], output[at : at + 1], self._conditions.precision
                    )
                    if difference:
                        raise _Mixes(
                            f"output {spec.name!r} of a row changes with its neighbours: {difference}"
                        )

    def _together(self, rows: Sequence[Row]) -> Mapping[str, Array]:
        outputs = self._run(join(self._signature, rows))
        for spec in self._signature.outputs:
            shape = outputs[spec.name].shape
            if shape[:1] != (len(rows),):
                raise _Mixes(
                    f"output {spec.name!r} has shape {list(shape)} for {len(rows)} rows: it does not follow the "
                    "batch axis"
                )
        self.batches[len(rows)] = self.batches.get(len(rows), 0) + 1
        return outputs

    def _accepted(self, ranges: Mapping[str, Range]) -> tuple[dict[str, Row], list[str]]:
        """A row of each kind that changes something and that the model accepts, and the kinds that it does not."""
        found: dict[str, Row] = {}
        refused: list[str] = []
        for kind in KINDS:
            rows = candidates(self._signature, kind, self._usual[0], ranges, self._generator)
            accepted = next((row for row in rows if self._accepts(row)), None)
            if accepted is not None:
                found[kind.name] = accepted
            elif rows:
                refused.append(kind.name)
        return found, refused

    def _accepts(self, row: Row) -> bool:
        try:
            self._first_run(row)
        except Exception:
            return False
        return True

    def _mixed(self, kinds: Mapping[str, Row]) -> dict[str, Row]:
        """Rows whose inputs are each of a kind of their own, where the model accepts them; else those given."""
        rows = list(kinds.values())
        mixed: dict[str, Row] = {}
        for name, row in kinds.items():
            other = {
                spec.name: rows[self._generator.integers(len(rows))][spec.name]
                for spec in self._signature.inputs
            }
            if self._accepts(other):
                mixed[f"{name} and other"] = other
            else:
                mixed[name] = row
        return mixed

    def _beside(self, rows: int, victims: Sequence[Row], kinds: Mapping[str, Row], at: Sequence[int]) -> None:
        """Holds the victims, at these places of a batch, beside each kind of row against the same beside usual rows."""
        places = {place: victims[number % len(victims)] for number, place in enumerate(at)}
        batch = _placed(rows, places, self._usual[1:])
        first = self._together(batch)
        for name, row in {**kinds, "equal": places[at[0]]}.items():
            other = self._together(_placed(rows, places, [row]))
            self._hold(batch, first, other, places, f"beside {name} rows, in a batch of {rows}")

    def _large(self, victims: Sequence[Row], kinds: Mapping[str, Row]) -> None:
        """The same in the largest batch that bytes and time allow, beside rows of all kinds at once."""
        rows = self._largest()
        while rows > _USUAL:
            places = {place: victims[place // 2 % len(victims)] for place in range(0, rows, 2)}
            batch = _placed(rows, places, self._usual[1:])
            try:
                first = self._together(batch)
                other = self._together(_placed(rows, places, list(kinds.values()) or self._usual))
            except _Mixes:
                raise
            except Exception:
                # It may be too large for the device, or for a table in the model; the warm-up finds its limit.
                rows //= 2
                continue
            self._hold(batch, first, other, places, f"beside others, in a batch of {rows}")
            return

    def _largest(self) -> int:
        left = self._ends - self._conditions.clock()
        in_time = int(left / (2 * self._row_seconds)) if self._row_seconds else self._conditions.most
        by_bytes = _MOST_BYTES // self._row_bytes
        return min(self._conditions.most, by_bytes, max(_LEAST_LARGE, in_time))

    def _hold(
        self,
        batch: Sequence[Row],
        first: Mapping[str, Array],
        other: Mapping[str, Array],
        places: Iterable[int],
        where: str,
    ) -> None:
        """Raises if the rows at these places are others in `other` than in `first`, the outputs of `batch`."""
        if not _differing_at(self._signature, first, first, other, places):
            return
        # What varies from run to run is measured where it matters: most devices compute the same each time.
        again = self._together(batch)
        found = _differing_at(self._signature, first, again, other, places)
        if found:
            raise _Mixes(f"{found} ({where})")


def _differing_at(
    signature: Signature,
    first: Mapping[str, Array],
    again: Mapping[str, Array],
    other: Mapping[str, Array],
    places: Iterable[int],
) -> str:
    for spec in signature.outputs:
        one, same, beside = (outputs[spec.name] for outputs in (first, again, other))
        for at in places:
            found = dependence(spec, one[at : at + 1], same[at : at + 1], beside[at : at + 1])
            if found:
                return f"output {spec.name!r} of a row changes with its neighbours: {found}"
    return ""


def _placed(rows: int, places: Mapping[int, Row], others: Sequence[Row]) -> list[Row]:
    filling = cycle(others)
    return [places[place] if place in places else next(filling) for place in range(rows)]


def _rows_of(signature: Signature, inputs: Mapping[str, Array]) -> list[Row]:
    return [
        {
            spec.name: np.ascontiguousarray(inputs[spec.name][[row]]) if batched(spec) else inputs[spec.name]
            for spec in signature.inputs
        }
        for row in range(_USUAL)
    ]


def _spoken(signature: Signature, inputs: Mapping[str, Array], words: Sequence[str]) -> dict[str, Array]:
    """The inputs, but that every other string is one of the words, each in turn."""
    spoken = dict(inputs)
    for spec in signature.inputs:
        if spec.datatype.name == "BYTES":
            array = inputs[spec.name].copy()
            flat = array.reshape(-1)
            for at in range(0, len(flat), 2):
                flat[at] = words[at // 2 % len(words)]
            spoken[spec.name] = array
    return spoken


def _differing(signature: Signature, size: int) -> dict[str, Array]:
    """Random rows that are not all alike in any input, where it has room to differ.

    Five bits are alike once in sixteen times; a model that must have them so (they are axes, say)
    would then look as if its rows were independent.
    """
    inputs = sample(signature, _USUAL, size)
    for seed in range(1, _DRAWS):
        alike = [name for name, array in inputs.items() if np.array_equal(array[1:], array[:-1])]
        if not alike:
            break
        drawn = sample(signature, _USUAL, size, seed)
        inputs.update({name: drawn[name] for name in alike})
    return inputs
