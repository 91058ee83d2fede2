"""Like `test_interleavings`, on devices that break, run out of memory and hang, in any order of
threads.

Callers cancel, deadlines pass, and the batcher is drained or closed, while devices fail alone or
together, once or repeatedly, recover at once, late or never, and runs are abandoned, rightly or
not.
"""

from __future__ import annotations

from typing import Any

import pytest
from batcher.concurrency.test_interleavings import MOST, Scenario, play, seeds_of

from tensorferry.batcher import InstanceFailed, OutOfMemory, RunTimedOut
from tensorferry.batcher.request import State


class FailingScenario(Scenario):
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
        if not hasattr(self, "batcher"):
            return
        queue = self.batcher._queue
        free = [
            device
            for device in queue._devices.each
            if device.outage is None and device.idle and device.waiting
        ]
        if self.patience is None and not self.window:
            assert not (free and queue._backlog.rows), "a device that works is idle, and requests wait"
        at_its_post = vars(queue._expiry._due)["_waiters"]
        for sent in self.sent if at_its_post else ():
            waits = sent.request is not None and sent.request.state is State.QUEUED
            assert not waits or sent.deadline >= self.interleaver.now(), (
                "a deadline passed, and its caller got no answer"
            )

    def main(self) -> None:
        if self.gives_up:
            self.start_thread("watchdog", self.watch)
        super().main()

    def watch(self) -> None:
        for _ in range(3):
            self.interleaver.sleep(self.random.choice([0.0, 0.01, 0.03]))
            if hasattr(self, "batcher"):
                self.batcher.abort_hung_run(self.random.randrange(self.devices), RunTimedOut("it hangs"))

    def check_error(self, error: BaseException) -> None:
        if isinstance(error, InstanceFailed):
            assert self.breaks or self.gives_up
        elif isinstance(error, RunTimedOut):
            assert self.gives_up
        elif not isinstance(error, self.bugs):
            # No OutOfMemory, because one row fits everywhere.
            super().check_error(error)


@pytest.mark.parametrize("attending", [False, True])
@pytest.mark.parametrize("block", range(10))
def test_whatever_fails_and_when_nothing_is_lost_or_doubled(
    block: int, attending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:

    def attend(scenario: Scenario) -> None:
        if attending:
            scenario.attending, scenario.short = scenario.random.choice([1, 2, 3]), 1.0
            scenario.devices, scenario.pipelined, scenario.window, scenario.anchored = 1, False, 0.0, True

    play(seeds_of(block, 30, 5000), monkeypatch, FailingScenario, attend)
