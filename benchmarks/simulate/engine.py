"""Discrete events in one thread: arrivals, batches that end and timers drive a scheduler in virtual time."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from costs import Cost, Noise
from traces import Trace

WARMUP_RUNS = 5


class Step(NamedTuple):
    """What a scheduler does now. Requests are named by their number in the trace.

    With neither a batch nor anyone dropped it waits, for an event or until that time.
    """

    batch: Sequence[int] = ()
    dropped: Sequence[int] = ()
    until: float = math.inf


class Scheduler(Protocol):
    """What forms batches: the shipping queue or a peer."""

    @property
    def polls_busy(self) -> bool:
        """Whether it is polled while all devices are busy, too."""

    def anchor(self, key: int, rows: int, seconds: float) -> None:
        """A warm-up run of a bucket."""

    def put(self, index: int, now: float) -> bool:
        """A request arrives; whether it is accepted."""

    def poll(self, now: float, idle: bool) -> Step:
        """Something happened, and a device is idle or not."""

    def ran(self, batch: Sequence[int], started: float, now: float) -> None:
        """A batch is over."""


@dataclass(frozen=True, slots=True)
class Run:
    """What became of each request: when it was answered or dropped, nan for the other; and the batches' rows."""

    answered: list[float]
    dropped: list[float]
    batches: list[int]
    busy: float


def run(
    trace: Trace, cost: Cost, max_batch_size: int, devices: int, scheduler: Scheduler, noise: Noise
) -> Run:
    """Plays a trace to its end: until every request is answered or dropped."""
    _warm_up(trace, cost, max_batch_size, scheduler, noise)
    arrivals, keys = trace.arrivals, trace.keys
    count = len(arrivals)
    answered = [math.nan] * count
    dropped = [math.nan] * count
    batches: list[int] = []
    ends: list[tuple[float, int, Sequence[int], float]] = []
    busy = 0.0
    arrived = 0
    timer = math.inf
    while True:
        arrival = arrivals[arrived] if arrived < count else math.inf
        end = ends[0][0] if ends else math.inf
        now = min(arrival, end, timer)
        if now == math.inf:
            break
        if now == arrival:
            if not scheduler.put(arrived, now):
                dropped[arrived] = now
            arrived += 1
        elif now == end:
            _, _, batch, started = heapq.heappop(ends)
            for index in batch:
                answered[index] = now
            scheduler.ran(batch, started, now)
        else:
            timer = math.inf
        while len(ends) < devices or scheduler.polls_busy:
            step = scheduler.poll(now, len(ends) < devices)
            for index in step.dropped:
                dropped[index] = now
            if step.batch:
                seconds = cost(len(step.batch), keys[step.batch[0]]) * noise()
                heapq.heappush(ends, (now + seconds, len(batches), step.batch, now))
                batches.append(len(step.batch))
                busy += seconds
            elif not step.dropped:
                timer = step.until
                break
    lost = sum(math.isnan(a) == math.isnan(d) for a, d in zip(answered, dropped, strict=True))
    if lost:
        raise RuntimeError(f"{lost} of {count} requests were not answered or dropped exactly once")
    return Run(answered, dropped, batches, busy)


def _warm_up(trace: Trace, cost: Cost, max_batch_size: int, scheduler: Scheduler, noise: Noise) -> None:
    for key in range(len(cost.scales)):
        for rows in (1, max(2, max_batch_size // 4), max_batch_size):
            seconds = statistics.median(cost(rows, key) * noise() for _ in range(WARMUP_RUNS))
            scheduler.anchor(key, rows, seconds)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers: shares of all requests, on-time answers a second, latencies of the answered in seconds."""

    in_time: float
    goodput: float
    mean: float
    p50: float
    p99: float
    mean_batch: float
    late: float
    dropped: float
    time_to_drop: float

    @classmethod
    def bound(cls, in_time: float, goodput: float) -> Summary:
        """What is known of an optimum: nothing but its answers in time."""
        return cls(in_time, goodput, *[math.nan] * 7)


def summarize(trace: Trace, run: Run) -> Summary:
    """Counts a dropped request as a miss, and an answer after its deadline as late: wasted work."""
    count = len(trace.arrivals)
    latencies = sorted(
        end - arrival for end, arrival in zip(run.answered, trace.arrivals, strict=True) if end == end
    )
    in_time = sum(end <= deadline for end, deadline in zip(run.answered, trace.deadlines, strict=True))
    waits = [end - arrival for end, arrival in zip(run.dropped, trace.arrivals, strict=True) if end == end]
    return Summary(
        in_time=in_time / count,
        goodput=in_time / trace.duration,
        mean=_mean(latencies),
        p50=_quantile(latencies, 0.5),
        p99=_quantile(latencies, 0.99),
        mean_batch=_mean(run.batches),
        late=(len(latencies) - in_time) / count,
        dropped=len(waits) / count,
        time_to_drop=_mean(waits),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan
