"""Loads of a test: the steps that options name, and the times at which requests are sent."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Arrivals = Literal["poisson", "constant"]

_MOST_IN_FLIGHT = 65_536
_MOST_PER_SECOND = 10_000_000.0


class BadLoad(ValueError):
    """Text of an option that names no load; the message says what was expected."""


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
    return tuple(
        Step(concurrency=int(number))
        for number in _numbers(text, "whole numbers from 1 to 65536", _MOST_IN_FLIGHT, whole=True)
    )


def rates(text: str) -> tuple[Step, ...]:
    """Return the steps of `--rate`, in requests per second, as `concurrencies` does."""
    return tuple(
        Step(rate=number)
        for number in _numbers(text, "numbers above 0, per second", _MOST_PER_SECOND, whole=False)
    )


def _numbers(text: str, expected: str, most: float, *, whole: bool) -> Sequence[float]:
    def number(part: str) -> float:
        try:
            value = float(int(part)) if whole else float(part)
        except ValueError:
            value = math.nan
        if not 0 < value <= most:
            raise BadLoad(
                f"expected {expected}, as one number, a list such as 1,8,32 or a range such as 1:256, got {text!r}"
            )
        return value

    first, colon, last = text.partition(":")
    if not colon:
        return [number(part) for part in text.split(",")]
    low, high = number(first), number(last)
    if low > high:
        raise BadLoad(f"expected a range from the smaller to the larger number, got {text!r}")
    doubled = itertools.takewhile(lambda value: value < high, (low * 2**power for power in itertools.count()))
    return [*doubled, high]


def share(total: int, parts: int, part: int) -> int:
    """Return the share of one of `parts` processes in a whole number; the first have the remainder."""
    return total // parts + (part < total % parts)


def poisson(rate: float, rows: int, seed: int) -> Iterator[Arrival]:
    """Yield arrivals whose distances are random and independent of each other, without end."""
    chance = random.Random(seed)
    at = 0.0
    while True:
        at += chance.expovariate(rate)
        yield Arrival(at, rows)


def constant(rate: float, rows: int, parts: int, part: int) -> Iterator[Arrival]:
    """Yield the arrivals of one of `parts` processes, whose sum has constant distances, without end."""
    return (Arrival((part + parts * number) / rate, rows) for number in itertools.count())


def arrivals_of(
    kind: Arrivals, rate: float, rows: int, parts: int, part: int, seed: int
) -> Iterator[Arrival]:
    """Return the arrivals of one of `parts` processes; all together send `rate` requests per second."""
    if kind == "constant":
        return constant(rate, rows, parts, part)
    # The sum of independent Poisson processes is a Poisson process of the sum of their rates.
    return poisson(rate / parts, rows, seed * parts + part)
