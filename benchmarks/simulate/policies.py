"""The peers' rules, written anew from what their sources and papers say, on one common queue.

They are the closing and shedding rules alone: no peer's overheads are charged to it.
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
    """A queue by buckets, the bucket of the oldest request first. This one is greedy: take all, never drop."""

    name: ClassVar[str] = "greedy"
    polls_busy: ClassVar[bool] = False
    in_flight: ClassVar[int] = 1
    # Within a bucket: the earliest deadline first, instead of the oldest.
    by_deadline: ClassVar[bool] = False

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        self.scenario = scenario
        self.trace = trace
        self.size = scenario.max_batch_size
        self.lines = [Line() for _ in scenario.buckets]
        self._queues: list[list[int]] = [[] for _ in scenario.buckets]

    def anchor(self, key: int, rows: int, seconds: float) -> None:
        """A warm-up run of a bucket."""
        self.lines[key].anchor(rows, seconds)

    def put(self, index: int, now: float) -> bool:
        """Queues a request; all are accepted."""
        queue = self._queues[self.trace.keys[index]]
        if self.by_deadline:
            bisect.insort(queue, index, key=self.trace.deadlines.__getitem__)
        else:
            queue.append(index)
        return True

    def released(self, device: int, now: float) -> None:
        """Nobody prepares anything in time for this."""

    def ran(self, batch: Sequence[int], device: int, times: Times, now: float) -> None:
        """Learns what a batch took."""
        self.lines[self.trace.keys[batch[0]]].observe(len(batch), sum(times))

    def poll(self, now: float, device: int | None) -> Step:
        """Drops and closes in the bucket whose first request is the oldest."""
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
        """How many requests wait."""
        return sum(map(len, self._queues))

    def drops(self, queue: list[int], line: Line, now: float) -> int:
        """How many requests are dropped from the front of a bucket's queue."""
        return 0

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """How many rows leave now, or 0 and until when nothing does. The queue is never empty."""
        return min(len(queue), self.size), math.inf

    def left(self, index: int, now: float) -> float:
        """The time to a request's deadline."""
        return self.trace.deadlines[index] - now


class DropExpired(Peer):
    """Greedy, and what has expired is dropped unexecuted."""

    name = "greedy + drop expired"

    def drops(self, queue: list[int], line: Line, now: float) -> int:
        """The run of expired ones at the front."""
        return next((n for n, index in enumerate(queue) if self.left(index, now) > 0), len(queue))


class TwoEager(Peer):
    """Two instances on each device, each takes all that waits as soon as it is free."""

    name = "two eager instances"
    in_flight = 2


class FourEager(Peer):
    """Four of them."""

    name = "four eager instances"
    in_flight = 4


class StrictPriority(Peer):
    """As Triton's priority levels: the lower classes get what the higher leave, the expired are dropped.

    A batch takes from a bucket's classes in their order; without own buckets they share it.
    """

    name = "strict priority"

    def put(self, index: int, now: float) -> bool:
        """Queues a request behind those of its class."""
        bisect.insort(self._queues[self.trace.keys[index]], index, key=self._order)
        return True

    def _order(self, index: int) -> tuple[int, int]:
        return (self.trace.levels[index] if self.trace.levels else 0), index

    def poll(self, now: float, device: int | None) -> Step:
        """Drops all that have expired, then takes the bucket whose first is of the highest class."""
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
    """A batch leaves when it is full or its oldest request has waited for the window."""

    name = "window from arrival"

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """Full, or the window is over."""
        end = self.trace.arrivals[queue[0]] + self.scenario.window
        if len(queue) >= self.size or now >= end:
            return min(len(queue), self.size), math.inf
        return 0, end


class WindowFromPop(Peer):
    """The loop of many a tutorial: a free worker pops one request, then collects for the window."""

    name = "window from pop"

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        super().__init__(scenario, trace)
        # When the collecting worker popped each bucket's first request; one collects at a time.
        self._popped: dict[int, float] = {}

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """Full, or the window since the pop is over."""
        key = self.trace.keys[queue[0]]
        end = self._popped.setdefault(key, now) + self.scenario.window
        if len(queue) >= self.size or now >= end:
            del self._popped[key]
            return min(len(queue), self.size), math.inf
        return 0, end


class TritonStyle(Peer):
    """The largest preferred size that is reached, or all when the oldest has waited for the delay."""

    name = "Triton-style (preferred + delay)"

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """A preferred size, full, or the delay is over."""
        waiting = len(queue)
        end = self.trace.arrivals[queue[0]] + self.scenario.window / 2
        if now >= end or waiting >= self.size:
            return min(waiting, self.size), math.inf
        reached = max((rows for rows in self.scenario.preferred if rows <= waiting), default=0)
        return reached, end


class BentoStyle(Peer):
    """A poll each millisecond; waits while the queue's total wait is small, drops by the whole queue's time."""

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
        """Nothing between the ticks."""
        if now < self._tick:
            return Step(until=self._tick)
        step = super().poll(now, device)
        waiting = any(self._queues)
        self._tick = now + self.TICK if waiting else -math.inf
        return step._replace(until=self._tick if waiting else math.inf)

    def drops(self, queue: list[int], line: Line, now: float) -> int:
        """Those at the front whose wait and the whole queue's batch together exceed their timeout."""
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
        """All, unless one more tick costs the queue less than what requests wait on average."""
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
            # Its training before the first request, here the warm-up runs.
            fit = self._fit[key] = line.fixed, line.per_row
        return fit

    def ran(self, batch: Sequence[int], device: int, times: Times, now: float) -> None:
        """Remembers the last batches, and looks at them every few seconds."""
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
    """Early drop: slides past those at the front that cannot be in a batch of the target size."""

    name = "Nexus-style early drop"

    def target(self, line: Line) -> int:
        """The size whose batches, one running while one gathers, just meet the timeout."""
        devices = self.scenario.devices
        return max(1, min(self.size, line.fits(self.scenario.tightest / (1 + 1 / devices))))

    def drops(self, queue: list[int], line: Line, now: float) -> int:
        """Those without time for a batch of the target size, or of all that would be left."""
        target = self.target(line)
        for gone, index in enumerate(queue):
            if line.fits(self.left(index, now)) >= max(1, min(len(queue) - gone, target)):
                return gone
        return len(queue)

    def closes(self, queue: list[int], line: Line, now: float, idle: bool) -> tuple[int, float]:
        """All, up to the target."""
        return min(len(queue), self.target(line)), math.inf


class NexusByDeadline(NexusStyle):
    """The same on a queue in order of deadlines: the best of the peers where timeouts differ."""

    name = "Nexus-style, earliest deadline first"
    by_deadline = True


PEERS: tuple[type[Peer], ...] = (
    WindowFromPop,
    WindowFromArrival,
    TritonStyle,
    Peer,
    DropExpired,
    BentoStyle,
    NexusStyle,
)
