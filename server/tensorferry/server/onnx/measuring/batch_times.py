"""Times and memory of batches of several sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.onnx.measuring.memory_growth import GpuMemory, ResidentMemory
from tensorferry.server.runtime.checks.sampling import Array, Run
from tensorferry.server.runtime.host_memory import GrowthCheck
from tensorferry.server.runtime.ort import ort_message

# A size is run until both are reached, and at most this often.
_LEAST_RUNS, _LEAST_SECONDS = 5, 0.3
_MOST_RUNS = 10_000
# Of a batch that takes longer than a second, fewer runs are made.
_LONG_SECONDS, _LONG_RUNS = 1.0, 3


@dataclass(frozen=True, slots=True)
class BatchTime:
    """The median time of a batch of `rows` rows over `runs` runs.

    `memory_bytes` is what the model has taken since it was loaded; None if that is unknown.
    """

    rows: int
    seconds: float
    runs: int
    memory_bytes: int | None = None

    @property
    def ms(self) -> float:
        """The milliseconds of the batch."""
        return self.seconds * 1e3

    @property
    def ms_per_row(self) -> float:
        """The milliseconds of the batch for each of its rows."""
        return self.ms / self.rows

    @property
    def rows_per_second(self) -> float:
        """Rows that are done in a second if batches follow each other without a gap."""
        return self.rows / self.seconds


def time_batches(
    run: Run,
    inputs_of: Callable[[int], Mapping[str, Array]],
    sizes: Sequence[int],
    measured: Callable[[BatchTime], None],
    *,
    memory: ResidentMemory | GpuMemory | None,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Time batches of the sizes, which ascend; call `measured` for each. Return why it ended early, "" if it did not.

    It ends before a size for which the time, predicted from that of the size before, or the memory is not enough. All
    sizes together may take `seconds`.
    """
    began = clock()
    room = GrowthCheck()
    last: BatchTime | None = None
    for rows in sizes:
        if last is not None:
            expected = last.seconds * rows / last.rows
            runs = 1 + (_LONG_RUNS if expected > _LONG_SECONDS else _LEAST_RUNS)
            if clock() - began + runs * expected > seconds:
                return f"a batch of {rows} rows takes about {expected:.1f} s, and all sizes may take {seconds:g} s"
        try:
            room.check(f"a batch of {rows} rows", "give smaller --sizes")
            if memory is not None:
                memory.start()
            median, runs = _timed(run, inputs_of(rows), clock)
        except (ModelFailedError, StartError) as error:
            # The error is for clients; its cause has more.
            reason = ort_message(error.__cause__) if isinstance(error.__cause__, Exception) else str(error)
            return f"a batch of {rows} rows: {reason}"
        last = BatchTime(rows, median, runs, None if memory is None else memory.bytes())
        measured(last)
    return ""


def _timed(run: Run, inputs: Mapping[str, Array], clock: Callable[[], float]) -> tuple[float, int]:
    """Return the median of several runs, and their number."""

    def one_run() -> float:
        started = clock()
        run(inputs)
        return clock() - started

    # The first runs of a size are slower, because memory is allocated.
    least = _LONG_RUNS if one_run() > _LONG_SECONDS else _LEAST_RUNS
    if least == _LEAST_RUNS:
        one_run()
    times: list[float] = []
    began = clock()
    while len(times) < least or (clock() - began < _LEAST_SECONDS and len(times) < _MOST_RUNS):
        times.append(one_run())
    return statistics.median(times), len(times)
