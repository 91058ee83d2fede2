"""For each interval of a model's latencies, a request in it that somebody traced: where to look for why."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from tensorferry.batcher import BOUNDS, interval_of

# The header of W3C Trace Context: version, trace, span, flags, of which the last bit says that the trace is kept.
# Of a later version more may follow.
_SAMPLED = re.compile(
    r"(?:00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f][13579bdf]"
    r"|(?!ff|00)[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f][13579bdf](?:-.*)?)"
)
_NO_TRACE = "0" * 32


class Exemplar(NamedTuple):
    """A request that was answered after so many seconds, `at` this time since 1970."""

    trace_id: str
    seconds: float
    at: float


class Exemplars:
    """The latest traced request in each interval of `BOUNDS`. Thread-safe: each is replaced as a whole."""

    def __init__(self) -> None:
        self._latest: list[Exemplar | None] = [None] * (len(BOUNDS) + 1)

    def note(self, traceparent: str | bytes, seconds: float) -> None:
        """A request with this header was answered; it counts if its trace is kept."""
        trace_id = sampled_trace(traceparent)
        if trace_id is not None:
            self._latest[interval_of(seconds)] = Exemplar(trace_id, seconds, time.time())

    def latest(self) -> Sequence[Exemplar | None]:
        """By the number of the interval."""
        return tuple(self._latest)


def sampled_trace(traceparent: str | bytes) -> str | None:
    """The identifier of the trace, in hexadecimal; None where the header is not valid or the trace is not kept."""
    if isinstance(traceparent, bytes):
        return None
    match = _SAMPLED.fullmatch(traceparent)
    trace_id = match and (match[1] or match[2])
    return None if trace_id == _NO_TRACE else trace_id
