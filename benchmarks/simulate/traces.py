"""Open-loop traces of arrivals, fixed before a run so that every policy gets the same requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

# The burst of the two-state trace: its share of the time, and both states' multiples of the mean rate.
BURST_SHARE = 0.2
BURST_RATE = 2.5
CALM_RATE = (1 - BURST_SHARE * BURST_RATE) / (1 - BURST_SHARE)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival: arrival, absolute deadline, bucket. Seconds.

    `levels` are priority classes, 0 the highest; empty without classes.
    """

    arrivals: list[float]
    deadlines: list[float]
    keys: list[int]
    levels: list[int] = field(default_factory=list)

    @property
    def duration(self) -> float:
        """The seconds from the first arrival to the last."""
        return self.arrivals[-1] - self.arrivals[0]


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Return `count` independent arrivals at `rate` a second."""
    draw = random.Random(seed)
    now = 0.0
    arrivals = []
    for _ in range(count):
        now += draw.expovariate(rate)
        arrivals.append(now)
    return arrivals


def mmpp(rate: float, count: int, seed: int, dwell: float) -> list[float]:
    """Return arrivals of a Markov-modulated Poisson process with bursts of `dwell` seconds on average."""
    draw = random.Random(seed)
    calm_dwell = dwell * (1 - BURST_SHARE) / BURST_SHARE
    now = 0.0
    burst = False
    switch = draw.expovariate(1 / calm_dwell)
    arrivals: list[float] = []
    while len(arrivals) < count:
        following = now + draw.expovariate(rate * (BURST_RATE if burst else CALM_RATE))
        if following > switch:
            # The process has no memory: gaps beyond the switch are drawn again at the new rate.
            now, burst = switch, not burst
            switch = now + draw.expovariate(1 / (dwell if burst else calm_dwell))
        else:
            now = following
            arrivals.append(now)
    return arrivals


def with_deadlines(
    arrivals: list[float],
    timeouts: tuple[float, ...],
    buckets: tuple[float, ...],
    classes: tuple[float, ...],
    seed: int,
) -> Trace:
    """Give each request a timeout, all equally often, and a bucket and a class by their shares.

    With as many buckets as classes, each class has its own.
    """
    draw = random.Random(seed)
    if len(timeouts) == 1:
        deadlines = [arrival + timeouts[0] for arrival in arrivals]
    else:
        deadlines = [arrival + draw.choice(timeouts) for arrival in arrivals]
    keys = [0] * len(arrivals)
    if len(buckets) > 1:
        keys = draw.choices(range(len(buckets)), buckets, k=len(arrivals))
    levels: list[int] = []
    if len(classes) > 1:
        own = len(buckets) == len(classes)
        levels = keys if own else draw.choices(range(len(classes)), classes, k=len(arrivals))
    return Trace(arrivals, deadlines, keys, levels)
