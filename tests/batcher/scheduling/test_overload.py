"""Properties 9 and 14 of the product's queue in virtual time: overload costs no throughput, and wall
time has no effect.
"""

from __future__ import annotations

import heapq
import random
import time
from typing import Any

import pytest
from batcher.conftest import Make
from support.batcher.rig import error, ignore, occupy, result

from tensorferry.batcher import BatcherError, DeadlineExceeded, Request
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

MOST, FIXED, PER_ROW = 32, 0.004, 0.0002
CAPACITY = MOST / (FIXED + PER_ROW * MOST)
TIMEOUT = 0.04


def in_time(load: float, *, devices: int = 1, pipelined: bool = False, seconds: float = 1.5) -> float:
    """Return the answers in time per second, relative to the rate of full batches."""
    chance = random.Random(7)
    clock = VirtualClock()
    queue = RequestQueue(
        BatcherSettings(
            MOST, 0.0, max_queue_size=4096, max_queue_bytes=1 << 30, devices=devices, pipelined=pipelined
        ),
        clock,
    )
    for rows in (1, MOST):
        queue.add_warmup_sample(rows, FIXED + PER_ROW * rows)
    events: list[tuple[float, int, BatchAssignment | None, int]] = []
    now, number, answered = 0.0, 0, 0
    free, flying, timers = [0.0] * devices, [0] * devices, set[float]()
    while now < seconds:
        now += chance.expovariate(load * CAPACITY * devices)
        heapq.heappush(events, (now, number := number + 1, None, -1))
    while events and events[0][0] < seconds:
        when, _, work, device = heapq.heappop(events)
        clock.advance(when - clock.now())
        if work is None and device < 0:
            try:
                queue.put([Request((), ignore, names=None, rows=1, nbytes=0, deadline=when + TIMEOUT)])
            except BatcherError:
                continue
        elif work is not None:
            flying[device] -= 1
            if pipelined:
                queue.run_done(device)
            answered += sum(request.deadline > when for request in queue.finish(work.batch))
            queue.batch_done(work.batch, FIXED + PER_ROW * len(work.batch), device=device)
        for device in range(devices):
            if flying[device] > pipelined:
                continue
            step = queue.poll(device)
            if isinstance(step, BatchAssignment) and step.batch:
                start = max(clock.now(), free[device])
                flying[device] += 1
                free[device] = start + FIXED + PER_ROW * len(step.batch)
                heapq.heappush(events, (free[device], number := number + 1, step, device))
            elif isinstance(step, BatchAssignment):
                queue.batch_done((), None, device=device)
            elif isinstance(step, Wait) and clock.now() < step.until < seconds and step.until not in timers:
                timers.add(step.until)
                heapq.heappush(events, (step.until, number := number + 1, None, devices))
    return answered / seconds


@pytest.mark.parametrize(
    ("devices", "pipelined"), [(1, False), (2, False), (1, True)], ids=["one", "two", "pipelined"]
)
def test_overload_costs_no_throughput(devices: int, pipelined: bool) -> None:
    """Property 9: at twice the capacity, as many answers are in time as at any load."""
    rates = {load: in_time(load, devices=devices, pipelined=pipelined) for load in (0.7, 1.1, 2.0, 4.0)}
    assert rates[0.7] >= 0.97 * 0.7 * CAPACITY * devices, "below capacity nearly all are"
    assert rates[2.0] >= 0.97 * max(rates.values())
    assert rates[4.0] >= 0.95 * max(rates.values())


@pytest.mark.parametrize("devices", [1, 2])
def test_below_capacity_no_request_is_late(devices: int) -> None:
    """Property 7: below capacity the rate rule drops no request."""
    load, seconds = 0.3, 2.0
    chance, sent, now = random.Random(7), 0, 0.0
    while now < seconds:
        now += chance.expovariate(load * CAPACITY * devices)
        sent += 1
    answered = in_time(load, devices=devices) * seconds
    # Requests that arrive at the very end are not answered any more.
    assert sent - answered <= 2 * TIMEOUT * load * CAPACITY * devices


def test_the_wall_clock_means_nothing(
    make: Make, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Property 14: the wall clock is not used, so it may jump."""

    def asked() -> Any:
        raise AssertionError("the wall clock was asked")

    monkeypatch.setattr(time, "time", asked)
    monkeypatch.setattr(time, "time_ns", asked)
    runner = ScriptedRunner(gated=True)
    for virtual in (False, True):
        batcher = make(runner, 4, 0.001, clock=clock if virtual else None)
        if virtual:
            future = batcher.submit(0.0)
            clock.await_sleepers(1)
            clock.advance(0.001)
        else:
            future = occupy(batcher, runner)
        hopeless = batcher.submit(1.0, timeout=0.01)
        if virtual:
            clock.advance(0.02)
        assert isinstance(error(hopeless), DeadlineExceeded)
        runner.release()
        assert result(future) == 0
        later = batcher.submit(2.0, timeout=1e9)
        runner.release()
        assert batcher.drain()
        assert result(later) == 4
