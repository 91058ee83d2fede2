"""The batch size that pays: the smallest whose time per row is about the best, learned from batches of one bucket.

Larger batches only delay. Where the time per row rises with the rows, as of convolutions on a CPU, they also make a server
bistable. Once a queue has formed, batches grow. The capacity then falls below the load, and the queue never drains.

The size decides which batches run, and so what is measured. Therefore other sizes are tried at times, if the queue has
the rows. Only sizes that ran are compared: a time that is guessed from a line may look better than any.

Devices change their speed, by their clock or by other work of the machine, and a size that seldom runs would be compared with
others at another speed. So a time is the product of two numbers: the cost of a row in a batch of this size, and the speed.
The batches that run most say what the speed is, and the others what their size costs at that speed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import NamedTuple

# The size is the smallest whose time per row is within this factor of the best ...
_NEAR_BEST = 1.03
# ... if the largest takes more than this factor of the best. Else noise would choose the size.
_WORTH = 1.05
# What a batch costs beside its measured times, in seconds. It matters for models that are faster than that only.
_OVERHEAD_SECONDS = 100e-6
# Trials of all sizes together take about this share of the time; each size has an equal part of it.
_TRIAL_SHARE = 0.002
# A size is tried sooner each time that the time of learning has doubled, from `_EARLY_SECONDS` on, because the first batches
# may have run on a busy machine. What such a trial is expected to lose is at most `_EARLY_SHARE` of the time since the last
# one of this size, and its time per row at most `_FAR` times the usual one. No size of more than `_EARLY_ROWS` times the
# usual rows is tried early, because requests wait behind it.
_EARLY_SECONDS, _EARLY_SHARE, _EARLY_ROWS, _FAR = 1.0, 0.006, 4, 3.0
# A size whose time per row is at most `_NEAR` times the usual one is tried at once until it has `_SAMPLES_WANTED` samples.
# Afterwards it is tried as often as costs `_TRIAL_SHARE` of the time: it may be the best, and trials cost little.
_SAMPLES_WANTED, _NEAR = 3, 1.25
# Before the first trial, this many batches run, or as many as take this long. Between two trials, at least one usual batch
# runs, and usual batches for `_TIMES_BETWEEN` times as long as the trial took.
_FIRST_BATCHES, _FIRST_SECONDS, _TIMES_BETWEEN = 32, 2.0, 4
# A size below the usual one runs this often in a row, and the last run counts. The first run shares the processor with the
# answers of the larger batch before it.
_RUNS_OF_SMALLER = 2
# A size is tried only if the first deadline is this many usual batches later than the queue needs.
_BATCHES_TO_SPARE = 2
# A cost is a mean over about this many batches. A sample that differs from it by more than the factor `_DEVIATION` counts as
# one that differs by it. If `_CHANGED_RUN` such samples come in a row, the speed has changed, and the last one says what it is.
_MEAN_OF, _DEVIATION, _CHANGED_RUN = 8, 1.25, 3
# The share of a sample in the speed; and a change of speed after which all costs are learned again, because the curve may be
# another.
_SPEED_SHARE, _ANOTHER_CURVE = 0.25, 4.0


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return the batch sizes 1, 2, 4, ... and `most`."""
    return tuple(sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}))


class _Size(NamedTuple):
    """What is known of a batch size: the mean cost of a row, the number of samples, and when the last one ran.

    A row takes `cost` times `PayingRows._speed` seconds.
    """

    cost: float
    samples: int
    ran: float


_NEW = _Size(0.0, 0, 0.0)


def full_batch_rows(row_seconds: Mapping[int, float], worth: float = _WORTH) -> int | None:
    """Return the rows of a full batch, by the seconds per row of sizes: the smallest that is about the best.

    None if the largest size takes at most `worth` times as long as the best for a row, so that no smaller one pays.
    """
    best = min(row_seconds.values())
    if row_seconds[max(row_seconds)] <= worth * best:
        return None
    return min([size for size, seconds in row_seconds.items() if seconds <= _NEAR_BEST * best])


class PayingRows:
    """Learns the batch size that pays. Sizes are the powers of two and the maximum; others count as the nearest.

    Not thread-safe: the owner's lock guards it.
    """

    __slots__ = (
        "_began",
        "_began_speed",
        "_run",
        "_runs_left",
        "_seen",
        "_sizes",
        "_speed",
        "_trial_at",
        "rows",
        "trial",
    )

    def __init__(self, max_batch_size: int) -> None:
        self._sizes = powers_of_two(max_batch_size)
        self._seen: dict[int, _Size] = {}
        # Samples in a row that were longer (positive) or shorter (negative) than expected by `_DEVIATION`.
        self._run = 0
        # In seconds per cost: now, and when all costs began to be learned.
        self._speed = self._began_speed = 1.0
        # No size is tried before this time; inf until a batch ran.
        self._trial_at = math.inf
        # When the first batch ran, or all costs began to be learned again.
        self._began = 0.0
        # The size that pays; the maximum while nothing else is known.
        self.rows = max_batch_size
        # The size that is being tried, 0 for none, and how many of its batches have not been answered.
        self.trial = self._runs_left = 0

    def observe(self, rows: int, seconds: float, now: float) -> None:
        """Learn a batch of `rows` rows that delayed the next one by `seconds`."""
        if not seconds:
            return
        size, row_seconds = self._nearest(rows), (seconds + _OVERHEAD_SECONDS) / rows
        if size == self.trial and self._runs_left > 1:
            return
        if self._trial_at == math.inf:
            self._trial_at = now + min(_FIRST_BATCHES * seconds, _FIRST_SECONDS)
            self._began = now
            self._speed = self._began_speed = row_seconds
        known = self._seen.get(size, _NEW)
        cost = row_seconds / self._speed
        if size != self.trial:
            self._count_run(cost, known)
            if known.samples == _MEAN_OF:
                self._learn_speed(cost / known.cost, now)
                # The cost itself stays, because the same change cannot count twice.
                cost = known.cost
        self._seen[size] = _learned(known, cost, now)
        self.rows = self._best()

    def _count_run(self, cost: float, known: _Size) -> None:
        side = (cost > known.cost * _DEVIATION) - (cost * _DEVIATION < known.cost) if known.samples else 0
        self._run = self._run + side if self._run * side > 0 else side

    def _learn_speed(self, factor: float, now: float) -> None:
        """Learn the speed of a batch that took `factor` times as long as expected."""
        if abs(self._run) >= _CHANGED_RUN:
            self._speed *= factor
            self._run = 0
        else:
            self._speed *= _bounded(factor) ** _SPEED_SHARE
        if not 1 / _ANOTHER_CURVE <= self._speed / self._began_speed <= _ANOTHER_CURVE:
            self._seen.clear()
            self._began_speed = self._speed
            self._trial_at = self._began = now

    def _nearest(self, rows: int) -> int:
        """Return the size that a batch of `rows` rows counts as: the nearest, by ratio."""
        at = bisect_left(self._sizes, rows)
        if at == len(self._sizes):
            return self._sizes[-1]
        if at and rows * rows < self._sizes[at] * self._sizes[at - 1]:
            at -= 1
        return self._sizes[at]

    def _best(self) -> int:
        """Return the smallest size that is about the best; the maximum unless a smaller one is worth it."""
        capped = self.rows < self._sizes[-1]
        times = self.row_seconds
        if not capped:
            # Few samples may all have been delayed, so the largest size must have several.
            often = max(
                [size for size, seen in self._seen.items() if seen.samples >= _SAMPLES_WANTED], default=0
            )
            times = {size: seconds for size, seconds in times.items() if size <= often}
        if not times:
            return self.rows
        # That the largest known size is the best says something of larger ones only if it is larger than now.
        return full_batch_rows(times, _NEAR_BEST if capped else _WORTH) or (
            self._sizes[-1] if max(times) > self.rows else self.rows
        )

    @property
    def row_seconds(self) -> Mapping[int, float]:
        """The seconds per row by size, of those that ran."""
        return {size: seen.cost * self._speed for size, seen in self._seen.items()}

    def next_rows(self, queued: int, slack: float, now: float, expected: Callable[[int], float]) -> int:
        """Return the most rows of the next batch, while `queued` rows are queued: the size that pays, or one to try.

        The first deadline of the queued rows is `slack` seconds away. `expected` returns the seconds of a batch by its
        rows; a size that has not run is judged by it.
        """
        self._runs_left -= 1
        goes_on = self._runs_left > 0 and queued >= self.trial
        tried, self.trial = self.trial, 0
        if not goes_on and now < self._trial_at:
            return self.rows
        usual = self._nearest(min(self.rows, queued))
        seen = self._seen.get(usual)
        if seen is None:
            return self.rows
        usual_seconds = seen.cost * self._speed * usual
        # A trial must not make requests late, which wait behind it.
        has_time = slack >= (queued / usual + _BATCHES_TO_SPARE) * usual_seconds
        if goes_on:
            self.trial = tried if has_time else 0
            return self.trial or self.rows
        self._trial_at = now + _TIMES_BETWEEN * usual_seconds
        if has_time:
            self.trial = self._size_to_try(queued, usual, now, expected)
        if self.trial:
            self._runs_left = _runs(self.trial, usual)
            self._trial_at = now + max(usual_seconds, _TIMES_BETWEEN * self._runs_left * expected(self.trial))
        return self.trial or self.rows

    def _size_to_try(self, queued: int, usual: int, now: float, expected: Callable[[int], float]) -> int:
        """Return the size, of those due to be tried in place of the usual one, that ran the longest ago; 0 for none."""
        row_seconds, usual_row_seconds = self.row_seconds, self._seen[usual].cost * self._speed
        due: dict[int, float] = {}
        for size in self._sizes:
            if size > queued:
                break
            if size == usual:
                continue
            _, samples, ran = self._seen.get(size) or _Size(0.0, 0, self._began)
            seconds = row_seconds.get(size) or expected(size) / size
            unsure = not samples or (samples < _SAMPLES_WANTED and seconds > _FAR * usual_row_seconds)
            if unsure and size < usual:
                seconds = min(seconds, self._larger_seconds(size))
            rows = size * _runs(size, usual)
            pause = seconds * rows * len(self._sizes) / _TRIAL_SHARE
            loss = (seconds - usual_row_seconds) * rows
            if size <= _EARLY_ROWS * usual:
                if seconds <= _NEAR * usual_row_seconds:
                    pause = max(loss / _TRIAL_SHARE, _EARLY_SECONDS) if samples >= _SAMPLES_WANTED else 0.0
                elif seconds <= _FAR * usual_row_seconds:
                    pause = min(pause, max(ran - self._began, loss / _EARLY_SHARE, _EARLY_SECONDS))
            if now >= ran + pause:
                due[size] = ran
        return min(due, key=due.__getitem__, default=0)

    def _larger_seconds(self, size: int) -> float:
        """Return the seconds per row of the next larger size; inf if unknown. A size of which little is known is judged by it.

        Where only large batches have run, the learned curve says far too long for small ones. And the first batches of a burst
        are small, and share the processor with the arrival of all others. If a row takes no longer than in the larger size,
        the smaller one pays; a trial that shows the contrary costs no more than one batch of the larger.
        """
        larger = self._seen.get(self._sizes[self._sizes.index(size) + 1])
        return math.inf if larger is None else larger.cost * self._speed


def _runs(size: int, usual: int) -> int:
    """Return how often a size runs in one trial."""
    return _RUNS_OF_SMALLER if size < usual else 1


def _learned(known: _Size, cost: float, now: float) -> _Size:
    """Return what is known of a size after another sample."""
    if not known.samples or (known.samples < _MEAN_OF and cost * _DEVIATION < known.cost):
        # Chance delays a batch and does not hasten it, so the samples before were delayed.
        return _Size(cost, 1, now)
    if known.samples >= _SAMPLES_WANTED:
        cost = known.cost * _bounded(cost / known.cost)
    samples = min(known.samples + 1, _MEAN_OF)
    return _Size(known.cost + (cost - known.cost) / samples, samples, now)


def _bounded(factor: float) -> float:
    return min(max(factor, 1 / _DEVIATION), _DEVIATION)
