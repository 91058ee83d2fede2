"""Like `test_interleavings`, on devices that break, run out of memory and hang, in any order of threads.

Callers cancel, deadlines pass, and the batcher is drained or closed, while devices fail alone or
together, once or repeatedly, recover at once, late or never, and runs are abandoned, rightly or
not. Workers may also crash at any step.
"""

from __future__ import annotations

from typing import Any

import pytest
from batcher.concurrency.test_interleavings import MOST, BatcherScenario, attend
from support.batcher.scenario import play

from tensorferry.batcher import BatcherError, InstanceFailed, OutOfMemory, RunTimedOut
from tensorferry.batcher.execution.completion import RequestCompleter
from tensorferry.batcher.execution.executor import BatchExecutor
from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.queue.batch_selection import BatchSelector
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.statistics.counters import Counters
from tensorferry.batcher.statistics.recent_batches import RecentBatches

# The steps at which a worker may crash.
STEPS: list[tuple[type, str]] = [
    *((RequestQueue, name) for name in ("take", "take_inline", "take_expired", "finish")),
    (BatchSelector, "select"),
    *((Devices, name) for name in ("dispatched", "completed")),
    *((BatchExecutor, name) for name in ("run", "_execute")),
    *((Counters, name) for name in ("ran", "predicted")),
    (RequestCompleter, "answer"),
    (RecentBatches, "ran"),
    (BatchCostModel, "should_learn"),
]


class FailingScenario(BatcherScenario):
    """Some runs break the device, some hang, and the memory of some devices holds few rows."""

    # Further errors that a request may get.
    bugs: tuple[type[BaseException], ...] = ()

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(seed, monkeypatch)
        self.breaks = self.random.choice([0.0, 0.1, 0.4])
        self.hangs = self.random.choice([0.0, 0.0, 0.1])
        self.vain = self.random.choice([0.0, 0.5])
        self.room = [self.random.choice([MOST, MOST, 2, 1]) for _ in range(self.devices)]
        self.gives_up = self.random.random() < 0.5
        self.broken = [False] * self.devices

    def model_fn(self, device: int) -> Any:
        works = super().model_fn(device)

        def recover() -> None:
            assert self.running[device] == 0, "while it runs"
            self.interleaver.sleep(self.random.choice([0.0, 0.003, 0.05]))
            if self.random.random() < self.vain:
                raise InstanceFailed("not recovered yet", self.random.choice([0.001, 0.02]))
            self.broken[device] = False

        def run(x: Any) -> Any:
            assert not self.broken[device], "called while it is broken"
            assert len(x) <= MOST
            if self.random.random() < self.hangs:
                self.running[device] += 1
                self.interleaver.sleep(0.1)
                self.running[device] -= 1
            if len(x) > self.room[device]:
                raise OutOfMemory(f"{len(x)} rows")
            if self.random.random() < self.breaks:
                self.interleaver.sleep(self.random.choice([0.0, 0.002]))
                if self.random.random() < 0.2:
                    raise InstanceFailed("a hiccup")
                self.broken[device] = True
                raise InstanceFailed("broken", recover=recover)
            return works(x)

        return run

    def before_time_moves(self) -> None:
        if self.served is None:
            return
        queue = self.served._queue
        free = [
            device
            for device in queue._devices.each
            if device.outage is None and device.idle and device.waiting
        ]
        if self.patience is None and not self.window:
            assert not (free and queue._backlog.rows), "a device that works is idle, and requests wait"
        self.check_deadlines()

    def main(self) -> None:
        if self.gives_up:
            self.start_thread("watchdog", self.watch)
        super().main()

    def watch(self) -> None:
        for _ in range(3):
            self.interleaver.sleep(self.random.choice([0.0, 0.01, 0.03]))
            if self.served is not None:
                self.served.abort_hung_run(self.random.randrange(self.devices), RunTimedOut("it hangs"))

    def check_error(self, error: BaseException) -> None:
        if isinstance(error, InstanceFailed):
            assert self.breaks or self.gives_up
        elif isinstance(error, RunTimedOut):
            assert self.gives_up
        elif not isinstance(error, self.bugs):
            # No OutOfMemory, because one row fits everywhere.
            super().check_error(error)


@pytest.mark.parametrize("attending", [False, True])
@pytest.mark.parametrize("block", range(4))
def test_whatever_fails_and_when_nothing_is_lost_or_doubled(
    block: int, attending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(5000 + 30 * block, 5030 + 30 * block)
    play(seeds, monkeypatch, FailingScenario, attend if attending else lambda scenario: None)


class CrashingScenario(FailingScenario):
    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(seed, monkeypatch)
        self.crash_rate = self.random.choice([0.02, 0.1, 0.3])
        self.crashes = 0
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self.faulty(getattr(owner, name)))

    def faulty(self, works: Any) -> Any:
        def crash(*arguments: Any, **options: Any) -> Any:
            thread = self.interleaver.current
            # Not in submit, cancel or close, whose callers see the exception.
            mine = thread is not None and ("-worker-" in thread.name or "-expiry" in thread.name)
            if mine and self.crashes < 12 and self.random.random() < self.crash_rate:
                self.crashes += 1
                raise SystemExit
            return works(*arguments, **options)

        return crash

    def before_time_moves(self) -> None:
        """Check only sizes, because a worker may be down."""
        if self.served is not None:
            sizes = self.served.statistics().sizes
            assert sum(sizes.class_rows) == sizes.queued_rows

    def check(self) -> None:
        if self.crashes:
            # Then every request may get this error.
            self.gives_up, self.bugs = True, (BatcherError,)
        super().check()


@pytest.mark.parametrize("block", range(4))
def test_with_crashing_workers_nothing_is_lost_or_doubled(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes: list[int] = []

    class Counted(CrashingScenario):
        def check(self) -> None:
            super().check()
            crashes.append(self.crashes)

    play(range(9000 + 30 * block, 9030 + 30 * block), monkeypatch, Counted)
    assert sum(crashes) > 30
