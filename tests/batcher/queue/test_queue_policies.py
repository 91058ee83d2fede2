"""How long requests of a class may be queued and how many, and ranks instead of shares.

The cases of timeouts and sizes are those of Triton's own tests of its queue policies.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from hypothesis import given
from hypothesis import strategies as st
from polling import until
from support.batcher.rig import Recorder, error, occupy, reproducible, result, rows

from tensorferry.batcher import (
    Batcher,
    DeadlineExceeded,
    QueueFull,
    QueuePolicy,
    Request,
)
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.policy.priority_sharing import StrictPriority
from tensorferry.batcher.queue.expiry import TimeoutHeap
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

REJECT = QueuePolicy(timeout=5.0)
DELAY = QueuePolicy(timeout=5.0, delays=True)


def without_deadline(batcher: Batcher, tag: float, max_queue_time: float, priority: int = 0) -> Recorder:
    """A request of one row with this queue timeout."""
    recorder = Recorder()
    request = request_of(np.array([tag]), recorder, one_row=False)
    request.max_queue_time, request.priority = max_queue_time, priority
    batcher.enqueue(request)
    return recorder


def expired(future: Future[Any]) -> bool:
    reason = error(future)
    assert isinstance(reason, DeadlineExceeded)
    return "the model's queue policy allows" in str(reason)


# Timeouts.


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_queue_timeout_fails_the_request_while_devices_are_busy(
    make: Make, runner: ScriptedRunner, clock: VirtualClock, workers: int, pipelined: bool
) -> None:
    batcher = make(runner, 1, workers=workers, pipelined=pipelined, policies=[REJECT], clock=clock)
    busy = [batcher.submit(0.0) for _ in range(workers * (2 if pipelined else 1))]
    runner.await_batches(workers)
    until(lambda: batcher.statistics().sizes.queued == 0)
    late = batcher.submit(1.0)
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    assert expired(late)
    assert not any(future.done() for future in busy)
    runner.open()
    assert [result(future) for future in busy] == [0.0] * len(busy)


def test_a_timeout_ends_with_the_queue(make: Make, runner: ScriptedRunner, clock: VirtualClock) -> None:
    """Unlike a deadline: a batch that has started may take any time."""
    batcher = make(runner, 4, policies=[REJECT], clock=clock)
    future = occupy(batcher, runner)
    clock.advance(1000.0)
    runner.open()
    assert result(future) == 0.0


def test_a_queue_timeout_within_the_window_fails_the_request(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(runner, 4, 60.0, policies=[REJECT], clock=clock)
    alone = batcher.submit(1.0)
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    assert expired(alone)
    assert runner.batches == []


def test_a_shorter_queue_time_wakes_a_worker_that_waits_out_a_window(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(runner, 4, 60.0, policies=[QueuePolicy(20.0, overridable=True)], clock=clock)
    batcher.submit(1.0)
    clock.await_sleepers(until=20.0)
    sooner = without_deadline(batcher, 2.0, 3.0)
    clock.await_sleepers(until=3.0)
    clock.advance(3.0)
    assert isinstance(sooner.await_outcome().error, DeadlineExceeded)


@pytest.mark.parametrize(
    ("policy", "max_queue_time", "after"),
    [
        (QueuePolicy(5.0), 1.0, 5.0),
        (QueuePolicy(5.0, overridable=True), 1.0, 1.0),
        (QueuePolicy(5.0, overridable=True), 50.0, 5.0),
        (QueuePolicy(5.0, overridable=True), math.inf, 5.0),
        (QueuePolicy(overridable=True), 1.0, 1.0),
        (QueuePolicy(overridable=True), math.inf, math.inf),
        (QueuePolicy(), 1.0, math.inf),
    ],
)
def test_a_request_may_ask_for_less_where_it_is_allowed_and_never_for_more(
    policy: QueuePolicy, max_queue_time: float, after: float
) -> None:
    clock = VirtualClock(100.0)
    queue = RequestQueue(
        BatcherSettings(8, 1000.0, max_queue_size=100, max_queue_bytes=1 << 20, policies=(policy,)), clock
    )
    request = one(max_queue_time)
    queue.put([request])
    for moment in (0.5, 1.0, 3.0, 5.0, 60.0):
        clock.advance(100.0 + moment - clock.now())
        work = queue.poll()
        if moment >= after:
            assert isinstance(work, BatchAssignment)
            assert work.expired == (request,)
            assert request.timed_out
            break
        assert not isinstance(work, BatchAssignment)
    else:
        assert after == math.inf


def one(max_queue_time: float = math.inf, priority: int = 1, ranks: int = 1) -> Request:
    request = request_of(np.zeros((1, 1)), Recorder(), one_row=False)
    request.max_queue_time, request.priority, request.rank = max_queue_time, priority, (priority - 1) * ranks
    return request


def test_a_part_of_a_request_that_times_out_ends_the_whole(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(runner, 2, policies=[REJECT], clock=clock)
    occupy(batcher, runner)
    future = batcher.submit_rows(np.arange(5.0))
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    assert expired(future)
    assert batcher.statistics().sizes.queued == 0


def test_parts_of_a_request_have_its_max_queue_time(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(runner, 2, policies=[QueuePolicy(overridable=True)], clock=clock)
    occupy(batcher, runner)
    recorder = Recorder()
    request = request_of(np.arange(5.0), recorder, one_row=False)
    request.max_queue_time = 3.0
    batcher.enqueue(request)
    clock.await_sleepers(until=3.0)
    clock.advance(3.0)
    assert isinstance(recorder.await_outcome().error, DeadlineExceeded)


# Delay.


def test_delayed_requests_run_after_those_with_time_left(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(runner, 2, policies=[DELAY], clock=clock)
    occupy(batcher, runner)
    futures = [batcher.submit(value) for value in (1.0, 2.0)]
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    futures += [batcher.submit(value) for value in (3.0, 4.0)]
    assert batcher.statistics().sizes.class_rows == (4,)
    runner.open()
    assert [result(future) for future in futures] == [2.0, 4.0, 6.0, 8.0]
    assert rows(runner, 1) == [[3.0, 4.0], [1.0, 2.0]]


def test_delayed_requests_run_before_lower_classes(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(
        runner, 1, priority_weights=(1, 1), strict_priorities=True, policies=[DELAY, DELAY], clock=clock
    )
    occupy(batcher, runner)
    recorders = [without_deadline(batcher, tag, math.inf, priority=2) for tag in (4.0, 5.0)]
    recorders.append(without_deadline(batcher, 2.0, math.inf, priority=1))
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    recorders += [
        without_deadline(batcher, tag, math.inf, priority) for tag, priority in ((1.0, 1), (3.0, 2))
    ]
    runner.open()
    outcomes = [recorder.await_outcome() for recorder in recorders]
    assert rows(runner, 1) == [[1.0], [2.0], [3.0], [4.0], [5.0]]
    assert [outcome.priority for outcome in outcomes] == [2, 2, 1, 1, 2]


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


def test_one_class_may_reject_and_another_delay(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(
        runner, 1, priority_weights=(1, 1), strict_priorities=True, policies=[DELAY, REJECT], clock=clock
    )
    occupy(batcher, runner)
    high, low = batcher.submit(1.0, priority=1), batcher.submit(2.0, priority=2)
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    assert expired(low)
    runner.open()
    assert result(high) == 2.0


# Queue sizes.


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
    for future in kept:
        result(future)
    result(batcher.submit(1.0, priority=1))


def test_delayed_ones_count() -> None:
    clock = VirtualClock()
    policy = QueuePolicy(5.0, delays=True, max_requests=1)
    queue = RequestQueue(
        BatcherSettings(8, 1000.0, max_queue_size=100, max_queue_bytes=1 << 20, policies=(policy,)), clock
    )
    delayed = one(ranks=2)
    queue.put([delayed])
    clock.advance(5.0)
    assert not isinstance(queue.poll(), BatchAssignment)
    assert delayed.rank == 1
    with pytest.raises(
        QueueFull, match="1 requests of priority 1 wait, and the model's queue policy allows 1"
    ):
        queue.put([one(ranks=2)])


# All of it together.

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
        2,
        merge=merges,
        max_queue_size=1000,
        max_queue_bytes=1 << 20,
        priority_weights=(1, 1),
        strict_priorities=True,
        policies=tuple(both),
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
            request = one(max_queue_time, priority=int(number), ranks=settings.ranks_per_class)
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


# Requests that have left the queue.


def test_the_heap_keeps_no_request_that_left_long_before_its_timeout() -> None:
    timeouts = TimeoutHeap([REJECT])
    clock = VirtualClock()
    queue = RequestQueue(BatcherSettings(8, 0.0, max_queue_size=1000, max_queue_bytes=1 << 20), clock)
    for _ in range(1000):
        request = one()
        queue.put([request])
        timeouts.add(request)
        work = queue.poll()
        assert isinstance(work, BatchAssignment)
        queue.finish(work.batch)
        queue.batch_done(work.batch, None)
    assert len(timeouts._heap) <= 64
    assert timeouts.next() == math.inf


# Ranks.


@reproducible
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 12))
def test_each_rank_gets_what_higher_ranks_leave(queued_rows: list[int], room: int) -> None:
    rows = StrictPriority(len(queued_rows)).allocate(queued_rows, queued_rows, room)
    assert sum(rows) == min(sum(queued_rows), room)
    for rank, count in enumerate(rows):
        assert count == queued_rows[rank] or sum(rows[rank + 1 :]) == 0


def test_strict_classes_run_in_order_and_lower_ones_fill_the_rest(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner, 4, priority_weights=(1, 1, 1), strict_priorities=True)
    occupy(batcher, runner)
    futures = [batcher.submit(float(priority), priority=priority) for priority in (3, 2, 1) * 3]
    runner.open()
    for future in futures:
        result(future)
    assert rows(runner, 1) == [[1, 1, 1, 2], [2, 2, 3, 3], [3]]


# Options.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policies": [REJECT, REJECT]}, "policies has 2 entries; give each of the 1 classes one"),
        ({"policies": [DELAY, DELAY], "priority_weights": (2, 1)}, "give strict_priorities"),
        ({"merge": False, "max_queue_delay": 1.0}, "leave out max_queue_delay, 1.0"),
        ({"merge": False, "preferred_batch_sizes": (2,)}, r"preferred_batch_sizes, \(2,\)"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Batcher(lambda x: x, 4, **options)


@pytest.mark.parametrize(
    ("fields", "said"), [({"timeout": 0.0}, "timeout is 0.0"), ({"max_requests": -1}, "max_requests is -1")]
)
def test_policies_that_make_no_sense(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        QueuePolicy(**fields)
