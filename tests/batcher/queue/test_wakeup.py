"""When a submitting thread may run its batch inline instead of the worker."""

from __future__ import annotations

import threading

import pytest

from tensorferry.batcher.queue.devices import Device
from tensorferry.batcher.queue.wakeup import InlineExecution

SHORT, LONG = 1e-4, 0.03


@pytest.fixture
def lending() -> InlineExecution:
    device = Device(threading.Lock())
    # Its worker waits.
    device.waiting = 1
    return InlineExecution(device, enabled=True)


def test_short_batches_change_nothing(lending: InlineExecution) -> None:
    lending.observe(SHORT, 5.0)
    assert lending.allowed(5.0)


def test_after_one_long_batch_workers_run_them_for_a_second(lending: InlineExecution) -> None:
    lending.observe(LONG, 5.0)
    assert not lending.allowed(5.9)
    assert lending.allowed(6.0)


def test_repeated_suspensions_grow_up_to_a_minute(lending: InlineExecution) -> None:
    now = 5.0
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        lending.observe(LONG, now)
        assert not lending.allowed(now + seconds - 0.1)
        assert lending.allowed(now + seconds)
        now += seconds


def test_after_a_minute_without_it_is_forgotten(lending: InlineExecution) -> None:
    for now in (5.0, 6.0, 7.0):
        lending.observe(LONG, now)
    # The run ended at 11.
    lending.observe(LONG, 71.0)
    assert not lending.allowed(71.9)
    assert lending.allowed(72.0)
