"""What is simulated: a device's costs, the traffic that meets it, and what it could do at best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import traces
from costs import Cost
from traces import Trace

Kind = Literal["Poisson", "MMPP"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One device kind under one kind of traffic. Seconds throughout.

    `window` and `preferred` are what the peers that need tuning are tuned to. Every request
    has one of the `timeouts`, each as often, and one of the buckets, by their shares.
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

    @property
    def capacity(self) -> float:
        """Requests a second of full batches, all devices together: the offline rate."""
        seconds = sum(
            share * self.cost(self.max_batch_size, key) / self.max_batch_size
            for key, share in enumerate(self.buckets)
        )
        return self.devices * sum(self.buckets) / seconds

    @property
    def tightest(self) -> float:
        """The shortest timeout."""
        return min(self.timeouts)

    @property
    def has_optimum(self) -> bool:
        """Whether the clairvoyant optimum is exact here: one device, one timeout, one bucket."""
        return self.devices == len(self.timeouts) == len(self.buckets) == 1

    def trace(self, load: float, count: int, seed: int) -> Trace:
        """Arrivals at a share of the capacity."""
        rate = load * self.capacity
        if self.kind == "Poisson":
            arrivals = traces.poisson(rate, count, seed)
        else:
            arrivals = traces.mmpp(rate, count, seed, self.dwell)
        return traces.with_deadlines(arrivals, self.timeouts, self.buckets, seed)

    def under(self, kind: Kind) -> Scenario:
        """The same device under the other kind of traffic."""
        return replace(self, kind=kind)


GPU = Scenario("GPU", Cost(0.004, 0.0001), 128, (0.025,), 0.1, 0.005, (32, 64, 128))
CPU = Scenario("CPU", Cost(0.001, 0.004), 16, (0.1,), 1.0, 0.01, (4, 8, 16))
STUDY = tuple(device.under(kind) for device in (GPU, CPU) for kind in ("Poisson", "MMPP"))

# What the study left out. Each departs from GPU or CPU in one thing.
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
