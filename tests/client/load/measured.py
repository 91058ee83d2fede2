"""Measurements that tests define."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorferry.client.load.records import Tally
from tensorferry.client.load.results import StepResult
from tensorferry.client.load.server_statistics import ServerSide
from tensorferry.client.load.steps import Step

EIGHT = Step(concurrency=8)
SIDE = ServerSide(10, 1, 0.001, 0.002, 4.5, {4: 1, 5: 1})


def tally(
    *latencies: float,
    seconds: float = 1.0,
    cpu: float = 0.1,
    waited: float = 0.05,
    lags: Sequence[float] = (),
    failures: Mapping[str, tuple[int, str]] | None = None,
) -> Tally:
    """Return a tally; without seconds its answers came after the measurement."""
    arrived = len(latencies) if seconds else 0
    return Tally([*latencies], arrived, arrived, [*lags], dict(failures or {}), seconds, cpu, waited)


def measured(*tallies: Tally, step: Step = EIGHT, server: ServerSide | None = None) -> StepResult:
    """Return the result of one process with these tallies."""
    result = StepResult(step, server=server)
    for each in tallies:
        result.add([each])
    return result


def with_spread(latency: float, *rates: int, step: Step = EIGHT) -> StepResult:
    """Return a result of intervals with these rates, whose latencies grow by a tenth."""
    tallies = [tally(*[latency * (1 + number / 10)] * rate) for number, rate in enumerate(rates)]
    return measured(*tallies, step=step, server=SIDE)
