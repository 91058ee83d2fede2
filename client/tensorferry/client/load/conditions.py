"""Conditions on the results of a load test, such as `p99<50ms`, and the largest rate that meets one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tensorferry.client.load.results import StepResult
from tensorferry.client.load.steps import BadOption, Step

_FORM = re.compile(r"(p(?!100)\d{2}(?:\.?\d)?|mean|errors|rate)\s*([<>])\s*(\d+(?:\.\d+)?)\s*(us|ms|s|%|/s)?")
# Factors of the units of a figure; all others are latencies.
_UNITS: Mapping[str, Mapping[str | None, float]] = {
    "errors": {"%": 0.01, None: 1.0},
    "rate": {"/s": 1.0, None: 1.0},
}
_TIMES: Mapping[str | None, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_EXPECTED = "a condition such as p99<50ms, mean<2ms, errors<0.1% or rate>1000"

# The search for a rate ends when the bounds are this close, or after this many rates.
_CLOSE, _MOST_RATES = 1.03, 12
# A rate counts as kept if as large a share of it is answered. Random arrivals may be fewer by as many standard deviations.
_KEPT, _DEVIATIONS = 0.97, 3


@dataclass(frozen=True, slots=True)
class Condition:
    """A bound of a figure of each step: a latency in seconds, the share of calls that failed, or answers per second."""

    text: str
    figure: str
    above: bool
    bound: float

    def value(self, result: StepResult) -> float | None:
        """Return the figure; None if there was no answer to take it from."""
        if self.figure == "rate":
            return result.requests_per_second
        if self.figure == "errors":
            calls = result.answered + result.failed
            return result.failed / calls if calls else None
        if self.figure == "mean":
            return result.latencies.mean
        digits = self.figure[1:].replace(".", "")
        return result.latencies.percentile(int(digits) / 10 ** len(digits))

    def holds(self, result: StepResult) -> bool:
        """Return whether a result meets the condition."""
        value = self.value(result)
        if value is None:
            return False
        return value > self.bound if self.above else value < self.bound


def condition(text: str) -> Condition:
    """Return the condition of a text; BadOption if it is none."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise BadOption(f"expected {_EXPECTED}, got {text!r}")
    figure, sign, number, unit = found.groups()
    units = _UNITS.get(figure, _TIMES)
    if unit not in units:
        wanted = " or ".join(one or "none" for one in units)
        raise BadOption(f"expected the unit {wanted} for {figure}, got {text!r}")
    return Condition(text.strip(), figure, sign == ">", float(number) * units[unit])


def find_rate(run: Callable[[Step], StepResult], wanted: Condition, capacity: float) -> Iterator[StepResult]:
    """Yield the results of the rates that a bisection tries, in this order.

    `capacity` is a rate that the server does not exceed by much. A rate that does not meet the
    condition is measured once more before it counts, because noise can be the reason.
    """
    low, high, bounded = 0.0, capacity * 1.1, False
    for _ in range(_MOST_RATES):
        if high <= low * _CLOSE:
            if bounded:
                return
            # Every rate met the condition, so noise has made the capacity too low.
            high = low * 2
        rate = float(f"{(low + high) / 2:.3g}")
        result = run(Step(rate=rate))
        if not meets(result, wanted):
            result = run(Step(rate=rate))
        yield result
        if meets(result, wanted):
            low = rate
        else:
            high, bounded = rate, True


def meets(result: StepResult, wanted: Condition) -> bool:
    """Return whether a rate is kept, without an error, and meets the condition."""
    expected = result.seconds * (result.step.rate or 0.0)
    kept = result.arrived >= _KEPT * expected - _DEVIATIONS * math.sqrt(expected)
    return kept and not result.failed and wanted.holds(result)
