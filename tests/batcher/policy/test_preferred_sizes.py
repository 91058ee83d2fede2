"""Preferred batch sizes as in Triton.

The cases of the queue are those of Triton's own tests of `preferred_batch_size` and `max_queue_delay`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from batcher.conftest import Make
from batcher.policy.test_close_rule import waiting
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import Recorder, new_request, reproducible, results

from tensorferry.batcher import CloseReason
from tensorferry.batcher.policy.close_rule import Wait, preferred_rows
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

DELAY = 5.0


class Station:
    """A queue whose batches end as soon as they are closed; `put` and `pass_time` return their sizes."""

    def __init__(self, preferred: tuple[int, ...], most: int = 8, delay: float = DELAY) -> None:
        self.clock = VirtualClock()
        self.queue = RequestQueue(BatcherSettings(most, delay, preferred_batch_sizes=preferred), self.clock)
        self.reasons: list[CloseReason | None] = []

    def put(self, *sizes: int, busy: bool = False) -> list[int]:
        left = []
        for rows in sizes:
            self.queue.put([new_request(np.zeros((rows, 1)), Recorder())])
            left += [] if busy else self.dispatch()
        return left

    def pass_time(self, seconds: float) -> list[int]:
        self.clock.advance(seconds)
        return self.dispatch()

    def dispatch(self) -> list[int]:
        left = []
        while isinstance(work := self.queue.poll(), BatchAssignment):
            left.append(sum(request.rows for request in work.batch))
            self.reasons.append(work.reason)
            self.queue.finish(work.batch)
            self.queue.batch_done(work.batch, None)
        assert isinstance(work, Wait)
        return left


@pytest.mark.parametrize(
    ("sizes", "at_once", "after_the_delay"),
    [
        pytest.param([2], [2], [], id="2: preferred, at once"),
        pytest.param([6], [6], [], id="6: preferred, at once"),
        pytest.param([1], [], [1], id="1: delayed"),
        pytest.param([4], [], [4], id="4: delayed, a larger preferred size may be reached"),
        pytest.param([7], [7], [], id="7: at once, beyond the largest preferred"),
        pytest.param([3, 7], [3, 7], [], id="3, 7: both at once"),
        pytest.param([3, 4], [3], [4], id="3, 4: the first at once, as both pass the largest preferred"),
        pytest.param([1, 1, 1], [2], [1], id="1, 1, 1: two at once, the third delayed"),
        pytest.param([4, 2], [6], [], id="4, 2: 6 at once"),
        pytest.param([5, 3], [5], [3], id="5, 3: full together, but beyond 6: the first at once"),
    ],
)
def test_with_a_delay_and_sizes_2_and_6(
    sizes: list[int], at_once: list[int], after_the_delay: list[int]
) -> None:
    station = Station((2, 6))
    assert station.put(*sizes) == at_once
    assert station.pass_time(DELAY - 0.001) == []
    assert station.pass_time(0.001) == after_the_delay


def test_past_the_delay_preferred_sizes_do_not_matter() -> None:
    station = Station((2, 6))
    station.put(3, 4, busy=True)
    station.clock.advance(DELAY)
    station.put(1, busy=True)
    assert station.dispatch() == [8]
    assert station.reasons == [CloseReason.FULL]


@pytest.mark.parametrize(("rows", "batches"), [(5, [4, 1]), (3, [3]), (10, [6, 4])])
def test_without_a_delay_batches_have_preferred_sizes_if_possible(rows: int, batches: list[int]) -> None:
    station = Station((4, 6), delay=0.0)
    station.put(*[1] * rows, busy=True)
    assert station.dispatch() == batches


@reproducible
@given(
    costs=st.lists(st.integers(1, 8), max_size=15),
    preferred=st.sets(st.integers(1, 8), min_size=1).map(lambda sizes: tuple(sorted(sizes))),
)
def test_a_batch_closed_early_is_a_prefix_of_the_queue(costs: list[int], preferred: tuple[int, ...]) -> None:
    rows = preferred_rows(
        [waiting(rows_counted) for rows_counted in costs], BatcherSettings(8, DELAY, preferred)
    )
    sums = [sum(costs[:count]) for count in range(len(costs) + 1)]
    assert rows in sums
    assert rows <= 8
    hit = [size for size in sums if size in preferred]
    if hit:
        assert rows == max(hit)
    elif sums[-1] < preferred[-1]:
        assert rows == 0, "a preferred size may still be reached"
    else:
        assert rows > 0, "it can no longer be reached"


def test_a_worker_that_waits_for_a_window_is_woken_for_a_preferred_size(
    make: Make, clock: VirtualClock
) -> None:
    """The last arrival neither fills the batch nor is the bucket's first, but must wake the worker."""
    runner = ScriptedRunner()
    batcher = make(runner, 8, DELAY, preferred_batch_sizes=[6, 3], clock=clock)
    futures = [batcher.submit(1.0)]
    clock.await_sleepers(until=DELAY)
    futures += [batcher.submit(1.0) for _ in range(2)]
    assert results(futures) == [2] * 3
    assert clock.now() == 0
    assert batcher.statistics().close_reasons == {CloseReason.PREFERRED: 1}


def test_a_deadline_ends_the_wait_for_a_preferred_size() -> None:
    station = Station((6,), delay=100.0)
    station.queue.put([new_request(np.zeros((1, 1)), Recorder(), deadline=10.0)])
    step = station.queue.poll()
    assert isinstance(step, Wait)
    assert 9.9 < step.until < 10.0
    assert math.isclose(station.clock.now(), 0.0)
    assert station.pass_time(step.until) == [1]
