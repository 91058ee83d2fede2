"""What the simulation says of the two ways to close a batch, with the times that the server itself took.

The simulated queue is the one that the server runs. Its device costs what the server's statistics
say, fitted by a line over the rows; the time that requests spend on the wire is taken from the bound.
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
# Only peers that a simulation does not ask for here are tuned by these.
_NO_WINDOW, _NO_PREFERRED = 0.0, ()


@dataclass(frozen=True, slots=True)
class Predicted:
    """Rates at which 99 % are within the bound, closed just in time and eagerly, and the offline rate of the fit."""

    just_in_time: float
    eager: float
    offline: float
    wire: float


def fitted(points: Mapping[int, tuple[float, float]]) -> Cost:
    """The line through seconds by rows, each with its weight; never falling, and never below nothing."""
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
    """What a stage costs, of the batches that ran."""
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
    """Of a server whose batches took these times; None where the wire alone takes longer than the bound."""
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
