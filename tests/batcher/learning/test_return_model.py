"""Batches wait for returning clients while that pays, and for nothing else.

The simulations run the shipping queue in virtual time: the figures do not depend on the machine. `make simulate` shows all
loads and devices; these are some of them.
"""

from __future__ import annotations

import math
import threading

import pytest
from closed_loop import (
    CPU,
    GPU,
    MLP,
    Cost,
    Figures,
    Greedy,
    Traffic,
    best_count,
    callers,
    ideal,
    neither,
    poisson,
    simulate,
)

from tensorferry.batcher.learning.return_model import ReturnModel
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Request
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import VirtualClock

SECONDS = 2.0


def both(rows_counted: Cost, traffic: Traffic, seconds: float = SECONDS) -> tuple[Figures, Figures]:
    greedy, learned = (
        simulate(rows_counted, traffic, returners=rule, seconds=seconds) for rule in (Greedy(), ReturnModel())
    )
    return greedy, learned


def rates(rows_counted: Cost, count: int) -> tuple[float, float]:
    greedy, learned = both(rows_counted, Traffic(callers(count)))
    return greedy.rate, learned.rate


@pytest.mark.parametrize(("count", "of_ideal"), [(4, 0.91), (8, 0.9), (32, 0.9), (64, 0.92)])
def test_closed_loops_on_a_gpu_like_device_share_batches(count: int, of_ideal: float) -> None:
    greedy, learned = rates(GPU, count)
    assert learned >= of_ideal * ideal(GPU, count)
    assert learned >= 1.2 * greedy


@pytest.mark.parametrize("count", [4, 8, 32])
def test_closed_loops_lose_nothing_if_there_is_little_to_gain(count: int) -> None:
    for rows_counted in (MLP, CPU):
        greedy, learned = rates(rows_counted, count)
        assert learned >= 0.995 * greedy


@pytest.mark.parametrize("rows_counted", [GPU, MLP, CPU], ids=lambda rows_counted: str(rows_counted.name))
def test_a_single_client_never_waits(rows_counted: Cost) -> None:
    greedy, learned = rates(rows_counted, 1)
    assert learned == pytest.approx(greedy)


@pytest.mark.parametrize(("rows_counted", "load"), [(GPU, 0.2), (MLP, 0.8), (CPU, 0.5)])
def test_open_arrivals_are_not_delayed(rows_counted: Cost, load: float) -> None:
    times = poisson(load * rows_counted.most / rows_counted.seconds(rows_counted.most), SECONDS)
    greedy, learned = both(rows_counted, Traffic(arrivals=times))
    assert learned.latency <= 1.01 * greedy.latency


@pytest.mark.parametrize(("rows_counted", "count"), [(GPU, 8), (MLP, 4), (CPU, 32)])
def test_the_rule_comes_near_the_best_of_all_rules(rows_counted: Cost, count: int) -> None:
    _, learned = rates(rows_counted, count)
    assert learned >= 0.965 * best_count(rows_counted, count, SECONDS / 2)


@pytest.mark.parametrize("name", neither(GPU, 1.0))
@pytest.mark.parametrize("rows_counted", [GPU, CPU], ids=lambda rows_counted: str(rows_counted.name))
def test_no_traffic_loses_throughput_by_waiting(rows_counted: Cost, name: str) -> None:
    greedy, learned = both(rows_counted, neither(rows_counted, SECONDS / 2)[name], SECONDS / 2)
    assert learned.rate >= 0.99 * greedy.rate
    assert learned.latency <= 1.01 * greedy.latency


def test_before_the_first_answer_no_batch_waits() -> None:
    returners = ReturnModel()
    assert returners.wait_until(1.0, 1, lambda rows: 0.01, 8) == 1.0
    returners.arrived(1.0)
    assert returners.wait_until(1.0, 1, lambda rows: 0.01, 8) == 1.0


def test_without_known_batch_times_no_batch_waits() -> None:
    returners = ReturnModel()
    for batch in range(100):
        returners.answered(batch * 0.01, 4)
        for caller in range(4):
            returners.arrived(batch * 0.01 + 0.001 * caller)
        assert returners.wait_until(batch * 0.01 + 0.0015, 2, lambda rows: 0.0, 8) == batch * 0.01 + 0.0015
    assert returners.statistics().waits == 0


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


def test_the_last_client_that_returns_wakes_the_waiting_worker(clock: VirtualClock) -> None:
    """Four clients return after 1 to 1.3 ms: the worker sleeps until all are back, and no longer."""
    queue = RequestQueue(BatcherSettings(8, 0.0, max_queue_size=100, max_queue_bytes=10_000), clock)
    queue.add_warmup_sample(1, 0.010)
    queue.add_warmup_sample(8, 0.0108)

    def arrive() -> None:
        queue.put((Request((), lambda outcome: None, names=None, rows=1, nbytes=0),))

    for _ in range(4):
        arrive()
    for _ in range(80):
        work = queue.poll()
        assert isinstance(work, BatchAssignment)
        clock.advance(0.010)
        queue.finish(work.batch)
        queue.batch_done(work.batch, 0.010)
        clock.advance(0.001)
        for _ in work.batch:
            arrive()
            clock.advance(0.0001)
    taken: list[BatchAssignment] = []

    def take() -> None:
        step = queue.take()
        assert isinstance(step, BatchAssignment)
        taken.append(step)

    (first,) = (queue.poll(),)
    assert isinstance(first, BatchAssignment)
    clock.advance(0.010)
    queue.finish(first.batch)
    queue.batch_done(first.batch, 0.010)
    clock.advance(0.001)
    arrive()
    worker = threading.Thread(target=take)
    worker.start()
    clock.await_sleepers()
    for _ in range(3):
        assert not taken
        arrive()
    worker.join(30)
    assert [len(work.batch) for work in taken] == [4]


def test_clients_answered_first_return_before_the_last_are_answered(clock: VirtualClock) -> None:
    """Four clients each return a moment after their own answer; answers are sent one by one."""
    queue = RequestQueue(
        BatcherSettings(8, 0.0, max_queue_size=100, max_queue_bytes=10_000, adaptive=False), clock
    )
    queue.add_warmup_sample(1, 0.010)
    queue.add_warmup_sample(8, 0.0108)

    def arrive() -> None:
        queue.put((Request((), lambda outcome: None, names=None, rows=1, nbytes=0),))

    for _ in range(4):
        arrive()
    sizes = []
    for _ in range(120):
        step = queue.poll()
        if isinstance(step, Wait):
            # The last of them has been sent.
            assert clock.now() < step.until <= clock.now() + 0.004
            clock.advance(0.0003)
            arrive()
            step = queue.poll()
        assert isinstance(step, BatchAssignment)
        sizes.append(len(step.batch))
        clock.advance(0.010)
        queue.finish(step.batch)
        # The last client is answered at the end, and returns after it.
        for _ in step.batch[1:]:
            clock.advance(0.0005)
            arrive()
        clock.advance(0.0005)
        queue.batch_done(step.batch, 0.010, 0.0, 0.0005 * len(step.batch))
        if len(sizes) < 60:
            clock.advance(0.0003)
            arrive()
    assert set(sizes) == {4}
    assert queue.learning.statistics()[1].share > 0.9
