"""How long requests of a class may be queued and how many, and ranks instead of shares.

The cases of timeouts and sizes are those of Triton's own tests of its queue policies.
"""

from __future__ import annotations

import math
import random
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from hypothesis import given
from hypothesis import strategies as st
from polling import until
from support.batcher.rig import enqueue, error, new_request, occupy, reproducible, result, results, rows

from tensorferry.batcher import DeadlineExceeded, QueueFull, QueuePolicy, Request
from tensorferry.batcher.policy.priority_sharing import StrictPriority
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

REJECT = QueuePolicy(timeout=5.0)
DELAY = QueuePolicy(timeout=5.0, delays=True)


def expired(future: Future[Any]) -> bool:
    reason = error(future)
    assert isinstance(reason, DeadlineExceeded)
    return "the model's queue policy allows" in str(reason)


def test_a_shorter_queue_time_wakes_a_worker_that_waits_out_a_window(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(runner, 4, 60.0, policies=[QueuePolicy(20.0, overridable=True)], clock=clock)
    batcher.submit(1.0)
    clock.await_sleepers(until=20.0)
    _, sooner = enqueue(batcher, [2.0], max_queue_time=3.0)
    clock.await_sleepers(until=3.0)
    clock.advance(3.0)
    assert isinstance(sooner.await_outcome().error, DeadlineExceeded)


def test_timeouts_pass_in_their_order_although_many_requests_were_withdrawn(
    busy: Busy, clock: VirtualClock
) -> None:
    batcher, _ = busy(None, 1, policies=[QueuePolicy(100.0, overridable=True)], clock=clock)
    times = random.Random(1).sample(range(1, 97), 96)
    left = {}
    for number, time in enumerate(times):
        request, recorder = enqueue(batcher, [1.0], max_queue_time=float(time))
        left[time] = recorder
        if number % 2:
            batcher.cancel(request)
            del left[time]
    for time in sorted(left):
        clock.advance(time - clock.now())
        assert isinstance(left[time].await_outcome().error, DeadlineExceeded)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_part_of_a_request_that_times_out_while_devices_are_busy_ends_the_whole(
    busy: Busy, clock: VirtualClock, pipelined: bool
) -> None:
    batcher, _ = busy(None, 2, pipelined=pipelined, policies=[REJECT], clock=clock)
    if pipelined:
        batcher.submit_rows(np.zeros(2))
        until(lambda: batcher.statistics().sizes.queued == 0)
    future = batcher.submit_rows(np.arange(5.0))
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    assert expired(future)
    assert batcher.statistics().sizes.queued == 0


def test_a_preferred_batch_closes_without_delayed_requests(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    runner.open()
    batcher = make(runner, 8, 60.0, preferred_batch_sizes=(4, 8), policies=[DELAY], clock=clock)
    first = batcher.submit(1.0)
    clock.await_sleepers(until=5.0)
    clock.advance(6.0)
    others = [batcher.submit_rows(np.array([2.0, 3.0])) for _ in range(2)]
    assert [list(result(future)) for future in others] == [[4.0, 6.0]] * 2
    assert rows(runner) == [[2.0, 3.0, 2.0, 3.0]]
    clock.await_sleepers(until=60.0)
    clock.advance(54.0)
    assert result(first) == 2.0


def test_a_class_queues_a_number_of_requests_whatever_their_rows(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(
        runner,
        8,
        priority_weights=(1, 1),
        strict_priorities=True,
        policies=[QueuePolicy(max_requests=2), QueuePolicy(max_requests=1)],
    )
    occupy(batcher, runner)
    kept = [batcher.submit_rows(np.zeros(5), priority=1) for _ in range(2)]
    with pytest.raises(QueueFull, match=r"2 requests of priority 1 wait.*allows 2"):
        batcher.submit(1.0, priority=1)
    kept.append(batcher.submit(1.0, priority=2))
    with pytest.raises(QueueFull, match="1 requests of priority 2 wait"):
        batcher.submit(1.0, priority=2)
    runner.open()
    results(kept)
    result(batcher.submit(1.0, priority=1))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 2), st.sampled_from([1.0, 4.0, math.inf])),
        st.tuples(st.just("pass"), st.sampled_from([0.5, 3.0, 10.0]), st.just(0.0)),
        st.tuples(st.just("leave"), st.just(0), st.just(0.0)),
    ),
    max_size=60,
)
policies = st.builds(
    QueuePolicy,
    timeout=st.sampled_from([2.0, 5.0, math.inf]),
    overridable=st.booleans(),
    delays=st.booleans(),
    max_requests=st.sampled_from([0, 0, 2]),
)


@reproducible
@given(steps, policies, policies, st.booleans())
def test_every_request_ends_once_and_ranks_are_respected(
    steps: list[tuple[str, float, float]], high: QueuePolicy, low: QueuePolicy, merges: bool
) -> None:
    clock = VirtualClock()
    both = [high, low]
    settings = BatcherSettings(
        2, merge=merges, priority_weights=(1, 1), strict_priorities=True, policies=tuple(both)
    )
    queue = RequestQueue(settings, clock)
    # By request, when it times out.
    waiting: dict[Request, float] = {}
    left: list[Request] = []
    expired: list[Request] = []

    def leave() -> None:
        work = queue.poll()
        if not isinstance(work, BatchAssignment):
            return
        now = clock.now()
        for request in work.expired:
            assert waiting.pop(request) <= now
            assert not both[request.priority - 1].delays
        expired.extend(work.expired)
        for request in work.batch:
            policy = both[request.priority - 1]
            assert policy.delays or now < waiting[request]
            late = now >= waiting.pop(request)
            rank = (request.priority, late)
            behind = [other for other in waiting if (other.priority, now >= waiting[other]) < rank]
            assert all(other in work.batch for other in behind)
        assert len(work.batch) <= (2 if merges else 1)
        left.extend(work.batch)
        queue.finish(work.batch)
        queue.batch_done(work.batch, None)

    accepted = 0
    for kind, number, max_queue_time in steps:
        if kind == "pass":
            clock.advance(number)
        elif kind == "leave":
            leave()
        else:
            rank = (int(number) - 1) * settings.ranks_per_class
            request = new_request([1.0], max_queue_time=max_queue_time, priority=int(number), rank=rank)
            policy = both[request.priority - 1]
            queued = sum(other.priority == request.priority for other in waiting)
            try:
                queue.put([request])
            except QueueFull:
                assert queued >= policy.max_requests > 0
                continue
            assert not policy.max_requests or queued < policy.max_requests
            accepted += 1
            timeout = min(policy.timeout, max_queue_time) if policy.overridable else policy.timeout
            waiting[request] = clock.now() + timeout
    while waiting:
        leave()
    assert len({*left, *expired}) == len(left) + len(expired) == accepted


@reproducible
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 12))
def test_each_rank_gets_what_higher_ranks_leave(queued_rows: list[int], room: int) -> None:
    rows = StrictPriority(len(queued_rows)).allocate(queued_rows, queued_rows, room)
    assert sum(rows) == min(sum(queued_rows), room)
    for rank, count in enumerate(rows):
        assert count == queued_rows[rank] or sum(rows[rank + 1 :]) == 0
