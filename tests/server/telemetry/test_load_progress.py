"""A model that takes long to load: lines that say what is being done, and none for one that is quick."""

from __future__ import annotations

import logging

import pytest

from tensorferry.batcher.testing import VirtualClock
from tensorferry.server.telemetry import load_progress
from tensorferry.server.telemetry.load_progress import LoadProgress, set_load_stage


def test_a_line_after_two_seconds_then_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
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


def test_nothing_is_said_of_a_quick_one_nor_of_one_that_fails(caplog: pytest.LogCaptureFixture) -> None:
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


def test_outside_of_a_load_nothing_is_kept() -> None:
    set_load_stage("nothing")
    assert load_progress._current.get() is None
