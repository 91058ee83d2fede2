"""When a submitting thread may run its batch inline instead of the worker."""

from __future__ import annotations

import pytest

from tensorferry.batcher.queue.wakeup import InlineExecution


@pytest.fixture
def lending() -> InlineExecution:
    return InlineExecution(enabled=True)


def test_repeated_suspensions_grow_up_to_a_minute(lending: InlineExecution) -> None:
    now = 5.0
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        lending.suspend(now)
        now += seconds
        assert lending.allowed_from == now


def test_after_a_minute_without_it_is_forgotten(lending: InlineExecution) -> None:
    for now in (5.0, 6.0, 7.0):
        lending.suspend(now)
    # The run ended at 11.
    lending.suspend(71.0)
    assert lending.allowed_from == 72.0
