"""The runs of a comparison of rows: timed, counted, within the budget of the load, and with a time limit."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.checks.sampling import Array, Run
from tensorferry.server.runtime.session import Session
from tensorferry.server.signature import Signature


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """Settings of a comparison: batch size, values, tolerance and time limit.

    `max_batch_size` is the largest batch. `vocabularies` are lists of strings from the model's file. `precision` is the
    device's relative precision, if it is worse than the outputs' datatypes. After `seconds`, only the minimum is run:
    one draw of each kind of row, all in one batch, and if `thorough`, each kind in its own batch. When `budget` is used up,
    the comparison ends; it is then unfinished, unless it is not `thorough` and two rows were compared.
    """

    max_batch_size: int = 32
    vocabularies: Sequence[Sequence[str]] = ()
    precision: float = 0.0
    seconds: float = 1.0
    thorough: bool = True
    clock: Callable[[], float] = time.perf_counter
    budget: LoadBudget = field(default_factory=partial(LoadBudget, math.inf))


class OutOfTime(BaseException):
    """The budget is used up. No `except Exception`, which takes failed runs for an answer, goes on with it."""


class ComparisonRuns:
    """Runs a model for a comparison. `first_run` and `run_alone` are as in `compare_rows`.

    A run raises OutOfTime if a batch was compared, and the budget allows no more. `batches` counts the compared batches by
    number of rows, and `seconds` has the shortest time of one row and of two, by rows.
    """

    def __init__(
        self, signature: Signature, run: Run, first_run: Run, run_alone: Run, settings: ComparisonSettings
    ) -> None:
        self._signature = signature
        self._together, self._first, self._alone = run, first_run, run_alone
        self._settings = settings
        self._limited = True
        self.batches: dict[int, int] = {}
        self.seconds: dict[int, float] = {}

    def together(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a batch."""
        return self._run(self._together, inputs)

    def first(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a row of a new kind for the first time."""
        return self._run(self._first, inputs)

    def alone(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a row for the outputs that batches are compared with."""
        return self._run(self._alone, inputs)

    def compared(self, rows: int) -> None:
        """Count a batch of this many rows."""
        self.batches[rows] = self.batches.get(rows, 0) + 1

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """Ignore the budget: a difference was found, and must be explained however long that takes."""
        self._limited = False
        try:
            yield
        finally:
            self._limited = True

    def _run(self, run: Run, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        rows = next(len(inputs[spec.name]) for spec in self._signature.inputs if spec.has_row_axis)
        settings, limited = self._settings, self._limited and self.batches
        if limited and not settings.budget.allows(rows, needed=settings.thorough):
            raise OutOfTime
        began = settings.clock()
        outputs = run(inputs)
        took = settings.clock() - began
        if rows <= 2:
            self.seconds[rows] = min(took, self.seconds.get(rows, took))
        if rows == 1:
            settings.budget.row_took(took)
        return outputs


def with_time_limit(run: Run, session: Session, seconds: float) -> Run:
    """Return `run`, which uses the session, with a time limit: a longer run is terminated and raises.

    A loop in a model may never end on unusual values such as NaN.
    """

    def limited_run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        timer = threading.Timer(seconds, session.end_runs)
        timer.name = "tensorferry-batching-check"
        timer.start()
        try:
            return run(inputs)
        finally:
            timer.cancel()
            timer.join()
            session.allow_runs()

    return limited_run
