"""Closed loops and open arrivals against the shipping queue, in virtual time.

    python benchmarks/closed_loop.py [--seconds 10]

Closed: N callers send their next request when the last is answered, 0.2 to about 1 ms later.
Greedy never waits for them; the ideal is all N in every batch, N / (L(N) + mean return time),
which no rule can reach, since the last of N returns later than the mean one. What can be reached
is near the best count in hindsight: a batch leaves when so many wait, the best of all numbers.
(The times to return have no memory after the first 0.2 ms, so when those wait nothing else is
worth knowing.) Open: Poisson arrivals, at a share of the full batches' rate. Then what is
neither: both at once, callers that think for about as long as a batch takes, callers that come
and go, callers with deadlines. Everything that decides is the product's own; only time, arrivals
and batch durations are simulated.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition

from tensorferry.batcher.errors import DeadlineExceeded
from tensorferry.batcher.learning.return_model import ReturnModel, no_host_time
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Outcome, Request
from tensorferry.batcher.settings import BatcherSettings

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
class Traffic:
    """Who sends: `callers`, each from one time to another, and open arrivals at their own times.

    A caller sends again `fixed` + a random number of seconds, `spread` on average, after its
    answer, or after it was told that there is none.
    """

    callers: Sequence[tuple[float, float]] = ()
    arrivals: Sequence[float] = ()
    fixed: float = RETURN_SECONDS / 2
    spread: float = RETURN_SECONDS / 2
    timeout: float = math.inf


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run: answers in time a second, mean latency in seconds of all and of open arrivals, mean rows of a batch."""

    rate: float
    latency: float
    waited: float
    rows: float


class Clock:
    """Virtual time, which is set by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """The time that was set."""
        return self.time

    def wait(self, condition: Condition, until: float) -> None:
        """Nobody does."""
        raise AssertionError("nothing waits in virtual time")


class Greedy(ReturnModel):
    """The rule switched off: a batch never waits for callers."""

    def wait_until(
        self,
        now: float,
        queued: int,
        batch_time: Callable[[int], float],
        room: int,
        answering: Callable[[int], float] = no_host_time,
    ) -> float:
        """Not at all."""
        return now


class Count(ReturnModel):
    """A rule that knows: a batch leaves when so many wait."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def wait_until(
        self,
        now: float,
        queued: int,
        batch_time: Callable[[int], float],
        room: int,
        answering: Callable[[int], float] = no_host_time,
    ) -> float:
        """Until the last of them is there."""
        return now if queued >= self._count else math.inf


class Window(ReturnModel):
    """A window of so many seconds from the first arrival."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class _Call(Request):
    __slots__ = ("caller",)

    def __init__(self, caller: int, deadline: float) -> None:
        super().__init__((), _ignore, names=None, rows=1, nbytes=0, deadline=deadline)
        self.caller = caller


_OPEN = -1


def simulate(
    cost: Cost, traffic: Traffic, *, returners: ReturnModel, seconds: float, seed: int = 3
) -> Figures:
    """Runs the queue over the traffic."""
    chance = random.Random(seed)
    clock = Clock()
    window = returners.seconds if isinstance(returners, Window) else 0.0
    queue = RequestQueue(
        BatcherSettings(cost.most, window, max_queue_size=1 << 20, max_queue_bytes=1 << 40),
        clock,
        returns=returners,
    )
    for rows in (1, max(2, cost.most // 4), cost.most):
        queue.add_warmup_sample(rows, cost.seconds(rows))
    events = [(time, _ARRIVAL, _OPEN) for time in traffic.arrivals]
    events += [(start, _ARRIVAL, caller) for caller, (start, _) in enumerate(traffic.callers)]
    heapq.heapify(events)
    work: BatchAssignment | None = None
    took = latency = waited = 0.0
    answered = opened = late = batches = 0

    def send_again(request: Request) -> None:
        if isinstance(request, _Call) and request.caller != _OPEN:
            back = clock.time + traffic.fixed + traffic.spread * chance.expovariate(1)
            if back < traffic.callers[request.caller][1]:
                heapq.heappush(events, (back, _ARRIVAL, request.caller))

    while events and clock.time < seconds:
        clock.time, kind, caller = heapq.heappop(events)
        if kind == _ARRIVAL:
            call = _Call(caller, clock.time + traffic.timeout)
            try:
                queue.put((call,))
            except DeadlineExceeded:
                send_again(call)
        elif kind == _DONE and work is not None:
            queue.finish(work.batch)
            queue.batch_done(work.batch, took)
            answered += len(work.batch)
            batches += 1
            for request in work.batch:
                latency += clock.time - request.arrival
                late += clock.time > request.deadline
                if isinstance(request, _Call) and request.caller == _OPEN:
                    opened += 1
                    waited += clock.time - request.arrival
                send_again(request)
            work = None
        while work is None and not (events and events[0][0] <= clock.time):
            step = queue.poll()
            if isinstance(step, Wait):
                if step.until < seconds:
                    heapq.heappush(events, (step.until, _TIMER, _OPEN))
                break
            assert isinstance(step, BatchAssignment)
            for request in (*step.expired, *step.shed):
                send_again(request)
            if step.batch:
                work, took = step, cost.seconds(len(step.batch)) * chance.lognormvariate(0, 0.02)
                heapq.heappush(events, (clock.time + took, _DONE, _OPEN))
            else:
                queue.batch_done((), None)
    return Figures(
        rate=(answered - late) / clock.time,
        latency=latency / max(answered, 1),
        waited=waited / max(opened, 1),
        rows=answered / max(batches, 1),
    )


def _ignore(outcome: Outcome) -> None:
    """Nobody waits."""


def callers(count: int, start: float = 0.0, end: float = math.inf) -> list[tuple[float, float]]:
    """So many callers, who begin within a millisecond."""
    chance = random.Random(1)
    return [(start + chance.random() * 1e-3, end) for _ in range(count)]


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


def best_count(cost: Cost, count: int, seconds: float) -> float:
    """The rate with the best of all numbers of requests for which a batch could wait."""
    counts = {1, count // 2, 3 * count // 4, 7 * count // 8, 15 * count // 16, count - 1, count}
    traffic = Traffic(callers(count))
    return max(
        simulate(cost, traffic, returners=Count(least), seconds=seconds).rate
        for least in counts
        if 1 <= least <= cost.most
    )


def neither(cost: Cost, seconds: float) -> dict[str, Traffic]:
    """Traffic of other kinds."""
    full = cost.most / cost.seconds(cost.most)
    found = {"2 callers": Traffic(callers(2)), "16 callers": Traffic(callers(16))}
    for load in (0.05, 0.2, 0.5):
        found[f"16 callers + open {load:.0%}"] = Traffic(callers(16), poisson(load * full, seconds))
    for count in (8, 32):
        for multiple in (0.5, 1.0, 2.0):
            think = multiple * cost.seconds(1)
            found[f"{count} that think {multiple:g} L(1)"] = Traffic(callers(count), fixed=0.0, spread=think)
        think = cost.seconds(min(count, cost.most)) / 2
        found[f"{count} that think L({count})"] = Traffic(callers(count), fixed=think, spread=think)
    found["8, then 32, then 8"] = Traffic(callers(8) + callers(24, seconds / 3, seconds * 2 / 3))
    for count in (8, 32):
        for multiple in (1.3, 2.2):
            timeout = multiple * cost.seconds(min(count, cost.most))
            found[f"{count}, timeout {multiple:g} L({count})"] = Traffic(callers(count), timeout=timeout)
    return found


def closed_table(cost: Cost, seconds: float) -> None:
    """Callers alone, against what can be reached."""
    print("  closed, N callers | ideal/s | greedy/s (rows) | learned/s (rows) | best count/s", end="")
    print(" | of ideal | of best count | of greedy")
    for count in (1, 4, 8, 32, 64):
        greedy, learned = (
            simulate(cost, Traffic(callers(count)), returners=rule, seconds=seconds)
            for rule in (Greedy(), ReturnModel())
        )
        best = best_count(cost, count, seconds / 2)
        print(
            f"  {count:17d} | {ideal(cost, count):7.0f} | {greedy.rate:8.0f} ({greedy.rows:4.1f}) "
            f"| {learned.rate:9.0f} ({learned.rows:4.1f}) | {best:12.0f} | {learned.rate / ideal(cost, count):8.3f} "
            f"| {learned.rate / best:13.3f} | {learned.rate / greedy.rate:9.3f}"
        )


def open_table(cost: Cost, seconds: float) -> None:
    """Open arrivals alone: nothing is to be waited for."""
    print("  open, load        | greedy ms | learned ms | difference")
    for load in (0.05, 0.2, 0.5, 0.8):
        traffic = Traffic(arrivals=poisson(load * cost.most / cost.seconds(cost.most), seconds))
        greedy, learned = (
            simulate(cost, traffic, returners=rule, seconds=seconds) for rule in (Greedy(), ReturnModel())
        )
        difference = learned.latency / greedy.latency - 1
        print(
            f"  {load:17.0%} | {greedy.latency * 1e3:9.3f} | {learned.latency * 1e3:10.3f} | {difference:+.2%}"
        )


def neither_table(cost: Cost, seconds: float) -> None:
    """What is neither: answers in time a second, and the mean latency of all and of open arrivals."""
    print("  in time/s              | greedy | learned        | window 1 ms | mean ms", end="")
    print(" greedy, learned | of open arrivals")
    for name, traffic in neither(cost, seconds).items():
        greedy, learned, window = (
            simulate(cost, traffic, returners=rule, seconds=seconds)
            for rule in (Greedy(), ReturnModel(), Window(0.001))
        )
        waited = (
            f"{greedy.waited * 1e3:6.2f}, {learned.waited * 1e3:6.2f}" if traffic.arrivals else f"{'-':>7}"
        )
        print(
            f"  {name:22s} | {greedy.rate:6.0f} | {learned.rate:6.0f} {learned.rate / greedy.rate - 1:+7.1%} "
            f"| {window.rate:11.0f} | {greedy.latency * 1e3:14.2f}, {learned.latency * 1e3:7.2f} | {waited}"
        )


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
        print(f"\n{cost.name}")
        closed_table(cost, seconds)
        open_table(cost, seconds)
        neither_table(cost, seconds / 3)


if __name__ == "__main__":
    main()
