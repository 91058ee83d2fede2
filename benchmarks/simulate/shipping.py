"""The shipping queue as a scheduler of the simulation: its own policy, latency model and shedding.

It is the server's class, driven by one thread on a clock that the simulation sets.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import ClassVar

from engine import Step, Times
from scenarios import Scenario
from traces import Trace

from tensorferry.batcher.errors import DeadlineExceeded, QueueFull
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Outcome, Request
from tensorferry.batcher.settings import BatcherSettings

# So high that only deadlines refuse requests, as with the peers.
MAX_ROWS = 1_000_000
MAX_BYTES = 1_000_000_000


class HandClock:
    """A clock that the simulation sets; nothing waits on it."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """Return the time that was set."""
        return self.time

    def wait(self, condition: threading.Condition, until: float) -> None:
        """Raise, because with one thread a wait would never end."""
        raise RuntimeError("the queue waits in a simulation of one thread; drive it with poll, not take")


class Numbered(Request):
    """A request with its number in the trace."""

    __slots__ = ("index",)

    def __init__(self, index: int, key: int, deadline: float, level: int) -> None:
        super().__init__((), _ignore, names=None, rows=1, nbytes=0, key=key, deadline=deadline)
        self.index = index
        self.rank = level


def _ignore(outcome: Outcome) -> None:
    """Do nothing: the simulation records outcomes itself."""


class Shipping:
    """`RequestQueue` behind the simulation's interface.

    Without `weights` there are no classes. `deadlines` passes the requests' deadlines; `pipelined`
    pipelines if the host has a part in batches. `adaptive` learns which batch size pays.
    """

    name: ClassVar[str] = "tensorferry"
    polls_busy = False

    def __init__(
        self,
        scenario: Scenario,
        trace: Trace,
        *,
        weights: tuple[int, ...] = (),
        deadlines: bool = True,
        pipelined: bool = True,
        adaptive: bool = True,
    ) -> None:
        self._trace = trace
        self._deadlines = deadlines
        self._levels = trace.levels if weights and trace.levels else [0] * len(trace.arrivals)
        self._pipelined = pipelined and scenario.pipelined
        self.in_flight = 2 if self._pipelined else 1
        self._clock = HandClock()
        self._queue = RequestQueue(
            BatcherSettings(
                scenario.max_batch_size,
                0.0,
                max_queue_size=MAX_ROWS,
                max_queue_bytes=MAX_BYTES,
                devices=scenario.devices,
                pipelined=self._pipelined,
                priority_weights=weights or (1,),
                adaptive=adaptive,
            ),
            self._clock,
        )
        # What is in flight and when it left, by the first request of each.
        self._running: dict[int, tuple[BatchAssignment, float]] = {}

    def anchor(self, key: int, rows: int, seconds: float) -> None:
        """Learn a warm-up run of the first shape; the other buckets' models start from it."""
        if key == 0:
            self._queue.learning.add_warmup_sample(rows, seconds)

    def put(self, index: int, now: float) -> bool:
        """Submit a request as the batcher does."""
        self._clock.time = now
        trace = self._trace
        deadline = trace.deadlines[index] if self._deadlines else math.inf
        request = Numbered(index, trace.keys[index], deadline, self._levels[index])
        try:
            self._queue.put((request,))
        except (QueueFull, DeadlineExceeded):
            return False
        return True

    def poll(self, now: float, device: int | None) -> Step:
        """Poll for a free worker."""
        self._clock.time = now
        work = self._queue.poll(device or 0)
        if isinstance(work, Wait):
            return Step(until=work.until)
        if not isinstance(work, BatchAssignment):
            raise RuntimeError(f"the queue is closed in the middle of a simulation: it answered {work!r}")
        batch = _numbers(work.batch)
        if batch:
            self._running[batch[0]] = work, now
        else:
            # Nothing to run: the worker completes the dropped requests and polls again.
            self._queue.batch_done((), None)
        return Step(batch, _numbers(work.expired) + _numbers(work.shed))

    def released(self, device: int, now: float) -> None:
        """Note that a device has run a batch, as a worker does if it is pipelined."""
        if self._pipelined:
            self._clock.time = now
            self._queue.run_done(device)

    def ran(self, batch: Sequence[int], device: int, times: Times, now: float) -> None:
        """Note that a worker has completed its batch."""
        self._clock.time = now
        requests = self._running.pop(batch[0])[0].batch
        self._queue.finish(requests)
        self._queue.batch_done(requests, times.device, times.before, times.after, device=device)


def _numbers(requests: Sequence[Request]) -> list[int]:
    return [request.index for request in requests if isinstance(request, Numbered)]
