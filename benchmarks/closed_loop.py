"""Closed loops and open arrivals against the shipping queue, in virtual time.

    python benchmarks/closed_loop.py [--seconds 10]

Closed: N callers send their next request when the last is answered, 0.2 to about 1 ms later.
Greedy never waits for them; the ideal is all N in every batch, N / (L(N) + mean return time),
which no rule can reach, since the last of N returns later than the mean one. Open: Poisson
arrivals, at a share of the full batches' rate. Everything that decides is the product's own;
only time, arrivals and batch durations are simulated.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from threading import Condition

from tensorferry.batcher.policy import Limits, Wait
from tensorferry.batcher.queue import RequestQueue, Work
from tensorferry.batcher.request import Outcome, Request
from tensorferry.batcher.returners import Returners

_ARRIVAL, _PREPARED, _DONE, _TIMER = range(4)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a batch costs: `fixed` + `per_row` · rows seconds, at most `most` rows; and `host` to prepare it."""

    name: str
    fixed: float
    per_row: float
    most: int
    host: float = 0.0

    def seconds(self, rows: int) -> float:
        """The device's time for a batch."""
        return self.fixed + self.per_row * rows


GPU = Cost("GPU-like 4+0.1b ms", 0.004, 0.0001, 128)
MLP = Cost("MLP-like 0.8+0.1b ms", 0.0008, 0.0001, 32)
CPU = Cost("CPU-like 1+4b ms", 0.001, 0.004, 16)
PIPELINE = Cost("Pipeline 1.5 ms host, 2.5+0.1b ms device", 0.0025, 0.0001, 128, 0.0015)
RETURN_SECONDS = 0.0004


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run: answers a second, mean latency in seconds, mean rows of a batch."""

    rate: float
    latency: float
    rows: float


class _Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, condition: Condition, until: float) -> None:
        raise AssertionError("nothing waits in virtual time")


class Greedy(Returners):
    """The rule switched off: a batch never waits for callers."""

    def wait_until(self, now: float, queued: int, batch_time: Callable[[int], float], room: int) -> float:
        """Not at all."""
        return now


@dataclass(slots=True)
class _Flight:
    """A batch in flight, when the host has prepared it and how long the device runs it."""

    work: Work
    before: float
    device: float


class _Pipe:
    """The workers and the device: each batch is prepared, then waits for its turn on the device."""

    def __init__(self, cost: Cost, workers: int, chance: random.Random) -> None:
        self._cost = cost
        self._chance = chance
        self.workers = workers
        self.prepared: deque[_Flight] = deque()
        self.running: _Flight | None = None

    def leave(self, work: Work) -> _Flight:
        """A worker takes a batch."""
        self.workers -= 1
        device = self._cost.seconds(len(work.batch)) * self._chance.lognormvariate(0, 0.02)
        before = self._cost.host * self._chance.lognormvariate(0, 0.02) if self._cost.host else 0.0
        return _Flight(work, before, device)

    def start(self) -> _Flight | None:
        """The batch whose turn on the device it is, if it is free and one is prepared."""
        if self.running is not None or not self.prepared:
            return None
        self.running = self.prepared.popleft()
        return self.running


def simulate(
    cost: Cost,
    arrivals: Iterable[float],
    *,
    closed: bool,
    returners: Returners,
    seconds: float,
    pipelined: bool = False,
    seed: int = 3,
) -> Figures:
    """Runs the queue over the arrivals; when `closed`, each answer brings its caller back.

    When `pipelined`, two batches are in flight and one is prepared while the device runs the other.
    """
    chance = random.Random(seed)
    clock = _Clock()
    limits = Limits(cost.most, 0.0)
    queue = RequestQueue(limits, 1 << 20, 1 << 40, clock, pipelined=pipelined, returners=returners)
    for rows in (1, max(2, cost.most // 4), cost.most):
        queue.anchor(rows, cost.seconds(rows))
    order = count()
    events: list[tuple[float, int, int, _Flight | None]] = [
        (time, _ARRIVAL, next(order), None) for time in arrivals
    ]
    heapq.heapify(events)
    pipe = _Pipe(cost, 2 if pipelined else 1, chance)
    answered = batches = 0
    latency = 0.0
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
                queue.released(0)
            queue.finish(batch)
            queue.ran(batch, flight.device, flight.before)
            pipe.workers += 1
            answered += len(batch)
            batches += 1
            latency += sum(clock.time - request.arrival for request in batch)
            for _ in batch if closed else ():
                back = RETURN_SECONDS * (0.5 + chance.expovariate(2))
                heapq.heappush(events, (clock.time + back, _ARRIVAL, next(order), None))
        while pipe.workers and not (events and events[0][0] <= clock.time):
            step = queue.poll()
            if isinstance(step, Wait):
                if step.until < seconds:
                    heapq.heappush(events, (step.until, _TIMER, next(order), None))
                break
            assert step is not None
            leaving = pipe.leave(step)
            heapq.heappush(events, (clock.time + leaving.before, _PREPARED, next(order), leaving))
        if (starting := pipe.start()) is not None:
            heapq.heappush(events, (clock.time + starting.device, _DONE, next(order), starting))
    return Figures(answered / clock.time, latency / max(answered, 1), answered / max(batches, 1))


def _ignore(outcome: Outcome) -> None:
    """Nobody waits."""


def callers(number: int) -> list[float]:
    """The first requests of so many callers."""
    chance = random.Random(1)
    return [chance.random() * 1e-3 for _ in range(number)]


def poisson(rate: float, seconds: float) -> list[float]:
    """Arrivals at a rate, independent of each other."""
    chance, times = random.Random(2), [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + chance.expovariate(rate))
    return times[1:]


def ideal(cost: Cost, number: int) -> float:
    """All callers in every batch, back after the mean return time."""
    size = min(number, cost.most)
    return size / (cost.host + cost.seconds(size) + RETURN_SECONDS)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="virtual seconds of each run (default: 10)"
    )
    seconds = parser.parse_args().seconds
    for cost in (GPU, MLP, CPU):
        print(
            f"\n{cost.name}\n  closed, N callers | ideal/s | greedy/s (rows) | learned/s (rows) | of ideal | of greedy"
        )
        for number in (1, 4, 8, 32, 64):
            greedy, learned = (
                simulate(cost, callers(number), closed=True, returners=rule, seconds=seconds)
                for rule in (Greedy(), Returners())
            )
            print(
                f"  {number:17d} | {ideal(cost, number):7.0f} | {greedy.rate:8.0f} ({greedy.rows:4.1f}) "
                f"| {learned.rate:9.0f} ({learned.rows:4.1f}) | {learned.rate / ideal(cost, number):8.3f} "
                f"| {learned.rate / greedy.rate:9.3f}"
            )
        print("  open, load        | greedy ms | learned ms | difference")
        for load in (0.05, 0.2, 0.5, 0.8):
            times = poisson(load * cost.most / cost.seconds(cost.most), seconds)
            greedy, learned = (
                simulate(cost, times, closed=False, returners=rule, seconds=seconds)
                for rule in (Greedy(), Returners())
            )
            difference = learned.latency / greedy.latency - 1
            print(
                f"  {load:17.0%} | {greedy.latency * 1e3:9.3f} | {learned.latency * 1e3:10.3f} | {difference:+.2%}"
            )
    _pipelines(seconds)


def _pipelines(seconds: float) -> None:
    print(f"\n{PIPELINE.name}\n  closed, N callers | one batch/s (rows) | two/s (rows) | of one")
    for number in (8, 32, 64, 200, 400):
        one, two = (
            simulate(
                PIPELINE,
                callers(number),
                closed=True,
                returners=Returners(),
                seconds=seconds,
                pipelined=pipelined,
            )
            for pipelined in (False, True)
        )
        print(
            f"  {number:17d} | {one.rate:10.0f} ({one.rows:5.1f}) | {two.rate:4.0f} ({two.rows:5.1f}) "
            f"| {two.rate / one.rate:6.3f}"
        )


if __name__ == "__main__":
    main()
