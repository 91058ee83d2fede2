"""Comparison of runs of a model: do a row's outputs depend on the other rows of its batch?

There are two comparisons. The first compares a row run alone with the same row in a batch. It finds dependence on the
number of rows and on the position. Kernels may differ, so it tolerates rounding. The second compares a row with the same
row at the same position beside extreme neighbours: huge, tiny, zero, NaN, infinite. It finds dependence on their values,
and rounding explains almost no difference.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from tensorferry.server.onnx.batching.comparison_runs import ComparisonRuns, ComparisonSettings, OutOfTime
from tensorferry.server.onnx.batching.row_kinds import (
    RANDOM_ROWS,
    ROW_KINDS,
    IntegerRange,
    Row,
    RowKind,
    accepted_integers,
    batch_of_rows,
    distinct_rows,
    rows_of,
    rows_of_kind,
    with_vocabulary,
)
from tensorferry.server.runtime.checks.sampling import (
    Array,
    Run,
    as_float64,
    describe_difference,
    working_size,
)
from tensorferry.server.signature import Signature, TensorSpec

# Most draws of random rows until the model accepts enough of them.
_DRAWS = 8
# Limits of the largest batch: bytes of inputs and outputs, and the rows that it has even if they take long.
_MOST_BYTES = 256 * 2**20
_LEAST_LARGE = 8
# The whole check takes as long as running this number of rows, or this time if that is longer.
_MOST_ROWS = 300
_LEAST_SECONDS = 0.1
# Largest rounding of a proved model, as a share of its greatest value.
_AMPLIFIED = 5e-2
# Allowance for outputs that vary from run to run, as a multiple of the observed variation.
_NOISE = 8.0


class ComparisonOutcome(enum.Enum):
    """The result of a comparison."""

    SEPARATE = "rows run together equal rows run alone"
    MIXES = "a row depends on other rows"
    FAILS = "one row runs, but not several together"
    UNSTABLE = "a row gives different outputs from run to run"
    DOES_NOT_RUN = "the model runs on no random input"
    UNFINISHED = "the time did not suffice to compare rows"


@dataclass(frozen=True, slots=True)
class RowComparison:
    """The outcome and its evidence. `reason` is empty if rows are separate, or if the time did not suffice.

    `working_size` is a length of the other dynamic axes with which the model runs; None if none was found. `batches`
    counts the compared batches by number of rows. `left_out` names the kinds of rows that the model rejects. `seconds` has
    the shortest time of one row and of two, by rows.
    """

    outcome: ComparisonOutcome
    reason: str
    working_size: int | None
    batches: Mapping[int, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    seconds: Mapping[int, float] = field(default_factory=dict)

    @property
    def extent(self) -> str:
        """A description of the compared batches."""
        sizes = ", ".join(map(str, sorted(self.batches)))
        out = (
            f"; left out, because the model fails on them: rows of {', '.join(self.left_out)}"
            if self.left_out
            else ""
        )
        return f"{sum(self.batches.values())} batches of {sizes} rows{out}"


class _Ended(Exception):
    """The comparison ended early, with an outcome and its reason."""

    def __init__(self, outcome: ComparisonOutcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def _mixes(reason: str) -> _Ended:
    return _Ended(ComparisonOutcome.MIXES, reason)


def compare_rows(
    signature: Signature,
    run: Run,
    settings: ComparisonSettings,
    first_run: Run | None = None,
    run_alone: Run | None = None,
) -> RowComparison:
    """Compare rows of a model whose signature has a batch axis; never raises.

    `first_run` runs a row of a new kind for the first time, and may limit the time of the run. `run_alone` runs a row for
    the outputs that batches are compared with; it runs the file if `run` runs a changed copy. The default of both is `run`.
    """
    size, reason = working_size(signature, run)
    if size is None:
        return RowComparison(
            ComparisonOutcome.DOES_NOT_RUN,
            f"it does not run on random input ({reason}), so running shows nothing",
            None,
        )
    runs = ComparisonRuns(signature, run, first_run or run, run_alone or run, settings)
    comparer = _RowComparer(signature, runs, settings, size, copied=run_alone is not None)
    outcome, reason = ComparisonOutcome.SEPARATE, ""
    try:
        comparer.compare_random_rows()
        comparer.compare_extreme_rows()
    except _Ended as end:
        outcome, reason = end.outcome, str(end)
    except OutOfTime:
        if settings.thorough:
            outcome = ComparisonOutcome.UNFINISHED
    except Exception as error:
        outcome, reason = ComparisonOutcome.FAILS, f"it runs one row, but not several together ({error})"
    left_out = tuple(dict.fromkeys(comparer.left_out))
    return RowComparison(outcome, reason, size, runs.batches, left_out, runs.seconds)


class _RowComparer:
    """A comparison in progress."""

    def __init__(
        self,
        signature: Signature,
        runs: ComparisonRuns,
        settings: ComparisonSettings,
        size: int,
        *,
        copied: bool,
    ) -> None:
        self._signature = signature
        self._runs = runs
        # Batches in which the rows that were run alone are compared.
        self._orders = ([3, 0, 4, 2, 1], [1, 3], [4, 2, 0], *([[0]] if copied else []))
        self._may_round = not (settings.thorough or copied)
        self._settings = settings
        self._size = size
        self._generator = np.random.default_rng(1)
        self._ends = 0.0
        self._random: list[Row] = []
        self._alone_outputs: list[Mapping[str, Array]] = []
        self._row_seconds = 0.0
        self._row_bytes = 1
        self.left_out: list[str] = []

    def compare_random_rows(self) -> None:
        """Compare random rows run alone with the same rows in batches of several orders and sizes."""
        alone = self._alone_outputs = self._draw_random()
        in_rows = max(_LEAST_SECONDS, _MOST_ROWS * self._row_seconds)
        self._ends = self._settings.clock() + min(self._settings.seconds, in_rows)
        self._check_repeatable(alone[0])
        self._compare_with_alone(self._random, alone)
        if any(spec.datatype.name == "BYTES" for spec in self._signature.inputs):
            for vocabulary in self._settings.vocabularies:
                inputs = with_vocabulary(
                    self._signature, batch_of_rows(self._signature, self._random), vocabulary
                )
                rows = rows_of(self._signature, inputs)
                try:
                    alone = [self._runs.alone(row) for row in rows]
                except Exception:
                    # Some strings of the file may not be for this input.
                    continue
                self._compare_with_alone(rows, alone)

    def _draw_random(self) -> list[Mapping[str, Array]]:
        """Draw random rows until the model accepts enough of them; return the outputs of each run alone."""
        outputs: list[Mapping[str, Array]] = []
        reason = ""
        shared: Row = {}
        for seed in range(_DRAWS):
            for drawn in rows_of(self._signature, distinct_rows(self._signature, self._size, seed)):
                # Inputs without a batch axis are the same in all rows.
                shared = shared or {
                    spec.name: drawn[spec.name] for spec in self._signature.inputs if not spec.has_row_axis
                }
                row = {**drawn, **shared}
                try:
                    outputs.append(self._runs.alone(row))
                except Exception as error:
                    reason = str(error)
                    continue
                self._random.append(row)
                if len(outputs) == 2:
                    # First, because it shows most, and a slow model has time for little else.
                    self._compare_pair(outputs)
                if len(outputs) == RANDOM_ROWS:
                    self._row_seconds = self._runs.seconds[1]
                    self._row_bytes = max(
                        1, sum(array.nbytes for array in (*row.values(), *outputs[0].values()))
                    )
                    return outputs
        reason = f"it runs on few random inputs ({reason}), so running shows nothing"
        raise _Ended(ComparisonOutcome.DOES_NOT_RUN, reason)

    def _compare_pair(self, alone: Sequence[Mapping[str, Array]]) -> None:
        try:
            self._check_alone(self._random, dict(enumerate(alone)), self._run_together(self._random))
        except _Ended:
            # Random outputs always differ.
            with self._runs.without_limit():
                self._check_repeatable(alone[0])
            raise

    def compare_extreme_rows(self) -> None:
        """Compare rows beside extreme rows with the same rows beside random rows."""
        ranges = accepted_integers(self._signature, self._runs.first, self._random[0], self._settings.clock)
        kinds = self._accepted_rows(ROW_KINDS, ranges)
        subjects = [self._random[0], *(kinds[name] for name in ("tiny", "zeros", "spread") if name in kinds)]
        self._compare_large_batch(subjects, kinds)
        if self._settings.thorough:
            self._compare_beside(3, subjects, kinds, at=(0, 2))
        self._compare_all_beside_all([self._random[0], *kinds.values()], kinds)
        redrawn = self._accepted_rows([kind for kind in ROW_KINDS if kind.name in kinds], ranges)
        several = sum(spec.has_row_axis for spec in self._signature.inputs) > 1
        for step in range(1, len(redrawn) if several else 2):
            if self._time_is_up():
                return
            kinds = self._combined_kinds(redrawn, step)
            self._compare_large_batch(list(kinds.values()), kinds)
            subjects = [self._random[step % RANDOM_ROWS], *kinds.values()]
            self._compare_all_beside_all(subjects if step == 1 else subjects[:2], kinds)

    def _compare_all_beside_all(self, subjects: Sequence[Row], kinds: Mapping[str, Row]) -> None:
        """Compare each subject beside each kind of row, in batches of 2 and 3, while time is left."""
        for number, subject in enumerate(subjects):
            others = [subject, subjects[number - 1]]
            for rows, at in ((2, (number % 2,)), (3, (0, 2) if number % 2 else (1,))):
                if self._time_is_up():
                    return
                self._compare_beside(rows, others, kinds, at)

    def _time_is_up(self) -> bool:
        return self._settings.clock() >= self._ends

    def _check_repeatable(self, alone: Mapping[str, Array]) -> None:
        again = self._runs.alone(self._random[0])
        for spec in self._signature.outputs:
            difference = describe_difference(
                spec, alone[spec.name], again[spec.name], self._settings.precision
            )
            if difference:
                reason = f"output {spec.name!r} of one row differs from run to run: {difference}"
                raise _Ended(ComparisonOutcome.UNSTABLE, reason)

    def _compare_with_alone(self, rows: Sequence[Row], alone: Sequence[Mapping[str, Array]]) -> None:
        for order in self._orders:
            batch = [rows[row] for row in order]
            self._check_alone(
                batch, {at: alone[row] for at, row in enumerate(order)}, self._run_together(batch)
            )

    def _check_alone(
        self, batch: Sequence[Row], alone: Mapping[int, Mapping[str, Array]], together: Mapping[str, Array]
    ) -> None:
        """Raise if the outputs of rows, by their positions in a batch, differ from those of the rows run alone."""
        for spec in self._signature.outputs:
            for at, outputs in alone.items():
                got = together[spec.name][at : at + 1]
                difference = describe_difference(spec, outputs[spec.name], got, self._settings.precision)
                if difference and not self._is_rounding(spec, batch, at, outputs[spec.name], got):
                    raise _mixes(f"output {spec.name!r} of a row depends on other rows: {difference}")

    def _is_rounding(
        self, spec: TensorSpec, batch: Sequence[Row], at: int, alone: Array, together: Array
    ) -> bool:
        """Return whether a row of a proved model differs from the row alone by rounding only. Never true of a changed copy.

        Kernels sum in another order for several rows, and some models amplify that. Such a difference is the same beside
        other rows, such as copies of the row.
        """
        if not self._may_round or describe_difference(spec, alone, together, _AMPLIFIED):
            return False
        with self._runs.without_limit():
            beside = self._run_together([batch[at]] * len(batch))
        return np.array_equal(beside[spec.name][at : at + 1], together, equal_nan=True)

    def _run_together(self, rows: Sequence[Row]) -> Mapping[str, Array]:
        outputs = self._runs.together(batch_of_rows(self._signature, rows))
        for spec in self._signature.outputs:
            shape = outputs[spec.name].shape
            if shape[:1] != (len(rows),):
                raise _mixes(
                    f"output {spec.name!r} has shape {list(shape)} for {len(rows)} rows: it does not follow the "
                    "batch axis"
                )
        self._runs.compared(len(rows))
        return outputs

    def _accepted_rows(self, kinds: Iterable[RowKind], ranges: Mapping[str, IntegerRange]) -> dict[str, Row]:
        """Return an accepted row of each kind that changes an input; record the kinds that the model rejects."""
        found: dict[str, Row] = {}
        for kind in kinds:
            rows = rows_of_kind(self._signature, kind, self._random[0], ranges, self._generator)
            accepted = next((row for row in rows if self._accepts(row)), None)
            if accepted is not None:
                found[kind.name] = accepted
            elif rows:
                self.left_out.append(kind.name)
        return found

    def _accepts(self, row: Row) -> bool:
        try:
            self._runs.first(row)
        except Exception:
            return False
        return True

    def _combined_kinds(self, kinds: Mapping[str, Row], step: int) -> dict[str, Row]:
        """Return rows whose inputs have different kinds, if the model accepts them; else the given rows.

        Over all steps below the number of kinds, the first two inputs have every pair of kinds.
        """
        names = list(kinds)
        combined: dict[str, Row] = {}
        for number, name in enumerate(names):
            row = {
                spec.name: kinds[names[(number + position * step) % len(names)]][spec.name]
                for position, spec in enumerate(self._signature.inputs)
            }
            if self._accepts(row):
                combined[f"{name} and other"] = row
            else:
                combined[name] = kinds[name]
        return combined

    def _compare_beside(
        self, rows: int, subjects: Sequence[Row], kinds: Mapping[str, Row], at: Sequence[int]
    ) -> None:
        """Compare the subjects, at the positions `at`, beside each kind of row with the same beside random rows."""
        positions = {position: subjects[number % len(subjects)] for number, position in enumerate(at)}
        batch = _batch(rows, positions, self._random[1:])
        first = self._run_together(batch)
        for name, row in {**kinds, "equal": positions[at[0]]}.items():
            other = self._run_together(_batch(rows, positions, [row]))
            self._check(batch, first, other, positions, f"beside {name} rows, in a batch of {rows}")

    def _compare_large_batch(self, subjects: Sequence[Row], kinds: Mapping[str, Row]) -> None:
        """Compare in the largest batch that bytes and time allow, beside rows of all kinds.

        Random rows are also compared with the same rows run alone.
        """
        rows = self._largest()
        while rows > RANDOM_ROWS:
            positions = {position: subjects[position // 2 % len(subjects)] for position in range(0, rows, 2)}
            batch = _batch(rows, positions, self._random[1:])
            try:
                first = self._run_together(batch)
                other = self._run_together(_batch(rows, positions, list(kinds.values()) or self._random))
            except _Ended:
                raise
            except Exception:
                # The batch may be too large for the device or a table in the model.
                rows //= 2
                continue
            random = list(zip(self._random, self._alone_outputs, strict=True))
            alone = {at: outputs for at, row in enumerate(batch) for known, outputs in random if known is row}
            self._check_alone(batch, alone, first)
            self._check(batch, first, other, positions, f"beside others, in a batch of {rows}")
            return

    def _largest(self) -> int:
        left = self._ends - self._settings.clock()
        most = self._settings.max_batch_size
        in_time = int(left / (2 * self._row_seconds)) if self._row_seconds else most
        by_bytes = _MOST_BYTES // self._row_bytes
        return min(most, by_bytes, max(_LEAST_LARGE, in_time))

    def _check(
        self,
        batch: Sequence[Row],
        first: Mapping[str, Array],
        other: Mapping[str, Array],
        positions: Iterable[int],
        where: str,
    ) -> None:
        """Raise if rows at these positions differ between `other` and `first`, the outputs of `batch`."""
        if not _difference_at(self._signature, first, first, other, positions):
            return
        # The variation between runs is measured only here, because most devices compute the same each time.
        with self._runs.without_limit():
            again = self._run_together(batch)
        found = _difference_at(self._signature, first, again, other, positions)
        if found:
            raise _mixes(f"{found} ({where})")


def _difference_at(
    signature: Signature,
    first: Mapping[str, Array],
    again: Mapping[str, Array],
    other: Mapping[str, Array],
    positions: Iterable[int],
) -> str:
    for spec in signature.outputs:
        one, same, beside = (outputs[spec.name] for outputs in (first, again, other))
        for at in positions:
            found = _row_difference(spec, one[at : at + 1], same[at : at + 1], beside[at : at + 1])
            if found:
                return f"output {spec.name!r} of a row depends on other rows: {found}"
    return ""


def _row_difference(spec: TensorSpec, first: Array, again: Array, other: Array) -> str:
    """Return how a row's output depends on the other rows; "" if it does not.

    All three are outputs of the row at the same position in batches of one size: `first` and `again` of the same batch,
    `other` with different neighbours. The kernels are the same, so rounding explains almost no difference. The tolerance
    is relative to this row's magnitude, not to that of the batch.
    """
    if np.array_equal(first, other):
        return ""
    noise = 0.0
    if spec.is_float and first.shape == again.shape:
        a, b = (as_float64(array, spec) for array in (first, again))
        finite = np.isfinite(a) & np.isfinite(b)
        noise = float(np.abs(a[finite] - b[finite]).max()) if finite.any() else 0.0
    return describe_difference(spec, first, other, least_scale=0.0, noise=_NOISE * noise)


def _batch(rows: int, positions: Mapping[int, Row], others: Sequence[Row]) -> list[Row]:
    """Return a batch with the given rows at their positions, filled with others in turn."""
    filling = cycle(others)
    return [positions[at] if at in positions else next(filling) for at in range(rows)]
