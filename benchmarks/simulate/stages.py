"""Pipelines of two stages in virtual time: the shipping `Pipeline` and queues, and greedy stages.

Every policy runs the product's `Pipeline`, driven by one thread. Only its stages' batchers differ.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Protocol

import numpy as np
from costs import Cost, Noise
from engine import WARMUP_ROWS, WARMUP_RUNS, Run
from scenarios import TwoStages
from shipping import MAX_BYTES, MAX_ROWS, HandClock, Shipping
from traces import Trace

from tensorferry.batcher import BatcherSettings, Outcome, Pipeline, Request, Stage, Tensor
from tensorferry.batcher.execution.completion import RequestCompleter
from tensorferry.batcher.pipeline.later_times import LaterTimes
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, BatchRun, CloseReason
from tensorferry.batcher.statistics.counters import Counters
from tensorferry.batcher.statistics.recent_batches import RecentBatches

_ROW = np.zeros(1)
_INPUT = (Tensor(_ROW.dtype, (1,), _ROW.tobytes()),)


class StageBatcher(Protocol):
    """The batcher of a stage, without threads: the simulation polls it."""

    def learn(self, rows: int, seconds: float) -> None:
        """Learn a warm-up run."""

    def take(self, now: float) -> tuple[Sequence[Request], float]:
        """Return the next batch for the idle device; or none, and when to ask again."""

    def ran(self, batch: Sequence[Request], started: float, now: float) -> None:
        """Complete a batch that ran."""


class ShippingStage:
    """The shipping queue and completion."""

    def __init__(self, max_batch_size: int, clock: HandClock) -> None:
        self.settings = BatcherSettings(max_batch_size, max_queue_size=MAX_ROWS, max_queue_bytes=MAX_BYTES)
        self.priorities = 1
        self._clock = clock
        self._queue = RequestQueue(self.settings, clock)
        self._completer = RequestCompleter(self._queue, Counters(), RecentBatches(clock), clock, "simulated")
        self._work: BatchAssignment | None = None

    def enqueue(self, request: Request, *, notify: bool = True, skip_admission: bool = False) -> bool:
        """See `Batcher.enqueue`."""
        self._queue.put((request,), skip_admission=skip_admission)
        return False

    def cancel(self, request: Request) -> bool:
        """See `Batcher.cancel`."""
        ended = self._queue.cancel((request,))
        if ended:
            self._queue.handed_out_completed()
        return bool(ended)

    def queue_full(self) -> None:
        """See `Batcher.queue_full`."""

    def least_time(self, rows: int) -> float:
        """See `Batcher.least_time`."""
        return self._queue.learning.least_time(rows)

    @property
    def idle(self) -> bool:
        """See `Batcher.idle`."""
        return self._queue.idle

    def learn(self, rows: int, seconds: float) -> None:
        """See `StageBatcher`."""
        self._queue.learning.add_warmup_sample(rows, seconds)

    def take(self, now: float) -> tuple[Sequence[Request], float]:
        """See `StageBatcher`."""
        while True:
            work = self._queue.poll()
            if isinstance(work, Wait):
                return (), work.until
            if work is None:
                raise RuntimeError("the queue is closed in the middle of a simulation")
            self._completer.expire(work.expired)
            self._completer.shed(work.shed, "others make their deadlines", self._queue.admission.drain_time())
            if work.batch:
                self._work = work
                return work.batch, math.inf
            self._queue.batch_done((), None)

    def ran(self, batch: Sequence[Request], started: float, now: float) -> None:
        """See `StageBatcher`."""
        assert self._work is not None
        run = BatchRun(
            0, False, CloseReason.IDLE, self._work.predicted, 0, started, started, started, started, now, []
        )
        self._completer.answer(batch, [{"out": _ROW}] * len(batch), run)
        self._queue.batch_done(batch, now - started)


class GreedyStage:
    """Takes what waits, in order of arrival, whatever the deadlines; with `drops`, not what has expired."""

    def __init__(self, max_batch_size: int, clock: HandClock, *, drops: bool = False) -> None:
        self.settings = BatcherSettings(max_batch_size)
        self.priorities = 1
        self._drops = drops
        self._queue: list[Request] = []

    def enqueue(self, request: Request, *, notify: bool = True, skip_admission: bool = False) -> bool:
        """Queue a request; all are accepted."""
        self._queue.append(request)
        return False

    def cancel(self, request: Request) -> bool:
        """Do nothing: only requests that are done are cancelled here."""
        return False

    def queue_full(self) -> None:
        """There is always room."""

    def least_time(self, rows: int) -> float:
        """Return 0, so that deadlines are passed on as they are."""
        return 0.0

    @property
    def idle(self) -> bool:
        """Whether waits do not count."""
        return True

    def learn(self, rows: int, seconds: float) -> None:
        """Learn nothing."""

    def take(self, now: float) -> tuple[Sequence[Request], float]:
        """See `StageBatcher`."""
        if self._drops:
            expired = [request for request in self._queue if request.deadline <= now]
            self._queue = [request for request in self._queue if request.deadline > now]
            for request in expired:
                request.complete(Outcome(error=TimeoutError()))
        rows = self.settings.max_batch_size
        batch, self._queue = self._queue[:rows], self._queue[rows:]
        return batch, math.inf

    def ran(self, batch: Sequence[Request], started: float, now: float) -> None:
        """See `StageBatcher`."""
        for request in batch:
            request.complete(Outcome({"out": _ROW}))


class NoLaterTimes(LaterTimes):
    """Passes deadlines on as they are, so that each stage decides alone."""

    def after(self, rows: int, timeout: float) -> Sequence[float]:
        """Return zeros."""
        return (0.0, 0.0)


SEPARATE = "tensorferry, each stage alone"
STAGE_POLICIES: dict[str, Callable[[int, HandClock], Any]] = {
    "greedy": GreedyStage,
    "greedy + drop expired": partial(GreedyStage, drops=True),
    SEPARATE: ShippingStage,
    Shipping.name: ShippingStage,
}


class _Device:
    """The device of a stage: what it runs."""

    def __init__(self, batcher: StageBatcher, cost: Cost, most: int) -> None:
        self.batcher = batcher
        self.cost = cost
        self.most = most
        self.running: Sequence[Request] = ()
        self.started = 0.0


def run_stages(trace: Trace, scenario: TwoStages, policy: str, noise: Noise) -> Run:
    """Simulate a trace until every request is answered or dropped. `batches` are those of the second stage."""
    clock = HandClock()
    devices = []
    for cost, most in (
        (scenario.cost, scenario.max_batch_size),
        (scenario.then, scenario.then_max_batch_size),
    ):
        device = _Device(STAGE_POLICIES[policy](most, clock), cost, most)
        devices.append(device)
        for rows in WARMUP_ROWS:
            device.batcher.learn(rows, _warm_up(cost, noise, rows))
    stages: list[Any] = [device.batcher for device in devices]
    pipeline = Pipeline(
        "simulated",
        [
            Stage("first", stages[0], {"in": "x"}, {"out": "m"}),
            Stage("second", stages[1], {"in": "m"}, {"out": "y"}),
        ],
        inputs=["x"],
        outputs=["y"],
        clock=clock,
    )
    if policy == SEPARATE:
        pipeline.later_times = NoLaterTimes(pipeline.graph, clock)
    return _Simulation(trace, pipeline, devices, clock, noise).run()


def _warm_up(cost: Cost, noise: Noise, rows: int) -> float:
    return min(cost(rows) * noise() for _ in range(WARMUP_RUNS))


class _Simulation:
    """Arrivals and ends of batches, in the order of their times."""

    def __init__(
        self, trace: Trace, pipeline: Pipeline, devices: Sequence[_Device], clock: HandClock, noise: Noise
    ) -> None:
        self._trace = trace
        self._pipeline = pipeline
        self._devices = devices
        self._clock = clock
        self._noise = noise
        self._answered = [math.nan] * len(trace.arrivals)
        self._dropped = [math.nan] * len(trace.arrivals)
        self._batches: list[int] = []
        self._busy = 0.0
        # Ends of batches; numbers break ties.
        self._events: list[tuple[float, int, _Device]] = []
        self._numbers = count()

    def run(self) -> Run:
        arrivals, arrived, timer = self._trace.arrivals, 0, math.inf
        while True:
            arrival = arrivals[arrived] if arrived < len(arrivals) else math.inf
            event = self._events[0][0] if self._events else math.inf
            now = self._clock.time = min(arrival, event, timer)
            if now == math.inf:
                break
            if now == arrival:
                self._arrive(arrived)
                arrived += 1
            elif now == event:
                device = heapq.heappop(self._events)[2]
                batch, device.running = device.running, ()
                device.batcher.ran(batch, device.started, now)
            timer = min(self._take(device, now) for device in self._devices)
        lost = sum(math.isnan(a) == math.isnan(d) for a, d in zip(self._answered, self._dropped, strict=True))
        if lost:
            raise RuntimeError(
                f"{lost} of {len(arrivals)} requests were not answered or dropped exactly once"
            )
        return Run(self._answered, self._dropped, self._batches, self._busy)

    def _arrive(self, index: int) -> None:
        request = Request(
            _INPUT,
            partial(self._complete, index),
            names=("x",),
            rows=1,
            nbytes=8,
            deadline=self._trace.deadlines[index],
        )
        try:
            self._pipeline.enqueue(request)
        except Exception:
            self._dropped[index] = self._clock.time

    def _complete(self, index: int, outcome: Outcome) -> None:
        ends = self._answered if outcome.error is None else self._dropped
        ends[index] = self._clock.time

    def _take(self, device: _Device, now: float) -> float:
        """Give an idle device its next batch; return when to ask again."""
        if device.running:
            return math.inf
        batch, until = device.batcher.take(now)
        if batch:
            seconds = device.cost(len(batch)) * self._noise()
            device.running, device.started = batch, now
            heapq.heappush(self._events, (now + seconds, next(self._numbers), device))
            self._busy += seconds
            if device is self._devices[-1]:
                self._batches.append(len(batch))
        return until
