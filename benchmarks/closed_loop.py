"""Closed loops and open arrivals against the shipping queue, in virtual time.

    python benchmarks/closed_loop.py [--seconds 10]

Closed: each of N clients sends its next request after the last answer, 0.2 to about 1 ms later.
A greedy rule never waits for them. The ideal is all N in every batch, N / (L(N) + mean return
time). No rule can reach it, because the last of N clients returns later than the mean. The best
count in hindsight is within reach: close a batch when a fixed number of requests is queued, the
best of all numbers. (Return times have no memory after the first 0.2 ms, so only that number
matters.) Open: Poisson arrivals at a share of the full batches' rate. Mixed traffic: both at once,
clients that think for about as long as a batch takes, clients that come and go, clients with
deadlines. All decisions are the product's; only time, arrivals and batch times are simulated.
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
    """The cost of a batch: `fixed` + `per_row` · rows seconds, at most `most` rows."""

    name: str
    fixed: float
    per_row: float
    most: int

    def seconds(self, rows: int) -> float:
        """Return the time of a batch."""
        return self.fixed + self.per_row * rows


GPU = Cost("GPU-like 4+0.1b ms", 0.004, 0.0001, 128)
MLP = Cost("MLP-like 0.8+0.1b ms", 0.0008, 0.0001, 32)
CPU = Cost("CPU-like 1+4b ms", 0.001, 0.004, 16)
RETURN_SECONDS = 0.0004


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic: `callers`, each from one time to another, and open arrivals.

    A caller sends again `fixed` + a random number of seconds, `spread` on average, after its answer
    or error.
    """

    callers: Sequence[tuple[float, float]] = ()
    arrivals: Sequence[float] = ()
    fixed: float = RETURN_SECONDS / 2
    spread: float = RETURN_SECONDS / 2
    timeout: float = math.inf


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a run: answers in time a second, mean latency of all and of open arrivals, mean rows of a batch."""

    rate: float
    latency: float
    waited: float
    rows: float


class Clock:
    """Virtual time that the simulation sets."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """Return the time that was set."""
        return self.time

    def wait(self, condition: Condition, until: float) -> None:
        """Raise, because with one thread a wait would never end."""
        raise AssertionError("nothing waits in virtual time")


class Greedy(ReturnModel):
    """The rule switched off: no batch waits for clients."""

    def wait_until(
        self,
        now: float,
        queued: int,
        batch_time: Callable[[int], float],
        room: int,
        answering: Callable[[int], float] = no_host_time,
    ) -> float:
        """Return `now`: no wait."""
        return now


class Count(ReturnModel):
    """A rule with hindsight: a batch is closed when `count` requests are queued."""

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
        """Return until when to wait."""
        self.wanted = self._count
        return now if queued >= self._count else math.inf


class Window(ReturnModel):
    """A fixed window from the first arrival."""

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
    """Run the queue over the traffic."""
    chance = random.Random(seed)
    clock = Clock()
    window = returners.seconds if isinstance(returners, Window) else 0.0
    queue = RequestQueue(
        BatcherSettings(cost.most, window, max_queue_size=1 << 20, max_queue_bytes=1 << 40),
        clock,
        returns=returners,
    )
    for rows in (1, max(2, cost.most // 4), cost.most):
        queue.learning.add_warmup_sample(rows, cost.seconds(rows))
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
    """Ignore the outcome."""


def callers(count: int, start: float = 0.0, end: float = math.inf) -> list[tuple[float, float]]:
    """Return clients that begin within a millisecond."""
    chance = random.Random(1)
    return [(start + chance.random() * 1e-3, end) for _ in range(count)]


def poisson(rate: float, seconds: float) -> list[float]:
    """Return independent arrivals at a rate."""
    chance, times = random.Random(2), [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + chance.expovariate(rate))
    return times[1:]


def ideal(cost: Cost, count: int) -> float:
    """Return the rate with all clients in every batch, back after the mean return time."""
    size = min(count, cost.most)
    return size / (cost.seconds(size) + RETURN_SECONDS)


def best_count(cost: Cost, count: int, seconds: float) -> float:
    """Return the rate with the best number of requests to wait for."""
    counts = {1, count // 2, 3 * count // 4, 7 * count // 8, 15 * count // 16, count - 1, count}
    traffic = Traffic(callers(count))
    return max(
        simulate(cost, traffic, returners=Count(least), seconds=seconds).rate
        for least in counts
        if 1 <= least <= cost.most
    )


def neither(cost: Cost, seconds: float) -> dict[str, Traffic]:
    """Return mixed traffic."""
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
    """Print closed loops, compared with the best count."""
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
    """Print open arrivals, for which no batch should wait."""
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
    """Print mixed traffic: answers in time a second, and the mean latency of all and of open arrivals."""
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
    """Print the tables."""
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
