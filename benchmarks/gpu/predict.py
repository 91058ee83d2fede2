"""Prediction by the simulation of the two ways to close a batch, with the server's measured times.

The simulated queue is the server's own. The cost of its device is fitted by a line over the rows,
from the server's statistics; the time on the wire is subtracted from the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from costs import Cost
from measure import BLIND, Job, goodput
from policies import Peer, TwoEager
from scenarios import NOTHING, Scenario

from gpu.accounting import Stages

_LEAST_SECONDS = 1e-9
# Only used to tune peers, which this simulation does not include.
_NO_WINDOW, _NO_PREFERRED = 0.0, ()


@dataclass(frozen=True, slots=True)
class Predicted:
    """Rates at which 99 % are within the bound, closed just in time and eagerly, and the fit's offline
    rate.
    """

    just_in_time: float
    eager: float
    offline: float
    wire: float


def fitted(points: Mapping[int, tuple[float, float]]) -> Cost:
    """Fit a line through seconds by rows, with weights; which never decreases and is never negative."""
    weight = sum(weighs for _, weighs in points.values())
    rows = sum(rows * weighs for rows, (_, weighs) in points.items()) / weight
    seconds = sum(value * weighs for value, weighs in points.values()) / weight
    spread = sum(weighs * (at - rows) ** 2 for at, (_, weighs) in points.items())
    slope = sum(weighs * (at - rows) * (value - seconds) for at, (value, weighs) in points.items())
    per_row = max(slope / spread, 0.0) if spread else 0.0
    if seconds - per_row * rows < 0:
        per_row = seconds / rows
    return Cost(max(0.0, seconds - per_row * rows), max(per_row, _LEAST_SECONDS))


def stage(sizes: Mapping[int, Stages], seconds: Callable[[Stages], float]) -> Cost:
    """Return the cost of a stage, from the batches that ran."""
    return fitted({rows: (seconds(each) / each.batches, each.batches) for rows, each in sizes.items()})


def predict(
    sizes: Mapping[int, Stages],
    most: int,
    bound: float,
    wire: float,
    *,
    pipelined: bool,
    count: int,
    searches: int,
) -> Predicted | None:
    """Predict for a server with these batch times; None if the wire alone takes longer than the bound."""
    if wire >= bound:
        return None
    if pipelined:
        before, device, after = (
            stage(sizes, seconds)
            for seconds in (lambda each: each.before, lambda each: each.device, lambda each: each.after)
        )
    else:
        before, after = NOTHING, NOTHING
        device = stage(sizes, lambda each: each.before + each.device + each.after)
    scenario = Scenario(
        "measured",
        device,
        most,
        (bound - wire,),
        math.inf,
        _NO_WINDOW,
        _NO_PREFERRED,
        before=before,
        after=after,
    )

    def rate(policy: str) -> float:
        return goodput(Job(scenario, policy, seed=1, count=count, searches=searches)) * scenario.capacity

    return Predicted(rate(BLIND), rate(TwoEager.name if pipelined else Peer.name), scenario.capacity, wire)
