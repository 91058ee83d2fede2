"""Batches wait for returning clients while that pays, and for nothing else.

The simulations run the shipping queue in virtual time: the figures do not depend on the machine. `make simulate` shows all
loads and devices; these are some of them.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from closed_loop import (
    CPU,
    GPU,
    MLP,
    Cost,
    Figures,
    Greedy,
    Traffic,
    callers,
    ideal,
    neither,
    poisson,
    simulate,
)
from support.batcher.rig import ignore

from tensorferry.batcher.learning.return_model import ReturnModel
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Request
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import VirtualClock

SECONDS = 0.5


def both(cost: Cost, traffic: Traffic, seconds: float = SECONDS) -> tuple[Figures, Figures]:
    greedy, learned = (
        simulate(cost, traffic, returners=rule, seconds=seconds) for rule in (Greedy(), ReturnModel())
    )
    return greedy, learned


@pytest.mark.parametrize("count", [4, 32])
def test_closed_loops_on_a_gpu_like_device_share_batches(count: int) -> None:
    greedy, learned = both(GPU, Traffic(callers(count)), 2.0)
    assert learned.rate >= 0.9 * ideal(GPU, count)
    assert learned.rate >= 1.2 * greedy.rate


@pytest.mark.parametrize(("cost", "count"), [(MLP, 8), (CPU, 32), (GPU, 1)])
def test_closed_loops_lose_nothing_if_there_is_little_to_gain(cost: Cost, count: int) -> None:
    greedy, learned = both(cost, Traffic(callers(count)))
    assert learned.rate >= 0.995 * greedy.rate


@pytest.mark.parametrize(("cost", "load"), [(GPU, 0.2), (CPU, 0.5)])
def test_open_arrivals_are_not_delayed(cost: Cost, load: float) -> None:
    times = poisson(load * cost.most / cost.seconds(cost.most), SECONDS)
    greedy, learned = both(cost, Traffic(arrivals=times))
    assert learned.latency <= 1.01 * greedy.latency


@pytest.mark.parametrize("name", list(neither(GPU, 1.0))[::2])
def test_no_traffic_loses_throughput_by_waiting(name: str) -> None:
    greedy, learned = both(GPU, neither(GPU, 1.0)[name], 1.0)
    assert learned.rate >= 0.99 * greedy.rate
    assert learned.latency <= 1.01 * greedy.latency


def test_before_the_first_answer_no_batch_waits() -> None:
    returners = ReturnModel()
    assert returners.wait_until(1.0, 1, lambda rows: 0.01, 8) == 1.0
    returners.arrived(1.0)
    assert returners.wait_until(1.0, 1, lambda rows: 0.01, 8) == 1.0


def learn(returners: ReturnModel) -> None:
    """Update the model as the queue does after a batch."""
    if (snapshot := returners.snapshot) is not None:
        returners.publish(snapshot, snapshot.return_cdf())


def learned_from_four_callers() -> tuple[ReturnModel, float]:
    """Return a model of four clients that return after 1 to 1.3 ms, with batches of 10 ms, and the time of the last answers."""
    returners = ReturnModel()
    now = 0.0
    returners.wait_until(now, 1, lambda rows: 0.01, 8)
    for _ in range(60):
        now += 0.012
        returners.answered(now, 4)
        learn(returners)
        for caller in range(4):
            returners.arrived(now + 0.001 + 0.0001 * caller)
    now += 0.012
    returners.answered(now, 4)
    return returners, now


def test_a_batch_waits_until_the_last_client_is_back() -> None:
    returners, answered = learned_from_four_callers()
    assert returners.statistics().share == pytest.approx(1, abs=0.1)
    returners.arrived(answered + 0.001)
    until = returners.wait_until(answered + 0.001, 1, lambda rows: 0.01, 7)
    assert answered + 0.0013 <= until <= answered + 0.0017
    for caller in range(1, 4):
        returners.arrived(answered + 0.001 + 0.0001 * caller)
    now = answered + 0.0013
    assert returners.wait_until(now, 4, lambda rows: 0.01, 4) == now, "all clients are back"


def test_a_batch_does_not_wait_without_room_or_after_the_horizon() -> None:
    returners, answered = learned_from_four_callers()
    returners.arrived(answered + 0.001)
    assert returners.wait_until(answered + 0.001, 8, lambda rows: 0.01, 0) == answered + 0.001
    assert returners.wait_until(answered + 0.5, 1, lambda rows: 0.01, 7) == answered + 0.5


def test_clients_that_stop_are_forgotten_within_some_batches() -> None:
    returners, now = learned_from_four_callers()
    for _ in range(150):
        now += 0.012
        returners.answered(now, 4)
        learn(returners)
    returners.arrived(now + 0.001)
    assert returners.wait_until(now + 0.001, 1, lambda rows: 0.01, 7) == now + 0.001
    assert math.isfinite(returners.statistics().share)


class Callers:
    """A queue with batches of about 10 ms, and callers of which a test says when they return."""

    def __init__(self, clock: VirtualClock, **options: Any) -> None:
        self.clock = clock
        self.queue = RequestQueue(BatcherSettings(8, **options), clock)
        self.queue.learning.add_warmup_sample(1, 0.010)
        self.queue.learning.add_warmup_sample(8, 0.0108)
        for _ in range(4):
            self.arrive()

    def arrive(self) -> None:
        self.queue.put((Request((), ignore, names=None, rows=1, nbytes=0),))

    def start(self) -> BatchAssignment:
        """Start a batch, and end its run."""
        work = self.queue.poll()
        assert isinstance(work, BatchAssignment)
        self.clock.advance(0.010)
        self.queue.finish(work.batch)
        return work


def test_the_last_client_that_returns_wakes_the_waiting_worker(clock: VirtualClock) -> None:
    """Four clients return after 1 to 1.3 ms: the worker sleeps until all are back, and no longer."""
    callers = Callers(clock)
    for _ in range(80):
        work = callers.start()
        callers.queue.batch_done(work.batch, 0.010)
        clock.advance(0.001)
        for _ in work.batch:
            callers.arrive()
            clock.advance(0.0001)
    callers.queue.batch_done(callers.start().batch, 0.010)
    clock.advance(0.001)
    callers.arrive()
    taken: list[Any] = []
    worker = threading.Thread(target=lambda: taken.append(callers.queue.take()))
    worker.start()
    clock.await_sleepers()
    for _ in range(3):
        assert not taken
        callers.arrive()
    worker.join(30)
    assert [len(work.batch) for work in taken] == [4]


def test_clients_answered_first_return_before_the_last_are_answered(clock: VirtualClock) -> None:
    """Four clients each return a moment after their own answer; answers are sent one by one."""
    callers, sizes = Callers(clock, adaptive=False), list[int]()
    for _ in range(120):
        if callers.queue.sizes().queued < 4:
            step = callers.queue.poll()
            assert isinstance(step, Wait)
            # The last of them has been sent.
            assert clock.now() < step.until <= clock.now() + 0.004
            clock.advance(0.0003)
            callers.arrive()
        batch = callers.start().batch
        sizes.append(len(batch))
        # The last client is answered at the end, and returns after it.
        for _ in batch[1:]:
            clock.advance(0.0005)
            callers.arrive()
        clock.advance(0.0005)
        callers.queue.batch_done(batch, 0.010, 0.0, 0.0005 * len(batch))
        if len(sizes) < 60:
            clock.advance(0.0003)
            callers.arrive()
    assert set(sizes) == {4}
    assert callers.queue.learning.statistics()[1].share > 0.9
