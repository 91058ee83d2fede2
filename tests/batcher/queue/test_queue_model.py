"""Any sequence of operations on a queue: its sizes add up, and no request is lost or doubled.

Properties 1, 2, 4, 5, 6, 7, 10 and 11 of a queue with several classes, buckets and devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.batcher.rig import Recorder, new_request, reproducible

from tensorferry.batcher import BatcherClosed, DeadlineExceeded, QueueFull, Request, RequestTooLarge
from tensorferry.batcher.execution.splitting import split_request
from tensorferry.batcher.policy.class_queue import edf_key
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, State
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.statistics.counters import QueueSizes
from tensorferry.batcher.testing import VirtualClock

MAX_BATCH, MAX_ROWS, MAX_BYTES = 4, 12, 320
SECONDS = 0.5
# Half a second for every batch, known from the start: the upper bound is about 4 % higher.
UPPER = SECONDS * 1.04 + 50e-6


@dataclass
class Flight:
    """A batch in flight."""

    device: int
    batch: tuple[Request, ...]
    released: bool = False


class QueueModel(RuleBasedStateMachine):
    """Plain lists beside the real queue: queued, running and completed requests."""

    @initialize(
        classes=st.integers(1, 3),
        devices=st.integers(1, 3),
        pipelined=st.booleans(),
        window=st.sampled_from([0.0, 0.0, 1.5]),
        known=st.booleans(),
    )
    def start(self, classes: int, devices: int, pipelined: bool, window: float, known: bool) -> None:
        self.clock = VirtualClock()
        self.classes, self.devices, self.pipelined, self.window = classes, devices, pipelined, window
        self.known = known
        self.queue = RequestQueue(
            BatcherSettings(
                MAX_BATCH,
                window,
                max_queue_size=MAX_ROWS,
                max_queue_bytes=MAX_BYTES,
                devices=devices,
                pipelined=pipelined,
                priority_weights=(4, 2, 1)[:classes],
            ),
            self.clock,
        )
        if known:
            self.queue.learning.add_warmup_sample(1, SECONDS)
            self.queue.learning.add_warmup_sample(MAX_BATCH, SECONDS)
        self.queued: list[Request] = []
        self.flights: list[Flight] = []
        self.over: list[Request] = []
        self.closed = False
        # When a batch last ran: estimates older than a limit drop no request.
        self.observed = -math.inf

    @property
    def running(self) -> list[Request]:
        return [request for flight in self.flights for request in flight.batch if request not in self.over]

    def end(self, requests: list[Request]) -> None:
        for request in requests:
            assert request not in self.over, "ended twice"
            if request in self.queued:
                self.queued.remove(request)
            self.over.append(request)

    def complete(self, requests: Sequence[Request]) -> None:
        """Complete requests that the queue has handed out."""
        self.end(list(requests))
        if requests:
            assert not self.queue.wait_drained(self.clock.now()), "they are yet to be completed"
            self.queue.handed_out_completed()

    @rule(
        rows=st.sampled_from([0, 1, 1, 1, 2, 3, 4, 9, 14]),
        width=st.integers(1, 3),
        ttl=st.sampled_from([0.3, 3.0, 9.0, math.inf, math.inf]),
        rank=st.integers(0, 2),
    )
    def put(self, rows: int, width: int, ttl: float, rank: int) -> None:
        deadline = self.clock.now() + ttl
        whole = new_request(np.zeros((rows, width)), Recorder(), deadline=deadline)
        whole.rank = min(rank, self.classes - 1)
        parts = [whole] if rows <= MAX_BATCH else list(split_request(whole, lambda key: MAX_BATCH))
        assert {part.rank for part in parts} == {whole.rank}
        rows_counted, nbytes = max(1, rows), 8 * rows * width
        held = sum(request.nbytes for request in self.queued + self.running)
        waiting = sum(request.rows_counted for request in self.queued)
        lower = [request for request in self.queued if request.rank > whole.rank]
        before = list(self.queued)
        try:
            displaced = list(self.queue.put(parts)[0])
        except RequestTooLarge:
            assert rows_counted > MAX_ROWS or nbytes > MAX_BYTES
        except BatcherClosed:
            assert self.closed
        except QueueFull:
            room = waiting + rows_counted - MAX_ROWS <= sum(request.rows_counted for request in lower)
            assert not room or held + nbytes > MAX_BYTES
        except DeadlineExceeded:
            assert ttl < math.inf
            assert self.flights or self.observed > -math.inf, "an idle device of which nothing is known"
        else:
            assert not self.closed
            assert all(request in lower for request in displaced), "only lower classes make room"
            spared = [request for request in lower if request not in displaced]
            for gone in displaced:
                assert not any(other.rank > gone.rank for other in spared), "the lowest class first"
            missing = waiting + rows_counted - MAX_ROWS
            assert sum(request.rows_counted for request in displaced[:-1]) < max(missing, 1), (
                "no more than needed"
            )
            self.complete(displaced)
            self.queued += parts
            return
        assert self.queued == before
        assert all(part.state is State.NEW for part in parts)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(device=st.integers(0, 2))
    def poll(self, device: int) -> None:
        """Poll like an idle worker."""
        device %= self.devices
        mine = [flight for flight in self.flights if flight.device == device]
        if len(mine) > self.pipelined:
            return
        busy = any(not flight.released for flight in mine)
        now = self.clock.now()
        work = self.queue.poll(device)
        if isinstance(work, Wait):
            assert work.until > now, "no wait is already over: a worker would spin"
            assert busy or self.window or not self.queued, "work-conserving"
            assert not self.queued or busy or work.until < math.inf, "a device takes what waits"
            return
        if work is None:
            assert self.closed
            assert not self.queued
            return
        assert bool(work.batch) == (work.reason is not None), "a batch that starts has members"
        self.check_dropped(work, now, busy)
        if work.batch:
            self.check_batch(work, now, busy)
            self.flights.append(Flight(device, work.batch))
        else:
            self.queue.batch_done((), None, device=device)

    def check_dropped(self, work: BatchAssignment, now: float, busy: bool) -> None:
        passed = [request for request in self.queued if request.deadline <= now]
        assert set(passed) <= set(work.expired)
        trusted = now - self.observed < 1.0
        for request in work.expired:
            slack = request.deadline - now
            assert slack <= 0 or busy or (trusted and slack < 2 * UPPER), "it could have been in time"
        self.end(list(work.expired))
        for gone in work.shed:
            assert gone.deadline < math.inf, "a request without a deadline is never shed"
            assert all(
                gone.deadline <= request.deadline for request in work.batch if request.rank == gone.rank
            )
        self.end(list(work.shed))

    def check_batch(self, work: BatchAssignment, now: float, busy: bool) -> None:
        assert len({request.key for request in work.batch}) == 1
        assert sum(request.rows_counted for request in work.batch) <= MAX_BATCH
        for rank in range(self.classes):
            of_class = [r for r in self.queued if r.rank == rank and r.key == work.batch[0].key]
            without_deadline = [request for request in of_class if request.deadline == math.inf]
            taken = [request for request in work.batch if request in without_deadline]
            assert taken == without_deadline[: len(taken)], "those without deadline in order of arrival"
            with_deadline = [
                request for request in work.batch if request.rank == rank and request not in without_deadline
            ]
            assert with_deadline == sorted(with_deadline, key=edf_key), "the earliest deadline first"
        if self.known and not busy and self.observed == -math.inf:
            late = [request for request in work.batch if now + UPPER > request.deadline + 1e-9]
            # Warm-up samples do not refuse requests; such a request leads a batch alone.
            assert len(late) <= 1
        for request in work.batch:
            self.queued.remove(request)

    @precondition(lambda self: any(not flight.released for flight in self.flights))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Complete the first batch of a device."""
        device = data.draw(st.sampled_from(sorted({f.device for f in self.flights if not f.released})))
        flight = next(f for f in self.flights if f.device == device and not f.released)
        flight.released = True
        if self.pipelined:
            self.queue.run_done(device)

    @precondition(lambda self: any(flight.released for flight in self.flights))
    @rule(data=st.data(), failed=st.booleans())
    def finish(self, data: st.DataObject, failed: bool) -> None:
        flight = data.draw(st.sampled_from([f for f in self.flights if f.released]))
        alive = [request for request in flight.batch if request not in self.over]
        assert self.queue.still_running(flight.batch) == alive
        assert self.queue.finish(flight.batch) == alive
        self.end(alive)
        self.flights.remove(flight)
        self.queue.batch_done(flight.batch, None if failed else SECONDS, device=flight.device)
        if not failed:
            self.observed = self.clock.now()

    @precondition(lambda self: self.queued or self.flights or self.over)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.queued + self.running + self.over))
        was_over = request in self.over
        ended = list(self.queue.cancel([request]))
        assert ended == ([] if was_over else [request])
        self.complete(ended)

    # It would wait for ever otherwise.
    @precondition(lambda self: any(request.deadline <= self.clock.now() for request in self.queued))
    @rule()
    def take_expired(self) -> None:
        """Poll like the expiry thread, which runs while all workers are busy; no thread waits here."""
        dead = self.queue.take_expired()
        assert dead
        assert {r for r in self.queued if r.deadline <= self.clock.now()} <= set(dead)
        self.complete(dead)

    @precondition(lambda self: self.closed)
    @rule()
    def abandon(self) -> None:
        gone = self.queue.fail_all()
        assert sorted(map(id, gone)) == sorted(map(id, self.queued))
        self.complete(gone)

    # Late in a run, or most runs would do nothing else.
    @precondition(lambda self: len(self.over) > 8)
    @rule()
    def close(self) -> None:
        self.queue.close()
        self.closed = True

    @invariant()
    def sizes_add_up(self) -> None:
        waiting, running = self.queued, self.running
        by_class = [sum(r.rows_counted for r in waiting if r.rank == rank) for rank in range(self.classes)]
        assert self.queue.sizes() == QueueSizes(
            len(waiting),
            sum(by_class),
            len(running),
            sum(request.nbytes for request in waiting + running),
            tuple(by_class),
        )
        assert sum(by_class) <= MAX_ROWS
        assert self.queue._backlog.deadlines == sum(request.deadline < math.inf for request in waiting)
        assert all(request.state is State.QUEUED for request in waiting)
        assert all(request.state is State.RUNNING for request in running)
        assert all(request.state is State.DONE for request in self.over)
        assert self.queue.wait_drained(self.clock.now()) is not bool(waiting or self.flights)


TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(reproducible, max_examples=100, stateful_step_count=40)
