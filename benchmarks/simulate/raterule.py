"""The rate rule as the study wrote it, against which the shipping queue is held: both must do the same work.

Work-conserving, in order of arrival. When the oldest request has no time for a batch of all that
could ride, the fewest oldest are dropped such that the batch that then fits runs at a rate that
the device can sustain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from costs import Line
from engine import Step, Times
from policies import Peer
from scenarios import Scenario
from traces import Trace


class StudysRule(Peer):
    """Greedy closing, rate-rule shedding, and a door that refuses what cannot be answered in time."""

    name = "the study's rule"
    SMOOTHING = 32

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        super().__init__(scenario, trace)
        self._gap = math.nan
        self._gaps = 0
        self._last = math.nan
        # When each running batch, named by its first request, is expected to be over.
        self._expected: dict[int, float] = {}

    def put(self, index: int, now: float) -> bool:
        """Refuses what could not even make it alone, and more than a deadline's worth of requests."""
        self._observe(now)
        line = self.lines[self.trace.keys[index]]
        devices = self.scenario.devices
        free = min(self._expected.values()) if len(self._expected) == devices else now
        timeout = self.left(index, now)
        bound = devices * self.size * timeout / line.mean(self.size) + self.size
        if free + line.padded(1) > now + timeout or self.queued() >= bound:
            return False
        return super().put(index, now)

    def _observe(self, now: float) -> None:
        gap = now - self._last
        if gap == gap:
            self._gap = (
                self._gap + (gap - self._gap) / min(self.SMOOTHING, self._gaps + 1) if self._gaps else gap
            )
            self._gaps += 1
        self._last = now

    def poll(self, now: float, device: int | None) -> Step:
        """As any peer, and notes when the batch is expected to be over."""
        step = super().poll(now, device)
        if step.batch:
            line = self.lines[self.trace.keys[step.batch[0]]]
            self._expected[step.batch[0]] = now + line.mean(len(step.batch))
        return step

    def ran(self, batch: Sequence[int], device: int, times: Times, now: float) -> None:
        """The device is free again."""
        del self._expected[batch[0]]
        super().ran(batch, device, times, now)

    def drops(self, queue: list[int], line: Line, now: float) -> int:
        """The infeasible, then the fewest oldest for a sustainable rate."""
        start = next(
            (n for n, index in enumerate(queue) if line.padded(1) <= self.left(index, now)), len(queue)
        )
        waiting = len(queue) - start
        if not waiting or not self._gaps or self._fit(queue[start], line, now) >= min(waiting, self.size):
            return start
        sustainable = self._sustainable(line, queue[start])
        best_rate, best = -1.0, start
        for gone in range(start, len(queue)):
            rows = min(len(queue) - gone, self._fit(queue[gone], line, now))
            rate = rows / line.mean(rows)
            if rate > best_rate + 1e-9:
                best_rate, best = rate, gone
            if rate >= sustainable or rows >= min(len(queue) - gone, self.size):
                break
        return best

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """As many as the oldest has time for."""
        return min(len(queue), self._fit(queue[0], line, now)), math.inf

    def _fit(self, index: int, line: Line, now: float) -> int:
        return max(1, min(self.size, line.fits(self.left(index, now))))

    def _sustainable(self, line: Line, index: int) -> float:
        """Requests a second of a device that serves each batch's arrivals within the timeout."""
        rate = 1 / self._gap / self.scenario.devices
        timeout = self.trace.deadlines[index] - self.trace.arrivals[index]
        rows = min(self.size, rate * (timeout - line.fixed) / (1 + rate * line.per_row))
        return min(rate, rows / (line.fixed + line.per_row * rows)) if rows > 0 else rate
