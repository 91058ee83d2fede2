"""Progress lines while a model is loaded."""

from __future__ import annotations

import logging

import pytest

from tensorferry.batcher.testing import VirtualClock
from tensorferry.server.observability.logs.load_progress import LoadProgress, set_load_stage


def test_the_first_line_comes_after_two_seconds_and_the_interval_doubles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = VirtualClock()
    with LoadProgress("model m version 3", clock):
        clock.await_sleepers(until=2)
        stages = ("making its session", "warming up with a batch of 8 rows", "more")
        for stage, at, following in zip(stages, (2, 6, 14), (6, 14, 30), strict=True):
            set_load_stage(stage)
            clock.advance(at - clock.now())
            clock.await_sleepers(until=following)
    assert [record.getMessage() for record in caplog.records] == [
        "model m version 3 has been loading for 2 s: making its session",
        "model m version 3 has been loading for 6 s: warming up with a batch of 8 rows",
        "model m version 3 has been loading for 14 s: more",
    ]


def test_a_quick_or_failed_load_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = VirtualClock()

    def fail() -> None:
        with LoadProgress("model m version 1", clock):
            clock.await_sleepers(until=2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    clock.advance(60)
    assert caplog.records == []
