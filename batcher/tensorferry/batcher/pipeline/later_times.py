"""The time that the stages after each stage take at least."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.pipeline.graph import Graph

# Learned times are read again after this many seconds. Reading them takes each batcher's lock.
_VALID_SECONDS = 0.05


class LaterTimes:
    """The least seconds from the end of each stage to the answer: those of batches of the one request alone. Thread-safe.

    A stage whose times are not known takes 0, so that nothing is dropped for a guess.
    """

    def __init__(self, graph: Graph, clock: Clock) -> None:
        self._graph = graph
        self._clock = clock
        # By rows. Replaced as a whole, so that two threads at most compute the same.
        self._by_rows: dict[int, Sequence[float]] = {}
        self._valid_until = -float("inf")

    def after(self, rows: int) -> Sequence[float]:
        """Return the seconds after each stage, for a request of these rows."""
        now = self._clock.now()
        if now >= self._valid_until:
            self._by_rows, self._valid_until = {}, now + _VALID_SECONDS
        by_rows = self._by_rows
        times = by_rows.get(rows)
        if times is None:
            times = by_rows[rows] = self._compute(rows)[0]
        return times

    def total(self, rows: int) -> float:
        """Return the least seconds of all stages, for a request of these rows."""
        return self._compute(rows)[1]

    def _compute(self, rows: int) -> tuple[Sequence[float], float]:
        graph = self._graph
        with_own = [0.0] * len(graph.stages)
        after = [0.0] * len(graph.stages)
        for place in reversed(range(len(graph.stages))):
            after[place] = max([with_own[later] for later in graph.followers[place]], default=0.0)
            try:
                own = graph.stages[place].model().batcher.least_time(rows)
            except Exception:
                # The model is not served now. The request finds out when it gets there.
                own = 0.0
            with_own[place] = own + after[place]
        return after, max([with_own[first] for first in graph.first])
