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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Condition

from tensorferry.batcher.policy import Limits, Wait
from tensorferry.batcher.queue import RequestQueue, Work
from tensorferry.batcher.request import Outcome, Request
from tensorferry.batcher.returners import Returners

_ARRIVAL, _DONE, _TIMER = range(3)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a batch costs: `fixed` + `per_row` · rows seconds, at most `most` rows."""

    name: str
    fixed: float
    per_row: float
    most: int

    def seconds(self, rows: int) -> float:
        """The time of a batch."""
        return self.fixed + self.per_row * rows


GPU = Cost("GPU-like 4+0.1b ms", 0.004, 0.0001, 128)
MLP = Cost("MLP-like 0.8+0.1b ms", 0.0008, 0.0001, 32)
CPU = Cost("CPU-like 1+4b ms", 0.001, 0.004, 16)
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


def simulate(
    cost: Cost,
    arrivals: Iterable[float],
    *,
    closed: bool,
    returners: Returners,
    seconds: float,
    seed: int = 3,
) -> Figures:
    """Runs the queue over the arrivals; when `closed`, each answer brings its caller back."""
    chance = random.Random(seed)
    clock = _Clock()
    queue = RequestQueue(Limits(cost.most, 0.0), 1 << 20, 1 << 40, clock, returners=returners)
    for rows in (1, max(2, cost.most // 4), cost.most):
        queue.anchor(rows, cost.seconds(rows))
    events = [(time, _ARRIVAL) for time in arrivals]
    heapq.heapify(events)
    work: Work | None = None
    took = 0.0
    answered = batches = 0
    latency = 0.0
    while events and clock.time < seconds:
        clock.time, kind = heapq.heappop(events)
        if kind == _ARRIVAL:
            queue.put((Request((), _ignore, names=None, rows=1, nbytes=0),))
        elif kind == _DONE and work is not None:
            queue.finish(work.batch)
            queue.ran(work.batch, took)
            answered += len(work.batch)
            batches += 1
            latency += sum(clock.time - request.arrival for request in work.batch)
            for _ in work.batch if closed else ():
                back = RETURN_SECONDS * (0.5 + chance.expovariate(2))
                heapq.heappush(events, (clock.time + back, _ARRIVAL))
            work = None
        if work is None and not (events and events[0][0] <= clock.time):
            step = queue.poll()
            if isinstance(step, Work):
                work, took = step, cost.seconds(len(step.batch)) * chance.lognormvariate(0, 0.02)
                heapq.heappush(events, (clock.time + took, _DONE))
            elif isinstance(step, Wait) and step.until < seconds:
                heapq.heappush(events, (step.until, _TIMER))
    return Figures(answered / clock.time, latency / max(answered, 1), answered / max(batches, 1))


def _ignore(outcome: Outcome) -> None:
    """Nobody waits."""


def callers(count: int) -> list[float]:
    """The first requests of so many callers."""
    chance = random.Random(1)
    return [chance.random() * 1e-3 for _ in range(count)]


def poisson(rate: float, seconds: float) -> list[float]:
    """Arrivals at a rate, independent of each other."""
    chance, times = random.Random(2), [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + chance.expovariate(rate))
    return times[1:]


def ideal(cost: Cost, count: int) -> float:
    """All callers in every batch, back after the mean return time."""
    size = min(count, cost.most)
    return size / (cost.seconds(size) + RETURN_SECONDS)


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
        for count in (1, 4, 8, 32, 64):
            greedy, learned = (
                simulate(cost, callers(count), closed=True, returners=rule, seconds=seconds)
                for rule in (Greedy(), Returners())
            )
            print(
                f"  {count:17d} | {ideal(cost, count):7.0f} | {greedy.rate:8.0f} ({greedy.rows:4.1f}) "
                f"| {learned.rate:9.0f} ({learned.rows:4.1f}) | {learned.rate / ideal(cost, count):8.3f} "
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


if __name__ == "__main__":
    main()
