"""The rate rule as in the study, a reference for the shipping queue: both must do the same work.

It is work-conserving, in order of arrival. If the oldest request has no time for a batch of all
requests that fit, the fewest oldest are dropped, so that the batch that then fits runs at a rate
that the device can sustain.
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
    """Greedy closing, rate-rule shedding, and an admission that refuses infeasible requests."""

    name = "the study's rule"
    SMOOTHING = 32

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        super().__init__(scenario, trace)
        self._gap = math.nan
        self._gaps = 0
        self._last = math.nan
        # By its first request: when each running batch should end.
        self._expected: dict[int, float] = {}

    def put(self, index: int, now: float) -> bool:
        """Refuse requests that are infeasible alone, and more than fit into one deadline."""
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
        """Poll as `Peer` does, and note when the batch should end."""
        step = super().poll(now, device)
        if step.batch:
            line = self.lines[self.trace.keys[step.batch[0]]]
            self._expected[step.batch[0]] = now + line.mean(len(step.batch))
        return step

    def ran(self, batch: Sequence[int], device: int, times: Times, now: float) -> None:
        """Note that the device is free."""
        del self._expected[batch[0]]
        super().ran(batch, device, times, now)

    def drops(self, queue: list[int], line: Line, now: float) -> int:
        """Return how many to drop: the infeasible, then the fewest oldest for a sustainable rate."""
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
        """Close as many as the oldest has time for."""
        return min(len(queue), self._fit(queue[0], line, now)), math.inf

    def _fit(self, index: int, line: Line, now: float) -> int:
        return max(1, min(self.size, line.fits(self.left(index, now))))

    def _sustainable(self, line: Line, index: int) -> float:
        """Return the requests a second of a device that serves each batch's arrivals within the timeout."""
        rate = 1 / self._gap / self.scenario.devices
        timeout = self.trace.deadlines[index] - self.trace.arrivals[index]
        rows = min(self.size, rate * (timeout - line.fixed) / (1 + rate * line.per_row))
        return min(rate, rows / (line.fixed + line.per_row * rows)) if rows > 0 else rate
