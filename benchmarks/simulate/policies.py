"""The peers' rules, written after their sources and papers, on one common queue.

Only closing and shedding rules are modelled, without the peers' overheads.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from costs import Line
from engine import Step, Times
from scenarios import Scenario
from traces import Trace


class Peer:
    """A queue by buckets, the bucket of the oldest request first. Greedy: takes all, drops none."""

    name: ClassVar[str] = "greedy"
    polls_busy: ClassVar[bool] = False
    in_flight: ClassVar[int] = 1
    # Within a bucket the earliest deadline is first, not the oldest request.
    by_deadline: ClassVar[bool] = False

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        self.scenario = scenario
        self.trace = trace
        self.size = scenario.max_batch_size
        self.lines = [Line() for _ in scenario.buckets]
        self._queues: list[list[int]] = [[] for _ in scenario.buckets]

    def anchor(self, key: int, rows: int, seconds: float) -> None:
        """Add a warm-up run of a bucket."""
        self.lines[key].anchor(rows, seconds)

    def put(self, index: int, now: float) -> bool:
        """Queue a request; all are accepted."""
        queue = self._queues[self.trace.keys[index]]
        if self.by_deadline:
            bisect.insort(queue, index, key=self.trace.deadlines.__getitem__)
        else:
            queue.append(index)
        return True

    def released(self, device: int, now: float) -> None:
        """Do nothing: peers do not prepare batches just in time."""

    def ran(self, batch: Sequence[int], device: int, times: Times, now: float) -> None:
        """Learn the time of a batch."""
        self.lines[self.trace.keys[batch[0]]].observe(len(batch), sum(times))

    def poll(self, now: float, device: int | None) -> Step:
        """Drop and close in the bucket whose first request is the oldest."""
        dropped: list[int] = []
        waiting = [key for key, queue in enumerate(self._queues) if queue]
        until = math.inf
        for key in sorted(waiting, key=lambda key: self._queues[key][0]):
            queue = self._queues[key]
            gone = self.drops(queue, self.lines[key], now)
            dropped += queue[:gone]
            del queue[:gone]
            if not queue:
                continue
            rows, again = self.closes(queue, self.lines[key], now, device is not None)
            if rows:
                batch = queue[:rows]
                del queue[:rows]
                return Step(batch, dropped)
            until = min(until, again)
        return Step((), dropped, until)

    def queued(self) -> int:
        """Return the number of queued requests."""
        return sum(map(len, self._queues))

    def drops(self, queue: list[int], line: Line, now: float) -> int:
        """Return how many requests to drop from the front of a bucket's queue."""
        return 0

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """Return the rows of a batch to close now, or 0 and until when to wait. The queue is never empty."""
        return min(len(queue), self.size), math.inf

    def left(self, index: int, now: float) -> float:
        """Return the time to a request's deadline."""
        return self.trace.deadlines[index] - now


class DropExpired(Peer):
    """Greedy, and drops expired requests."""

    name = "greedy + drop expired"

    def drops(self, queue: list[int], line: Line, now: float) -> int:
        """Return the number of expired requests at the front."""
        return next((n for n, index in enumerate(queue) if self.left(index, now) > 0), len(queue))


class TwoEager(Peer):
    """Two instances on each device; each takes all queued requests when it is free."""

    name = "two eager instances"
    in_flight = 2


class FourEager(Peer):
    """Four instances on each device."""

    name = "four eager instances"
    in_flight = 4


class StrictPriority(Peer):
    """Triton's priority levels: lower classes get what higher ones leave; expired requests are dropped.

    A batch takes from a bucket's classes in their order.
    """

    name = "strict priority"

    def put(self, index: int, now: float) -> bool:
        """Queue a request behind those of its class."""
        bisect.insort(self._queues[self.trace.keys[index]], index, key=self._order)
        return True

    def _order(self, index: int) -> tuple[int, int]:
        return (self.trace.levels[index] if self.trace.levels else 0), index

    def poll(self, now: float, device: int | None) -> Step:
        """Drop all expired requests, then take the bucket whose first request has the highest class."""
        dropped: list[int] = []
        for queue in self._queues:
            expired = [index for index in queue if self.left(index, now) <= 0]
            if expired:
                dropped += expired
                queue[:] = [index for index in queue if self.left(index, now) > 0]
        waiting = [queue for queue in self._queues if queue]
        if not waiting:
            return Step((), dropped)
        queue = min(waiting, key=lambda queue: self._order(queue[0]))
        batch = queue[: self.size]
        del queue[: self.size]
        return Step(batch, dropped)


class WindowFromArrival(Peer):
    """A batch is closed when it is full or its oldest request has waited for the window."""

    name = "window from arrival"

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """Close when full, or when the window is over."""
        end = self.trace.arrivals[queue[0]] + self.scenario.window
        if len(queue) >= self.size or now >= end:
            return min(len(queue), self.size), math.inf
        return 0, end


class WindowFromPop(Peer):
    """The loop of many tutorials: a free worker pops one request, then collects for the window."""

    name = "window from pop"

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        super().__init__(scenario, trace)
        # When the collecting worker popped each bucket's first request; one collects at a time.
        self._popped: dict[int, float] = {}

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """Close when full, or when the window since the pop is over."""
        key = self.trace.keys[queue[0]]
        end = self._popped.setdefault(key, now) + self.scenario.window
        if len(queue) >= self.size or now >= end:
            del self._popped[key]
            return min(len(queue), self.size), math.inf
        return 0, end


class TritonStyle(Peer):
    """Takes the largest preferred size reached, or all once the oldest has waited for the delay."""

    name = "Triton-style (preferred + delay)"

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """Close at a preferred size, when full, or when the delay is over."""
        waiting = len(queue)
        end = self.trace.arrivals[queue[0]] + self.scenario.window / 2
        if now >= end or waiting >= self.size:
            return min(waiting, self.size), math.inf
        reached = max((rows for rows in self.scenario.preferred if rows <= waiting), default=0)
        return reached, end


class BentoStyle(Peer):
    """Polls each millisecond; waits while the queue's total wait is small, drops by the whole queue's time."""

    name = "BentoML-style"
    polls_busy = True
    TICK = 0.001
    REFRESH = 5.0
    SHARE = 0.95

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        super().__init__(scenario, trace)
        self._tick = -math.inf
        self._refreshed = 0.0
        self._mean_wait = 0.0
        self._fit: list[tuple[float, float] | None] = [None] * len(scenario.buckets)
        self._seen: list[deque[tuple[int, float, float]]] = [deque(maxlen=50) for _ in scenario.buckets]

    def poll(self, now: float, device: int | None) -> Step:
        """Do nothing between ticks."""
        if now < self._tick:
            return Step(until=self._tick)
        step = super().poll(now, device)
        waiting = any(self._queues)
        self._tick = now + self.TICK if waiting else -math.inf
        return step._replace(until=self._tick if waiting else math.inf)

    def drops(self, queue: list[int], line: Line, now: float) -> int:
        """Return how many at the front exceed their timeout with their wait and the whole queue's batch."""
        fixed, per_row = self._costs(queue, line)
        gone = 0
        while gone < len(queue):
            rows = len(queue) - gone
            needed = fixed + per_row * rows if rows > 1 else 0.0
            if self.left(queue[gone], now) > needed:
                break
            gone += 1
        return gone

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """Close all, unless another tick costs the queue less than requests wait on average."""
        if not idle:
            return 0, math.inf
        rows = len(queue)
        _, per_row = self._costs(queue, line)
        youngest = now - self.trace.arrivals[queue[-1]]
        if rows < self.size and rows * (youngest + self.TICK + per_row) <= self.SHARE * self._mean_wait:
            return 0, math.inf
        return min(rows, self.size), math.inf

    def _costs(self, queue: list[int], line: Line) -> tuple[float, float]:
        key = self.trace.keys[queue[0]]
        fit = self._fit[key]
        if fit is None:
            # The warm-up runs take the place of its training before the first request.
            fit = self._fit[key] = line.fixed, line.per_row
        return fit

    def ran(self, batch: Sequence[int], device: int, times: Times, now: float) -> None:
        """Keep the last batches, and fit them every few seconds."""
        key = self.trace.keys[batch[0]]
        seconds = sum(times)
        self._seen[key].append((len(batch), seconds, now - seconds - self.trace.arrivals[batch[0]]))
        if now - self._refreshed <= self.REFRESH:
            return
        self._refreshed = now
        for key, seen in enumerate(self._seen):
            if seen:
                self._fit[key] = _least_squares([(rows, seconds) for rows, seconds, _ in seen])
        waits = [wait for seen in self._seen for _, _, wait in seen]
        self._mean_wait = sum(waits) / len(waits)


def _least_squares(points: list[tuple[int, float]]) -> tuple[float, float]:
    count = len(points)
    rows = sum(x for x, _ in points)
    squares = sum(x * x for x, _ in points)
    seconds = sum(y for _, y in points)
    products = sum(x * y for x, y in points)
    spread = count * squares - rows * rows
    if spread:
        per_row = max(1e-6, (count * products - rows * seconds) / spread)
        return max(0.0, (seconds - per_row * rows) / count), per_row
    # One size only: half the time to each, near the least-norm solution.
    return products / squares * rows / count / 2, products / squares / 2


class NexusStyle(Peer):
    """Early drop: drops requests at the front that have no time for a batch of the target size."""

    name = "Nexus-style early drop"

    def target(self, line: Line) -> int:
        """Return the size at which a batch, gathered while another runs, just meets the timeout."""
        devices = self.scenario.devices
        return max(1, min(self.size, line.fits(self.scenario.tightest / (1 + 1 / devices))))

    def drops(self, queue: list[int], line: Line, now: float) -> int:
        """Return how many have no time for a batch of the target size, or of all that remain."""
        target = self.target(line)
        for gone, index in enumerate(queue):
            if line.fits(self.left(index, now)) >= max(1, min(len(queue) - gone, target)):
                return gone
        return len(queue)

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """Close all, up to the target."""
        return min(len(queue), self.target(line)), math.inf


class NexusByDeadline(NexusStyle):
    """Early drop in order of deadlines: the best of the peers if timeouts differ."""

    name = "Nexus-style, earliest deadline first"
    by_deadline = True


PEERS: tuple[type[Peer], ...] = (
    WindowFromPop, WindowFromArrival, TritonStyle, Peer, DropExpired, BentoStyle, NexusStyle,
)  # fmt: skip
