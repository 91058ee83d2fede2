"""Layouts of the cores: how many sessions, of how many threads each, carry the most rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tensorferry.server.runtime.checks.sampling import Array, Run

# Each session has its own copy of the weights.
_MOST_SESSIONS = 8
# Each layout is measured this often, in turn with the others, because other programs may use the cores for a while.
_ROUNDS = 3
# A layout runs at least this long in a round, and each of its sessions at least this many batches.
_LEAST_SECONDS, _LEAST_BATCHES = 0.3, 2
_RUNS_ALONE = 3
# A layout is better than one session if it carries more by this factor, because a row alone takes longer in it.
_WORTH = 1.1
LAYOUT_RULE = "10 %"


@dataclass(frozen=True, slots=True)
class Layout:
    """Some sessions, each with some threads."""

    sessions: int
    threads: int


@dataclass(frozen=True, slots=True)
class LayoutTime:
    """What a layout carries if each of its sessions runs batches of `rows` rows without a gap.

    `rows_per_second` is the sum over the sessions. `alone_seconds` is the time of one row while the others are idle. Both
    are medians of the rounds.
    """

    sessions: int
    threads: int
    rows: int
    rows_per_second: float
    alone_seconds: float

    @property
    def ms_alone(self) -> float:
        """The milliseconds of one row while the other sessions are idle."""
        return self.alone_seconds * 1e3


def layouts_of(cores: int) -> tuple[Layout, ...]:
    """Return the layouts to compare: one session with all cores, then two, four and so on. Empty with one core."""
    counts = [1 << power for power in range(min(cores, _MOST_SESSIONS).bit_length())]
    return tuple(Layout(count, cores // count) for count in counts) if cores > 1 else ()


def time_layouts(
    layouts: Sequence[Layout],
    runs_of: Callable[[Layout], Sequence[Run]],
    rows: int,
    inputs_of: Callable[[int], Mapping[str, Array]],
    may_go_on: Callable[[], bool],
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[LayoutTime]:
    """Measure the layouts with batches of `rows` rows; yield those that were measured, in the given order.

    `runs_of` makes the sessions of a layout and returns the run of each. Nothing more is measured after `may_go_on`
    returned False. Raises what `runs_of` and the runs raise.
    """
    batch, one = inputs_of(rows), inputs_of(1)
    measured: dict[Layout, list[tuple[float, float]]] = {layout: [] for layout in layouts}
    for _ in range(_ROUNDS):
        for layout, found in measured.items():
            if may_go_on():
                found.append(_time_layout(runs_of(layout), rows, batch, one, clock))
    for layout, found in measured.items():
        if found:
            rates, alone = zip(*found, strict=True)
            yield LayoutTime(
                layout.sessions, layout.threads, rows, statistics.median(rates), statistics.median(alone)
            )


def better_layout(times: Sequence[LayoutTime]) -> LayoutTime | None:
    """Return the layout that carries clearly more rows than one session, which is first; None if none does."""
    best = max(times, key=lambda each: each.rows_per_second, default=None)
    return best if best is not None and best.rows_per_second >= _WORTH * times[0].rows_per_second else None


def _time_layout(
    runs: Sequence[Run],
    rows: int,
    batch: Mapping[str, Array],
    one: Mapping[str, Array],
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Return the rows per second of all sessions together, and the seconds of one row in one of them."""
    for run in runs:
        # The first runs of a size are slower, because memory is allocated.
        run(batch)
    runs[0](one)
    alone = []
    for _ in range(_RUNS_ALONE):
        began = clock()
        runs[0](one)
        alone.append(clock() - began)

    def rate(run: Run) -> float:
        done, began = 0, clock()
        while (took := clock() - began) < _LEAST_SECONDS or done < _LEAST_BATCHES:
            run(batch)
            done += 1
        return done * rows / took

    with ThreadPoolExecutor(len(runs), "session") as sessions:
        return sum(sessions.map(rate, runs)), statistics.median(alone)
