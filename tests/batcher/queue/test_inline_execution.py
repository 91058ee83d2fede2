"""When a thread that brings requests may run their batch in the worker's stead."""

from __future__ import annotations

import threading

import pytest

from tensorferry.batcher.queue.devices import Device
from tensorferry.batcher.queue.inline_execution import InlineExecution

SHORT, LONG = 1e-4, 0.03


@pytest.fixture
def lending() -> InlineExecution:
    device = Device(threading.Lock())
    # Its worker waits.
    device.waiting = 1
    return InlineExecution(device, possible=True)


def test_short_batches_change_nothing(lending: InlineExecution) -> None:
    lending.ran(SHORT, 5.0)
    assert lending.possible_now(5.0)


def test_after_one_long_batch_workers_run_them_for_a_second(lending: InlineExecution) -> None:
    lending.ran(LONG, 5.0)
    assert not lending.possible_now(5.9)
    assert lending.possible_now(6.0)


def test_the_oftener_that_comes_the_longer_it_lasts_up_to_a_minute(lending: InlineExecution) -> None:
    now = 5.0
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        lending.ran(LONG, now)
        assert not lending.possible_now(now + seconds - 0.1)
        assert lending.possible_now(now + seconds)
        now += seconds


def test_after_a_minute_without_it_is_forgotten(lending: InlineExecution) -> None:
    for now in (5.0, 6.0, 7.0):
        lending.ran(LONG, now)
    # It lasted until 11.
    lending.ran(LONG, 71.0)
    assert not lending.possible_now(71.9)
    assert lending.possible_now(72.0)
