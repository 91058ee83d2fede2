"""Scenarios: a device's costs, its traffic, and its offline rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import traces
from costs import Cost
from traces import Trace

from tensorferry.batcher.learning.paying_rows import powers_of_two

Kind = Literal["Poisson", "MMPP"]
NOTHING = Cost(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One device kind under one kind of traffic. Seconds throughout.

    `window` and `preferred` tune the peers that need tuning. Every request has one of the `timeouts`,
    all equally often, and one of the buckets and priority classes, the highest first, by their
    shares. Each of the `devices` takes the same time for a batch; the host prepares it `before` and
    completes it `after`.
    """

    name: str
    cost: Cost
    max_batch_size: int
    timeouts: tuple[float, ...]
    dwell: float
    window: float
    preferred: tuple[int, ...]
    kind: Kind = "Poisson"
    devices: int = 1
    buckets: tuple[float, ...] = (1.0,)
    classes: tuple[float, ...] = (1.0,)
    before: Cost = NOTHING
    after: Cost = NOTHING

    @property
    def capacity(self) -> float:
        """The offline rate: requests a second in batches of the best size on all devices, without the host's part."""
        seconds = sum(
            share * min(self.cost(rows, key) / rows for rows in powers_of_two(self.max_batch_size))
            for key, share in enumerate(self.buckets)
        )
        return self.devices * sum(self.buckets) / seconds

    @property
    def pipelined(self) -> bool:
        """Whether the host has a part in a batch that could overlap with the device's."""
        return self.before != NOTHING or self.after != NOTHING

    @property
    def tightest(self) -> float:
        """The shortest timeout."""
        return min(self.timeouts)

    @property
    def has_optimum(self) -> bool:
        """Whether the clairvoyant optimum is exact: one device, one timeout, one bucket, no host."""
        alone = self.devices == len(self.timeouts) == len(self.buckets) == len(self.classes) == 1
        return alone and not self.pipelined

    def trace(self, load: float, count: int, seed: int) -> Trace:
        """Return a trace with arrivals at a share of the capacity."""
        rate = load * self.capacity
        if self.kind == "Poisson":
            arrivals = traces.poisson(rate, count, seed)
        else:
            arrivals = traces.mmpp(rate, count, seed, self.dwell)
        return traces.with_deadlines(arrivals, self.timeouts, self.buckets, self.classes, seed)

    def under(self, kind: Kind) -> Scenario:
        """Return the same device under this kind of traffic."""
        return replace(self, kind=kind)


GPU = Scenario("GPU", Cost(0.004, 0.0001), 128, (0.025,), 0.1, 0.005, (32, 64, 128))
CPU = Scenario("CPU", Cost(0.001, 0.004), 16, (0.1,), 1.0, 0.01, (4, 8, 16))
STUDY = tuple(device.under(kind) for device in (GPU, CPU) for kind in ("Poisson", "MMPP"))

# Scenarios beyond the study. Each differs from GPU or CPU in one property.
BEYOND = (
    replace(GPU, name="GPU, timeouts 15/25/50 ms", timeouts=(0.015, 0.025, 0.05)),
    replace(CPU, name="CPU, timeouts 50/100/400 ms", timeouts=(0.05, 0.1, 0.4)),
    replace(
        GPU,
        name="GPU, 3 buckets (60/30/10 %) of cost 1/1.5/2",
        cost=Cost(0.004, 0.0001, scales=(1.0, 1.5, 2.0)),
        buckets=(0.6, 0.3, 0.1),
        timeouts=(0.1,),
    ),
    replace(
        CPU,
        name="CPU, 3 buckets (60/30/10 %) of cost 1/2/4",
        cost=Cost(0.001, 0.004, scales=(1.0, 2.0, 4.0)),
        buckets=(0.6, 0.3, 0.1),
        timeouts=(0.4,),
    ),
    replace(GPU, name="GPU, staircase of 32 rows", cost=Cost(0.004, 0.0001, step=32)),
    replace(CPU, name="CPU, staircase of 4 rows", cost=Cost(0.001, 0.004, step=4)),
    replace(GPU, name="4 GPUs", devices=4),
    replace(CPU, name="4 CPUs", devices=4),
)


def _curve(name: str, *row_milliseconds: float) -> Scenario:
    """Return a device with these times per row in batches of 1, 2, 4, ... rows; all timeouts are ten times the first."""
    points = tuple((1 << power, 1e-3 * each * (1 << power)) for power, each in enumerate(row_milliseconds))
    return Scenario(
        name,
        Cost(0.0, 0.0, by_rows=points),
        points[-1][0],
        (10 * points[0][1],),
        1.0,
        points[0][1],
        (4, 8, 16),
    )


# Models of rapidocr and nudenet in ONNX Runtime on one core of a CPU; a perceptron; a GPU that is full from 16 rows on.
CURVES = (
    _curve("OCR detection", 23.6, 25.2, 26.9, 32.9, 38.1, 40.9),
    _curve("OCR recognition", 27.9, 31.2, 29.4, 37.3, 42.6, 47.3),
    _curve("nudenet", 33.9, 31.9, 32.3, 28.5, 29.3, 30.2),
    _curve("perceptron", 3.0, 1.8, 1.1, 0.8, 0.6, 0.5),
    _curve("GPU, full from 16 rows on", 8.0, 4.0, 2.0, 1.0, 0.5, 0.5, 0.5, 0.5),
)

# With a host part: before the device only, and before and after it, growing with the rows.
PIPELINE = replace(
    GPU,
    name="host 1.5 ms, device 2.5 + 0.1b ms",
    cost=Cost(0.0025, 0.0001),
    before=Cost(0.0015, 0.0),
)
COMPLETING = replace(
    PIPELINE, name="host 1.5 ms, device 2.5 + 0.1b ms, host 0.3 + 0.01b ms", after=Cost(0.0003, 0.00001)
)


@dataclass(frozen=True, slots=True)
class TwoStages(Scenario):
    """A pipeline: its first stage is as in `Scenario`, the second takes `then` seconds for a batch."""

    then: Cost = NOTHING
    then_max_batch_size: int = 1

    @property
    def capacity(self) -> float:
        """The offline rate of the slower stage."""
        sizes = ((self.cost, self.max_batch_size), (self.then, self.then_max_batch_size))
        return min(rows / cost(rows) for cost, rows in sizes)


# The stages of an encoder's text: a tokenizer that is ten times as fast as the device, or hardly faster.
FAST_FIRST = TwoStages(
    "first 1 + 0.02b ms",
    Cost(0.001, 0.00002),
    256,
    (0.02,),
    0.2,
    0.005,
    (),
    then=Cost(0.004, 0.0001),
    then_max_batch_size=32,
)
SLOW_FIRST = replace(FAST_FIRST, name="first 1 + 0.2b ms", cost=Cost(0.001, 0.0002), timeouts=(0.05,))
TWO_STAGES: tuple[Scenario, ...] = tuple(
    each.under(kind) for each in (FAST_FIRST, SLOW_FIRST) for kind in ("Poisson", "MMPP")
)


def two_classes(device: Scenario, high: float, *, deadlines: bool, own_buckets: bool = False) -> Scenario:
    """Return the device with two classes, with a share of `high` in the higher one."""
    shares = (high, 1 - high)
    kind = f"{device.name}, {high:.0%} high"
    return replace(
        device,
        name=kind + (", own buckets" if own_buckets else ""),
        cost=replace(device.cost, scales=(1.0, 1.0)) if own_buckets else device.cost,
        timeouts=device.timeouts if deadlines else (math.inf,),
        buckets=shares if own_buckets else (1.0,),
        classes=shares,
    )
