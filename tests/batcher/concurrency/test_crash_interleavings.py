"""As `test_outage_interleavings`, and besides, whoever works may fall at any of its steps."""

from __future__ import annotations

from typing import Any

import pytest
from batcher.concurrency.test_failure_interleavings import FailingWorld
from batcher.concurrency.test_interleavings import play, seeds_of

from tensorferry.batcher import BatcherError
from tensorferry.batcher.execution.completion import RequestCompleter
from tensorferry.batcher.execution.executor import BatchExecutor
from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.queue.batch_selection import BatchSelector
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.statistics.counters import Counters

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
    (RequestCompleter, "_hand_out"),
    (Devices, "completed"),
    (BatchCostModel, "teaches"),
]


class FallingWorld(FailingWorld):
    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(seed, monkeypatch)
        self.falls = self.random.choice([0.02, 0.1, 0.3])
        self.fallen = 0
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self.faulty(getattr(owner, name)))

    def faulty(self, works: Any) -> Any:
        def fall(*arguments: Any, **options: Any) -> Any:
            strand = self.loom._current
            # Not in the calls of those who submit, cancel or give up: they are told by what they raise.
            mine = strand is not None and ("-worker-" in strand.name or "-expiry" in strand.name)
            if mine and self.fallen < 12 and self.random.random() < self.falls:
                self.fallen += 1
                raise SystemExit
            return works(*arguments, **options)

        return fall

    def at_rest(self) -> None:
        """Where nobody is expected to be at its post, nothing is asked but sizes."""
        if hasattr(self, "batcher"):
            sizes = self.batcher.statistics().sizes
            assert sum(sizes.class_rows) == sizes.queued_rows

    def check(self) -> None:
        if self.fallen:
            # Then anybody may be told so.
            self.gives_up, self.bugs = True, (BatcherError,)
        super().check()


@pytest.mark.parametrize("block", range(10))
def test_whoever_falls_and_when_nothing_is_lost_or_doubled(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(seeds_of(block, 30, 9000), monkeypatch, FallingWorld)


def test_falls_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool itself."""
    world = FallingWorld(9001, monkeypatch)
    world.falls = 0.5
    world.loom.run(world.main)
    assert world.fallen
