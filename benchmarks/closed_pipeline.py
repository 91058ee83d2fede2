"""Closed loops with a second batch in flight, in virtual time: the gain of pipelining for returning clients.

    python benchmarks/closed_pipeline.py [--seconds 10]

The host prepares a batch for 1.5 ms before the device can run it. With two in flight it does so
while the device runs another. If clients return, a batch that is closed early does not have the
clients that the running batch is about to answer.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from dataclasses import dataclass
from itertools import count

from closed_loop import Clock

from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Outcome, Request
from tensorferry.batcher.settings import BatcherSettings

_ARRIVAL, _PREPARED, _DONE, _TIMER = range(4)
RETURN_SECONDS = 0.0004


@dataclass(frozen=True, slots=True)
class Cost:
    """A batch keeps the device for `fixed` + `per_row` · rows seconds, after `host` to prepare it."""

    name: str
    host: float
    fixed: float
    per_row: float
    most: int

    def seconds(self, rows: int) -> float:
        """Return the device's time for a batch."""
        return self.fixed + self.per_row * rows


PIPELINE = Cost("1.5 ms host, 2.5+0.1b ms device", 0.0015, 0.0025, 0.0001, 128)


@dataclass(slots=True)
class _Flight:
    """A batch in flight, when the host has prepared it and how long the device runs it."""

    work: BatchAssignment
    before: float
    device: float


class _Pipe:
    """The workers and the device: each batch is prepared, then waits for the device."""

    def __init__(self, cost: Cost, workers: int, chance: random.Random) -> None:
        self._cost = cost
        self._chance = chance
        self.workers = workers
        self.prepared: deque[_Flight] = deque()
        self.running: _Flight | None = None

    def dispatch(self, work: BatchAssignment) -> _Flight:
        """Note that a worker takes a batch; return the batch in flight."""
        self.workers -= 1
        device = self._cost.seconds(len(work.batch)) * self._chance.lognormvariate(0, 0.02)
        before = self._cost.host * self._chance.lognormvariate(0, 0.02) if self._cost.host else 0.0
        return _Flight(work, before, device)

    def start(self) -> _Flight | None:
        """Return the next prepared batch if the device is free."""
        if self.running is not None or not self.prepared:
            return None
        self.running = self.prepared.popleft()
        return self.running


def simulate(
    cost: Cost, callers: int, *, seconds: float, pipelined: bool, seed: int = 3
) -> tuple[float, float]:
    """Return answers a second and mean rows of a batch, with two batches in flight or one."""
    chance = random.Random(seed)
    clock = Clock()
    queue = RequestQueue(
        BatcherSettings(cost.most, max_queue_size=1 << 20, max_queue_bytes=1 << 40, pipelined=pipelined),
        clock,
    )
    for rows in (1, max(2, cost.most // 4), cost.most):
        queue.add_warmup_sample(rows, cost.seconds(rows))
    order = count()
    events: list[tuple[float, int, int, _Flight | None]] = [
        (chance.random() * 1e-3, _ARRIVAL, next(order), None) for _ in range(callers)
    ]
    heapq.heapify(events)
    pipe = _Pipe(cost, 2 if pipelined else 1, chance)
    answered = batches = 0
    while events and clock.time < seconds:
        clock.time, kind, _, flight = heapq.heappop(events)
        if kind == _ARRIVAL:
            queue.put((Request((), _ignore, names=None, rows=1, nbytes=0),))
        elif kind == _PREPARED and flight is not None:
            pipe.prepared.append(flight)
        elif kind == _DONE and flight is not None:
            pipe.running = None
            batch = flight.work.batch
            if pipelined:
                queue.run_done(0)
            queue.finish(batch)
            queue.batch_done(batch, flight.device, flight.before)
            pipe.workers += 1
            answered += len(batch)
            batches += 1
            for _ in batch:
                back = RETURN_SECONDS * (0.5 + chance.expovariate(2))
                heapq.heappush(events, (clock.time + back, _ARRIVAL, next(order), None))
        while pipe.workers and not (events and events[0][0] <= clock.time):
            step = queue.poll()
            if isinstance(step, Wait):
                if step.until < seconds:
                    heapq.heappush(events, (step.until, _TIMER, next(order), None))
                break
            assert step is not None
            flight = pipe.dispatch(step)
            heapq.heappush(events, (clock.time + flight.before, _PREPARED, next(order), flight))
        if (starting := pipe.start()) is not None:
            heapq.heappush(events, (clock.time + starting.device, _DONE, next(order), starting))
    return answered / clock.time, answered / max(batches, 1)


def _ignore(outcome: Outcome) -> None:
    """Ignore the outcome."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="virtual seconds of each run (default: 10)"
    )
    seconds = parser.parse_args().seconds
    print(f"\n{PIPELINE.name}\n  closed, N callers | one batch/s (rows) |  two/s (rows) | of one")
    for callers in (8, 32, 64, 200, 400):
        (one, rows), (two, more_rows) = (
            simulate(PIPELINE, callers, seconds=seconds, pipelined=pipelined) for pipelined in (False, True)
        )
        print(
            f"  {callers:17d} | {one:10.0f} ({rows:5.1f}) | {two:5.0f} ({more_rows:5.1f}) | {two / one:6.3f}"
        )


if __name__ == "__main__":
    main()
