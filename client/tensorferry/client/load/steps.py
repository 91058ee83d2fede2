"""Loads of a test: the steps that options name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

_MOST_IN_FLIGHT = 65_536
_MOST_PER_SECOND = 10_000_000.0


class BadOption(ValueError):
    """Text or file of an option that is wrong; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of an open loop: seconds after the start, and rows."""

    at: float
    rows: int


@dataclass(frozen=True, slots=True)
class Step:
    """One load, kept for the duration of a measurement.

    `concurrency` requests in flight (closed loop), or `rate` requests per second (open loop). With
    neither, the arrivals of a trace are sent.
    """

    concurrency: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        """The load in words."""
        if self.concurrency is not None:
            return f"{self.concurrency} in flight"
        return "trace" if self.rate is None else f"{self.rate:g} per second"


def concurrencies(text: str) -> tuple[Step, ...]:
    """Return the steps of `--concurrency`: a number, a list `1,8,32`, or a range `1:256` that doubles."""
    numbers = _numbers(text, f"whole numbers from 1 to {_MOST_IN_FLIGHT}", int, _MOST_IN_FLIGHT)
    return tuple(Step(concurrency=int(number)) for number in numbers)


def rates(text: str) -> tuple[Step, ...]:
    """Return the steps of `--rate`, in requests per second, as `concurrencies` does."""
    numbers = _numbers(text, "numbers above 0, per second", float, _MOST_PER_SECOND)
    return tuple(Step(rate=number) for number in numbers)


def _numbers(text: str, expected: str, read: Callable[[str], float], most: float) -> list[float]:
    low, colon, high = text.partition(":")
    try:
        found = [float(read(part)) for part in ((low, high) if colon else text.split(","))]
    except ValueError:
        found = [0.0]
    if not all(0 < number <= most for number in found):
        raise BadOption(
            f"expected {expected}, as one number, a list such as 1,8,32 or a range such as 1:256, got {text!r}"
        )
    if not colon:
        return found
    first, last = found
    if first > last:
        raise BadOption(f"expected a range from the smaller to the larger number, got {text!r}")
    doubled = (first * 2**power for power in itertools.count())
    return [*itertools.takewhile(lambda value: value < last, doubled), last]
