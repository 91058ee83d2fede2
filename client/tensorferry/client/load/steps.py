"""Loads of a test: the steps that options name, and the arrivals of recorded traces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_MOST_IN_FLIGHT = 65_536
_MOST_PER_SECOND = 10_000_000.0
# Largest time in a trace, in seconds.
_MOST_AT = 1e12


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


_FORM = 'expected {"at": SECONDS, "rows": NUMBER}, or a line of the server\'s access log'


def read_trace(path: Path, rows: int) -> tuple[Arrival, ...]:
    """Return the arrivals of a trace, from 0 on in order of time; `rows` is for lines without their own.

    A trace is a file of JSON lines. A line is `{"at": 0.25, "rows": 4}`: seconds since the beginning,
    and rows. Lines of a tensorferry server's access log in JSON are understood, too; other lines of
    that log are skipped.

    Raises BadOption, or OSError if the file cannot be read.
    """
    found: list[Arrival] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip() and (arrival := _arrival(line, f"{path}, line {number}", rows)):
                found.append(arrival)
    if not found:
        raise BadOption(f"{path} has no arrivals: {_FORM} on each line")
    first = min(arrival.at for arrival in found)
    return tuple(sorted((Arrival(one.at - first, one.rows) for one in found), key=lambda arrival: arrival.at))


def _arrival(line: str, place: str, rows: int) -> Arrival | None:
    """Return the arrival of a line; None for a line of the access log that is about no request."""
    try:
        fields = json.loads(line)
    except (RecursionError, ValueError):
        fields = None
    if not isinstance(fields, dict):
        raise BadOption(f"{place}: {_FORM}, got {line.strip()[:80]!r}")
    if "at" in fields or "message" not in fields:
        return Arrival(_number(fields.get("at"), place), _rows(fields.get("rows", rows), place))
    if fields.get("method") not in ("ModelInfer", "ModelStreamInfer") or "duration_seconds" not in fields:
        # Another line of the log.
        return None
    try:
        ended = datetime.fromisoformat(str(fields.get("time"))).timestamp()
    except ValueError:
        raise BadOption(f"{place}: expected an ISO 8601 time, got {fields.get('time')!r}") from None
    took = _number(fields["duration_seconds"], place)
    return Arrival(ended - took, _rows(fields.get("rows") or rows, place))


def _number(value: object, place: str) -> float:
    # In a comparison, large integers are not converted.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _MOST_AT:
        raise BadOption(f"{place}: {_FORM}, got {value!r} for the seconds")
    return float(value)


def _rows(value: object, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadOption(f"{place}: {_FORM}, got {value!r} for the rows")
    return value
