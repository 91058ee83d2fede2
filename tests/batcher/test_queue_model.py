"""Whatever is done to a queue, in whatever order: its sizes add up and no request is lost or doubled."""

from __future__ import annotations

import math

import numpy as np
from batcher.rig import Recorder, reproducible
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorferry.batcher import BatcherClosed, QueueFull, Request, RequestTooLarge
from tensorferry.batcher.collate import request_of
from tensorferry.batcher.policy import Limits
from tensorferry.batcher.queue import QueueSizes, RequestQueue
from tensorferry.batcher.request import State, split_request
from tensorferry.batcher.testing import VirtualClock

MAX_BATCH, MAX_ROWS, MAX_BYTES = 4, 12, 200


class QueueModel(RuleBasedStateMachine):
    """Three plain lists beside the real queue: what waits, what runs, what is over."""

    @initialize()
    def start(self) -> None:
        self.clock = VirtualClock()
        self.queue = RequestQueue(Limits(MAX_BATCH, 0.0), MAX_ROWS, MAX_BYTES, self.clock)
        self.queued: list[Request] = []
        self.batches: list[tuple[Request, ...]] = []
        self.over: list[Request] = []
        self.closed = False

    @property
    def running(self) -> list[Request]:
        return [request for batch in self.batches for request in batch if request not in self.over]

    @staticmethod
    def due(requests: list[Request]) -> float:
        """The earliest deadline, or a second after an arrival: how long batches take is not known here."""
        return min(min(request.deadline, request.arrival + 1.0) for request in requests)

    def end(self, requests: list[Request]) -> None:
        for request in requests:
            assert request not in self.over, "ended twice"
            if request in self.queued:
                self.queued.remove(request)
            self.over.append(request)

    @rule(rows=st.integers(0, 14), width=st.integers(1, 3), ttl=st.sampled_from([1.0, 3.0, math.inf]))
    def put(self, rows: int, width: int, ttl: float) -> None:
        whole = request_of(
            np.zeros((rows, width)), Recorder(), one_row=False, deadline=self.clock.now() + ttl
        )
        parts = [whole] if rows <= MAX_BATCH else list(split_request(whole, MAX_BATCH))
        cost, nbytes = max(1, rows), 8 * rows * width
        held = sum(request.nbytes for request in self.queued + self.running)
        try:
            self.queue.put(parts)
        except RequestTooLarge:
            assert cost > MAX_ROWS or nbytes > MAX_BYTES
        except BatcherClosed:
            assert self.closed
        except QueueFull:
            waiting = sum(request.cost for request in self.queued)
            assert waiting + cost > MAX_ROWS or held + nbytes > MAX_BYTES
        else:
            assert not self.closed
            self.queued += parts

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # With nothing queued, an open queue would wait for ever.
    @precondition(lambda self: self.queued or self.closed)
    @rule()
    def take(self) -> None:
        work = self.queue.take()
        if work is None:
            assert self.closed
            assert not self.queued
            return
        dead = [request for request in self.queued if request.deadline <= self.clock.now()]
        assert sorted(map(id, work.expired)) == sorted(map(id, dead))
        self.end(dead)
        assert bool(work.batch) == bool(self.queued), "work-conserving"
        if work.batch:
            assert len({request.key for request in work.batch}) == 1
            assert sum(request.cost for request in work.batch) <= MAX_BATCH
            same = [request for request in self.queued if request.key == work.batch[0].key]
            assert self.due(same) == self.due(self.queued), "the bucket that is due first leaves"
            same.sort(key=lambda request: request.deadline)
            assert list(work.batch) == same[: len(work.batch)], "by deadline, equal ones by arrival"
        for request in work.batch:
            self.queued.remove(request)
        self.batches.append(work.batch)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
        alive = [request for request in batch if request not in self.over]
        assert self.queue.still_running(batch) == alive
        assert self.queue.finish(batch) == alive
        self.end(alive)
        self.queue.ran((), None)

    @precondition(lambda self: self.queued or self.batches or self.over)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.queued + self.running + self.over))
        was_over = request in self.over
        assert self.queue.cancel(request) is not was_over
        if not was_over:
            self.end([request])

    @precondition(lambda self: self.closed)
    @rule()
    def abandon(self) -> None:
        gone = self.queue.abandon()
        assert sorted(map(id, gone)) == sorted(map(id, self.queued))
        self.end(gone)

    # Late in a run, or most runs would do nothing else.
    @precondition(lambda self: len(self.over) > 5)
    @rule()
    def close(self) -> None:
        self.queue.close()
        self.closed = True

    @invariant()
    def sizes_add_up(self) -> None:
        waiting, running = self.queued, self.running
        assert self.queue.sizes() == QueueSizes(
            len(waiting),
            sum(request.cost for request in waiting),
            len(running),
            sum(request.nbytes for request in waiting + running),
            (sum(request.cost for request in waiting),),
        )
        assert sum(request.cost for request in waiting) <= MAX_ROWS
        assert all(request.state is State.QUEUED for request in waiting)
        assert all(request.state is State.RUNNING for request in running)
        assert all(request.state is State.DONE for request in self.over)
        busy = bool(waiting or self.batches)
        assert self.queue.wait_done(self.clock.now()) is not busy


TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(reproducible, max_examples=200, stateful_step_count=40)
