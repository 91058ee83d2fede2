"""Exemplars: a traced request for each interval of a model's latency histogram."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from tensorferry.batcher import BOUNDS, interval_of
from tensorferry.server.observability.logs.trace_context import TRACEPARENT, parse_trace_context


class Exemplar(NamedTuple):
    """Traced request with a latency of `seconds`, answered `at` this time (seconds since 1970)."""

    trace_id: str
    seconds: float
    at: float


class Exemplars:
    """Latest traced request in each interval of `BOUNDS`. Thread-safe."""

    def __init__(self) -> None:
        self._latest: list[Exemplar | None] = [None] * (len(BOUNDS) + 1)

    def record(self, traceparent: str | bytes, seconds: float) -> None:
        """Record an answered request with this header, if its trace is sampled."""
        context = parse_trace_context(((TRACEPARENT, traceparent),))
        if context is not None and context.sampled:
            self._latest[interval_of(seconds)] = Exemplar(context.trace_id, seconds, time.time())

    def latest(self) -> Sequence[Exemplar | None]:
        """Return the exemplars by interval."""
        return tuple(self._latest)
