"""Recorded traces: when requests arrived, and how many rows each had.

A trace is a file of JSON lines. A line is `{"at": 0.25, "rows": 4}`: seconds since the beginning,
and rows, by default 1. Lines of a tensorferry server's access log in JSON are understood, too;
other lines of that log are skipped.
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path

from tensorferry.client.load.steps import Arrival, BadOption

_FORM = 'expected {"at": SECONDS, "rows": NUMBER}, or a line of the server\'s access log'


def read_trace(path: Path, rows: int) -> tuple[Arrival, ...]:
    """Return the arrivals of a trace, from 0 on in order of time; `rows` is for lines without their own.

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
    except ValueError:
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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadOption(f"{place}: {_FORM}, got {value!r} for the seconds")
    return float(value)


def _rows(value: object, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadOption(f"{place}: {_FORM}, got {value!r} for the rows")
    return value
