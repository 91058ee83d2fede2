"""For each interval of a model's latencies, a request in it that somebody traced: where to look for why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from tensorferry.batcher import BOUNDS, interval_of
from tensorferry.server.telemetry.trace_context import TRACEPARENT, parse_trace_context


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
    context = parse_trace_context(((TRACEPARENT, traceparent),))
    return context.trace_id if context is not None and context.sampled else None
