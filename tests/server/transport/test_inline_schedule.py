"""The polling thread runs each batcher's next batch when it is due, and learns when the next is."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tensorferry.server.inference.reply import MAX_INLINE_SECONDS
from tensorferry.server.transport import inline_schedule
from tensorferry.server.transport.inline_schedule import InlineSchedule


class Runner:
    """A batcher that says when to run it again."""

    def __init__(self, *again: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.runs = 0
        self._again = list(again)
        self._meanwhile = meanwhile

    def run_inline(self, max_seconds: float) -> float:
        assert max_seconds == MAX_INLINE_SECONDS
        self.runs += 1
        self._meanwhile()
        return self._again.pop(0) if self._again else math.inf


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(now=100.0)
    fake.monotonic = lambda: fake.now
    monkeypatch.setattr(inline_schedule, "time", fake)
    return fake


def test_a_batch_that_waits_for_clients_runs_when_they_should_be_back(clock: SimpleNamespace) -> None:
    schedule, waiting, other = InlineSchedule(), Runner(100.5), Runner()
    assert schedule.run_due() == math.inf
    for batcher in (waiting, waiting, other):
        schedule.run_soon(batcher)
    assert schedule.run_due() == 0.5
    assert (waiting.runs, other.runs) == (1, 1), "once, however often it was asked for"
    clock.now = 100.25
    assert schedule.run_due() == 0.25
    clock.now = 101.0
    assert schedule.run_due() == math.inf
    assert (waiting.runs, other.runs) == (2, 1)


def test_a_batcher_that_gets_requests_while_a_batch_runs_is_run_at_once(clock: SimpleNamespace) -> None:
    schedule = InlineSchedule()
    second = Runner()
    first = Runner(100.5, meanwhile=lambda: schedule.run_soon(second))
    schedule.run_soon(first)
    assert schedule.run_due() == 0.0
    assert second.runs == 0
    assert schedule.run_due() == 0.5
    assert second.runs == 1


def test_a_batch_that_raises_does_not_keep_others_from_running(clock: SimpleNamespace) -> None:
    def fail() -> None:
        raise MemoryError

    schedule, broken, good = InlineSchedule(), Runner(meanwhile=fail), Runner()
    schedule.run_soon(broken)
    schedule.run_soon(good)
    with pytest.raises(MemoryError):
        schedule.run_due()
    assert schedule.run_due() == math.inf
    assert (broken.runs, good.runs) == (1, 1)
