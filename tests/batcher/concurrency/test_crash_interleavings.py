"""Like `test_failure_interleavings`, and workers may also crash at any step."""

from __future__ import annotations

from typing import Any

import pytest
from batcher.concurrency.test_failure_interleavings import FailingScenario
from batcher.concurrency.test_interleavings import play, seeds_of

from tensorferry.batcher import BatcherError
from tensorferry.batcher.execution.completion import RequestCompleter
from tensorferry.batcher.execution.executor import BatchExecutor
from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.queue.batch_selection import BatchSelector
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.statistics.counters import Counters
from tensorferry.batcher.statistics.recent_batches import RecentBatches

STEPS: list[tuple[type, str]] = [
    (RequestQueue, "take"),
    (RequestQueue, "take_inline"),
    (RequestQueue, "take_expired"),
    (BatchSelector, "select"),
    (Devices, "dispatched"),
    (BatchExecutor, "run"),
    (BatchExecutor, "_execute"),
    (RequestQueue, "finish"),
    (Counters, "ran"),
    (Counters, "predicted"),
    (RequestCompleter, "answer"),
    (RecentBatches, "ran"),
    (Devices, "completed"),
    (BatchCostModel, "should_learn"),
]


class FallingWorld(FailingScenario):
    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(seed, monkeypatch)
        self.falls = self.random.choice([0.02, 0.1, 0.3])
        self.fallen = 0
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self.faulty(getattr(owner, name)))

    def faulty(self, works: Any) -> Any:
        def fall(*arguments: Any, **options: Any) -> Any:
            thread = self.interleaver.current
            # Not in submit, cancel or close, whose callers see the exception.
            mine = thread is not None and ("-worker-" in thread.name or "-expiry" in thread.name)
            if mine and self.fallen < 12 and self.random.random() < self.falls:
                self.fallen += 1
                raise SystemExit
            return works(*arguments, **options)

        return fall

    def before_time_moves(self) -> None:
        """Check only sizes if a worker is down."""
        if hasattr(self, "batcher"):
            sizes = self.batcher.statistics().sizes
            assert sum(sizes.class_rows) == sizes.queued_rows

    def check(self) -> None:
        if self.fallen:
            # Then every request may get this error.
            self.gives_up, self.bugs = True, (BatcherError,)
        super().check()


@pytest.mark.parametrize("block", range(10))
def test_with_crashing_workers_nothing_is_lost_or_doubled(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(seeds_of(block, 30, 9000), monkeypatch, FallingWorld)


def test_crashes_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: crashes do occur."""
    scenario = FallingWorld(9001, monkeypatch)
    scenario.falls = 0.5
    scenario.interleaver.run(scenario.main)
    assert scenario.fallen
