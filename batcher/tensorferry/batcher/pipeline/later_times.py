"""The time that the stages after each stage take at least."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.pipeline.graph import Graph
from tensorferry.batcher.request import BatchInfo

# Learned times are read again after this many seconds. Reading them takes each batcher's lock.
_VALID_SECONDS = 0.05
# The weight of a batch in the mean of the least waits, and the time after which a busy stage's waits are forgotten.
_WEIGHT = 0.2
_FORGOTTEN_SECONDS = 1.0


class LeastWait:
    """The shortest time in the queue of a stage that a request of each batch had: its mean over the last batches.

    Where earlier deadlines go first, a request with an early one waits about that long, however long others wait. The
    `timeout` of a request is the time from its arrival in the pipeline to its deadline. Two threads may lose an
    observation to each other, which is harmless.
    """

    def __init__(self) -> None:
        self._mean = self._mean_timeout = 0.0
        self._batch = 0
        self._ended = -math.inf
        # Of the last batch: the least queue delay, and the timeout of its request.
        self._least = (0.0, 0.0)

    def observe(self, batch: BatchInfo, queue_delay: float, timeout: float) -> None:
        """Note a request with a deadline that a batch answered."""
        if batch.ended - self._ended > _FORGOTTEN_SECONDS:
            self._mean = self._mean_timeout = 0.0
        self._ended = batch.ended
        if batch.number == self._batch:
            self._least = min(self._least, (queue_delay, timeout))
            return
        self._mean += _WEIGHT * (self._least[0] - self._mean)
        self._mean_timeout += _WEIGHT * (self._least[1] - self._mean_timeout)
        self._batch, self._least = batch.number, (queue_delay, timeout)

    def seconds(self, timeout: float, now: float, *, idle: bool) -> float:
        """Return the mean over the last batches, for a request with this timeout.

        It is 0 if the batches' requests had longer timeouts on average, because this one goes first. It is 0 if the last batch
        was a while ago, because a mean that lets no request in would never change again.
        """
        old = now - self._ended > (_VALID_SECONDS if idle else _FORGOTTEN_SECONDS)
        return 0.0 if old or timeout < self._mean_timeout else self._mean


class LaterTimes:
    """The least seconds from the end of each stage to the answer. Thread-safe.

    In each stage that is the time of a batch of the one request alone, and the least wait while the stage is busy. A stage
    whose times are not known takes 0, so that nothing is dropped for a guess.
    """

    def __init__(self, graph: Graph, clock: Clock) -> None:
        self._graph = graph
        self._clock = clock
        self.waits = [LeastWait() for _ in graph.stages]
        # By rows and power of two of the timeout. Replaced as a whole, so that two threads at most compute the same.
        self._known: dict[tuple[int, int], Sequence[float]] = {}
        self._valid_until = -math.inf

    def after(self, rows: int, timeout: float) -> Sequence[float]:
        """Return the seconds after each stage, for a request of these rows and this timeout.

        Timeouts count as the next power of two, so that those of about the mean get the same answer.
        """
        now = self._clock.now()
        if now >= self._valid_until:
            self._known, self._valid_until = {}, now + _VALID_SECONDS
        known, power = self._known, math.frexp(max(timeout, _VALID_SECONDS))[1]
        times = known.get((rows, power))
        if times is None:
            times = known[rows, power] = self._compute(rows, math.ldexp(1.0, power))[0]
        return times

    def total(self, rows: int) -> float:
        """Return the least seconds of all stages, for a request of these rows that waits nowhere."""
        return self._compute(rows, 0.0)[1]

    def _compute(self, rows: int, timeout: float) -> tuple[Sequence[float], float]:
        graph = self._graph
        with_own = [0.0] * len(graph.stages)
        after = [0.0] * len(graph.stages)
        for place in reversed(range(len(graph.stages))):
            after[place] = max([with_own[later] for later in graph.followers[place]], default=0.0)
            with_own[place] = self._own(place, rows, timeout) + after[place]
        return after, max([with_own[first] for first in graph.first])

    def _own(self, place: int, rows: int, timeout: float) -> float:
        """Return the least seconds of one stage."""
        try:
            batcher = self._graph.stages[place].model().batcher
            wait = self.waits[place].seconds(timeout, self._clock.now(), idle=batcher.idle)
            return batcher.least_time(rows) + wait
        except Exception:
            # The model is not served now. The request finds out when it gets there.
            return 0.0
