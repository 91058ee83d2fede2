"""Conditions on the results of a load test, such as `p99<50ms`, and the largest rate that meets one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tensorferry.client.load.results import StepResult
from tensorferry.client.load.steps import Step

_FORM = re.compile(r"(p\d{2,3}|mean|errors|rate)\s*([<>])\s*(\d+(?:\.\d+)?)\s*(us|ms|s|%|/s)?")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
EXPECTED = "a condition such as p99<50ms, mean<2ms, errors<0.1% or rate>1000"

# The search for a rate ends when the bounds are this close, or after this many measurements.
_CLOSE, _MOST_STEPS = 1.03, 12
# A rate counts as kept if as large a share of it is answered.
_KEPT = 0.97


class BadCondition(ValueError):
    """Text that is no condition."""


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
        if not result.answered:
            return None
        if self.figure == "mean":
            return result.latencies.mean
        digits = self.figure[1:]
        return result.latencies.percentile(int(digits) / 10 ** len(digits))

    def holds(self, result: StepResult) -> bool:
        """Return whether a result meets the condition."""
        value = self.value(result)
        if value is None:
            return False
        return value > self.bound if self.above else value < self.bound


def condition(text: str) -> Condition:
    """Return the condition of a text; BadCondition if it is none."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise BadCondition(f"expected {EXPECTED}, got {text!r}")
    figure, sign, number, unit = found.groups()
    units = {"errors": ("%", None), "rate": ("/s", None)}.get(figure, tuple(_UNITS))
    if unit not in units:
        wanted = " or ".join(one or "none" for one in units)
        raise BadCondition(f"expected the unit {wanted} for {figure}, got {text!r}")
    factor = (
        _UNITS[unit] if unit in _UNITS and figure not in ("errors", "rate") else 0.01 if unit == "%" else 1.0
    )
    return Condition(text.strip(), figure, sign == ">", float(number) * factor)


def find_rate(run: Callable[[Step], StepResult], wanted: Condition, capacity: float) -> list[StepResult]:
    """Return the results of the rates that a bisection tries, in ascending order.

    `capacity` is a rate that the server does not exceed by much. A rate meets the condition if nearly all of it is answered,
    none of it with an error, and the condition holds.
    """
    found: list[StepResult] = []
    low, high = 0.0, capacity * 1.1
    while len(found) < _MOST_STEPS and high > low * _CLOSE:
        result = run(Step(rate=round((low + high) / 2, 3 if high < 10 else 0)))
        found.append(result)
        if meets(result, wanted):
            low = result.step.rate or 0.0
        else:
            high = result.step.rate or 0.0
    return sorted(found, key=lambda result: result.step.rate or 0.0)


def meets(result: StepResult, wanted: Condition) -> bool:
    """Return whether a rate is kept, without an error, and meets the condition."""
    kept = result.requests_per_second >= _KEPT * (result.step.rate or 0.0)
    return kept and not result.failed and wanted.holds(result)
