"""Arrivals: open-loop traces, fixed before a run so that every policy meets the same requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

# The burst of the two-state trace: its share of the time, and both states' multiples of the mean rate.
BURST_SHARE = 0.2
BURST_RATE = 2.5
CALM_RATE = (1 - BURST_SHARE * BURST_RATE) / (1 - BURST_SHARE)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival: when each came, its absolute deadline, its bucket. Seconds.

    And its priority class, 0 the highest; empty where there are no classes.
    """

    arrivals: list[float]
    deadlines: list[float]
    keys: list[int]
    levels: list[int] = field(default_factory=list)

    @property
    def duration(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1] - self.arrivals[0]


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """`count` arrivals, `rate` a second, independent of each other."""
    draw = random.Random(seed)
    now = 0.0
    arrivals = []
    for _ in range(count):
        now += draw.expovariate(rate)
        arrivals.append(now)
    return arrivals


def mmpp(rate: float, count: int, seed: int, dwell: float) -> list[float]:
    """A Markov-modulated Poisson process: bursts of `dwell` seconds on average, calm between them."""
    draw = random.Random(seed)
    calm_dwell = dwell * (1 - BURST_SHARE) / BURST_SHARE
    now = 0.0
    burst = False
    switch = draw.expovariate(1 / calm_dwell)
    arrivals: list[float] = []
    while len(arrivals) < count:
        following = now + draw.expovariate(rate * (BURST_RATE if burst else CALM_RATE))
        if following > switch:
            # Memoryless: what was drawn beyond the switch is drawn anew at the new rate.
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
    """Gives each request one of the timeouts, each as often, a bucket and a class, by their shares.

    Where there are as many buckets as classes, each class has its own.
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
