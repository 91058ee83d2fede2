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

from tensorferry.server.batching_check.random_rows import RANDOM_ROWS, distinct_rows, rows_of, with_vocabulary
from tensorferry.server.batching_check.row_difference import row_difference
from tensorferry.server.batching_check.row_kinds import (
    ROW_KINDS,
    IntegerRange,
    Row,
    RowKind,
    accepted_integers,
    has_rows,
    join,
    rows_of_kind,
)
from tensorferry.server.runtime.sampling import Array, Run, describe_difference, working_size
from tensorferry.server.signature import Signature

# Draws of usual rows, until the model runs on enough of them.
_DRAWS = 8
# Bounds of the largest batch: bytes of its inputs and outputs, and the rows that it has even where they take long.
_MOST_BYTES = 256 * 2**20
_LEAST_LARGE = 8
# The whole check takes as long as this number of rows, more than a warm-up runs, or this time if that is longer.
_MOST_ROWS = 300
_LEAST_SECONDS = 0.1


class ComparisonOutcome(enum.Enum):
    """What running showed."""

    APART = "rows run together equal rows run alone"
    MIXES = "a row changes with its neighbours"
    UNSTABLE = "a row gives different outputs from run to run"
    DOES_NOT_RUN = "the model runs on no random input"


@dataclass(frozen=True, slots=True)
class RowComparison:
    """The outcome of running, and on what it rests.

    `size` is that of the dimensions that vary besides the batch axis, None where the model ran with none of those
    tried. `batches` are the sizes of batches that were compared, by how often; `left_out` the kinds of rows that
    the model does not accept.
    """

    outcome: ComparisonOutcome
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
class ComparisonSettings:
    """What a model is tried with, and for how long.

    `most` is the largest batch; `words` are lists of strings that the model knows; `precision` is that to which the
    device computes, relative to the greatest magnitude, where the outputs' datatypes do not show it. Once `seconds`
    have passed, only the least is run: one draw of each kind of row, all in one batch, and if `thorough` each in a
    batch of its own.
    """

    most: int = 32
    words: Sequence[Sequence[str]] = ()
    precision: float = 0.0
    seconds: float = 1.0
    thorough: bool = True
    clock: Callable[[], float] = time.perf_counter


class _Mixes(Exception):
    """Running has shown that rows cannot share a batch."""


def compare_rows(
    signature: Signature, run: Run, conditions: ComparisonSettings, first_run: Run | None = None
) -> RowComparison:
    """Tries a model whose signature has a batch axis; never raises.

    `first_run` runs a row of a new kind for the first time; it may end runs that take too long. By default `run`.
    """
    size, reason = working_size(signature, run)
    if size is None:
        return RowComparison(
            ComparisonOutcome.DOES_NOT_RUN,
            f"it does not run on random input ({reason}), so running it shows nothing",
            None,
        )
    comparer = _RowComparer(signature, run, first_run or run, conditions, size)
    outcome, reason = ComparisonOutcome.APART, "rows run together equal rows run alone"
    try:
        comparer.usual_rows()
        comparer.extreme_rows()
    except _Unstable as error:
        outcome, reason = ComparisonOutcome.UNSTABLE, str(error)
    except _RunsOnFew as error:
        outcome, reason = ComparisonOutcome.DOES_NOT_RUN, str(error)
    except _Mixes as error:
        outcome, reason = ComparisonOutcome.MIXES, str(error)
    except Exception as error:
        outcome, reason = ComparisonOutcome.MIXES, f"it runs one row, but not several together ({error})"
    return RowComparison(outcome, reason, size, comparer.batches, tuple(dict.fromkeys(comparer.left_out)))


class _Unstable(Exception):
    """The same row gives different outputs from run to run."""


class _RunsOnFew(Exception):
    """The model fails on most random rows."""


class _RowComparer:
    """One comparison while it goes on."""

    def __init__(
        self, signature: Signature, run: Run, first_run: Run, conditions: ComparisonSettings, size: int
    ) -> None:
        self._signature = signature
        self._run = run
        self._first_run = first_run
        self._conditions = conditions
        self._size = size
        self._generator = np.random.default_rng(1)
        self._ends = 0.0
        self._usual: list[Row] = []
        self._alone_outputs: list[Mapping[str, Array]] = []
        self._row_seconds = 0.0
        self._row_bytes = 1
        self.batches: dict[int, int] = {}
        self.left_out: list[str] = []

    def usual_rows(self) -> None:
        """Compares usual rows run alone with the same in batches, in other orders and with other neighbours."""
        alone = self._alone_outputs = self._draw_usual()
        in_rows = max(_LEAST_SECONDS, _MOST_ROWS * self._row_seconds)
        self._ends = self._conditions.clock() + min(self._conditions.seconds, in_rows)
        self._check_again(alone[0])
        self._compare(self._usual, alone)
        if any(spec.datatype.name == "BYTES" for spec in self._signature.inputs):
            for words in self._conditions.words:
                inputs = with_vocabulary(self._signature, join(self._signature, self._usual), words)
                rows = rows_of(self._signature, inputs)
                try:
                    alone = self._alone(rows)
                except Exception:
                    # Not all strings in the file are for this input.
                    continue
                self._compare(rows, alone)

    def _draw_usual(self) -> list[Mapping[str, Array]]:
        """Draws rows until enough are found on which the model runs; returns what it makes of each alone."""
        outputs: list[Mapping[str, Array]] = []
        reason = ""
        began = self._conditions.clock()
        shared: Row = {}
        for seed in range(_DRAWS):
            for drawn in rows_of(self._signature, distinct_rows(self._signature, self._size, seed)):
                # Inputs without a batch axis are the same in all rows.
                shared = shared or {
                    spec.name: drawn[spec.name] for spec in self._signature.inputs if not has_rows(spec)
                }
                row = {**drawn, **shared}
                try:
                    outputs.append(self._run(row))
                except Exception as error:
                    reason = str(error)
                    continue
                self._usual.append(row)
                if len(outputs) == RANDOM_ROWS:
                    self._row_seconds = (self._conditions.clock() - began) / (
                        seed * RANDOM_ROWS + RANDOM_ROWS
                    )
                    self._row_bytes = max(
                        1, sum(array.nbytes for array in (*row.values(), *outputs[0].values()))
                    )
                    return outputs
        raise _RunsOnFew(f"it runs on few random inputs ({reason}), so running it shows nothing")

    def extreme_rows(self) -> None:
        """Holds rows beside extreme ones against the same beside usual ones."""
        ranges = accepted_integers(self._signature, self._first_run, self._usual[0], self._conditions.clock)
        kinds = self._accepted(ROW_KINDS, ranges)
        victims = [self._usual[0], *(kinds[name] for name in ("quiet", "zeros", "spread") if name in kinds)]
        self._large(victims, kinds)
        if self._conditions.thorough:
            self._beside(3, victims, kinds, at=(0, 2))
        self._all_beside_all([self._usual[0], *kinds.values()], kinds)
        again = self._accepted([kind for kind in ROW_KINDS if kind.name in kinds], ranges)
        several = sum(map(has_rows, self._signature.inputs)) > 1
        for step in range(1, len(again) if several else 2):
            if self._late():
                return
            kinds = self._mixed(again, step)
            self._large(list(kinds.values()), kinds)
            victims = [self._usual[step % RANDOM_ROWS], *kinds.values()]
            self._all_beside_all(victims if step == 1 else victims[:2], kinds)

    def _all_beside_all(self, victims: Sequence[Row], kinds: Mapping[str, Row]) -> None:
        """Holds each victim beside each kind of row, in batches of 2 and 3, as long as there is time."""
        for number, victim in enumerate(victims):
            others = [victim, victims[number - 1]]
            for rows, at in ((2, (number % 2,)), (3, (0, 2) if number % 2 else (1,))):
                if self._late():
                    return
                self._beside(rows, others, kinds, at)

    def _late(self) -> bool:
        return self._conditions.clock() >= self._ends

    def _alone(self, rows: Sequence[Row]) -> list[Mapping[str, Array]]:
        return [self._run(row) for row in rows]

    def _check_again(self, alone: Mapping[str, Array]) -> None:
        again = self._run(self._usual[0])
        for spec in self._signature.outputs:
            difference = describe_difference(
                spec, alone[spec.name], again[spec.name], self._conditions.precision
            )
            if difference:
                raise _Unstable(f"output {spec.name!r} of one row differs from run to run: {difference}")

    def _compare(self, rows: Sequence[Row], alone: Sequence[Mapping[str, Array]]) -> None:
        for order in ([3, 0, 4, 2, 1], [1, 3], [4, 2, 0]):
            together = self._together([rows[row] for row in order])
            self._hold_alone({at: alone[row] for at, row in enumerate(order)}, together)

    def _hold_alone(self, alone: Mapping[int, Mapping[str, Array]], together: Mapping[str, Array]) -> None:
        """Raises if rows of a batch, by their places, are others than alone."""
        for spec in self._signature.outputs:
            for at, outputs in alone.items():
                got = together[spec.name][at : at + 1]
                difference = describe_difference(spec, outputs[spec.name], got, self._conditions.precision)
                if difference:
                    raise _Mixes(f"output {spec.name!r} of a row changes with its neighbours: {difference}")

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

    def _accepted(self, kinds: Iterable[RowKind], ranges: Mapping[str, IntegerRange]) -> dict[str, Row]:
        """A row of each kind that changes something and that the model accepts; the kinds that it does not are noted."""
        found: dict[str, Row] = {}
        for kind in kinds:
            rows = rows_of_kind(self._signature, kind, self._usual[0], ranges, self._generator)
            accepted = next((row for row in rows if self._accepts(row)), None)
            if accepted is not None:
                found[kind.name] = accepted
            elif rows:
                self.left_out.append(kind.name)
        return found

    def _accepts(self, row: Row) -> bool:
        try:
            self._first_run(row)
        except Exception:
            return False
        return True

    def _mixed(self, kinds: Mapping[str, Row], step: int) -> dict[str, Row]:
        """Rows whose inputs are each of a kind of their own, where the model accepts them; else those given.

        Over all steps below the number of kinds, the first two inputs have each pair of kinds.
        """
        names = list(kinds)
        mixed: dict[str, Row] = {}
        for number, name in enumerate(names):
            row = {
                spec.name: kinds[names[(number + place * step) % len(names)]][spec.name]
                for place, spec in enumerate(self._signature.inputs)
            }
            if self._accepts(row):
                mixed[f"{name} and other"] = row
            else:
                mixed[name] = kinds[name]
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
        """The same in the largest batch that bytes and time allow, beside rows of all kinds at once.

        There, too, usual rows are held against the same alone.
        """
        rows = self._largest()
        while rows > RANDOM_ROWS:
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
            usual = {at: self._number_of(row) for at, row in enumerate(batch)}
            self._hold_alone(
                {at: self._alone_outputs[number] for at, number in usual.items() if number is not None}, first
            )
            self._hold(batch, first, other, places, f"beside others, in a batch of {rows}")
            return

    def _number_of(self, row: Row) -> int | None:
        return next((number for number, usual in enumerate(self._usual) if usual is row), None)

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
            found = row_difference(spec, one[at : at + 1], same[at : at + 1], beside[at : at + 1])
            if found:
                return f"output {spec.name!r} of a row changes with its neighbours: {found}"
    return ""


def _placed(rows: int, places: Mapping[int, Row], others: Sequence[Row]) -> list[Row]:
    filling = cycle(others)
    return [places[place] if place in places else next(filling) for place in range(rows)]
