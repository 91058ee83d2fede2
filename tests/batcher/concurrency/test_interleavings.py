"""Properties 1, 2, 3, 5, 10, 11 and 13, in any order in which threads continue at locks.

Each seed is another interleaving of callers, workers, the expiry thread and a closer, in virtual
time. The harness fails a run with a lost wake-up: every thread waits, and none with a timeout.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support.batcher.interleave import Interleaver
from support.batcher.rig import figures_add_up, new_request
from support.batcher.scenario import MOST_ROWS, Scenario, Sent, play

from tensorferry.batcher import Batcher, InstanceFailed, Request
from tensorferry.batcher.learning.return_model import ReturnModel
from tensorferry.batcher.request import State

MOST = 4
POISON = 7.0


class Loyal(ReturnModel):
    expected = True
    patience = 0.0

    def wait_until(self, now: float, queued: int, batch_time: Any, room: int, answering: Any = None) -> float:
        """Wait for this long after the last answers, however many requests arrive."""
        self.wanted = 1 << 62
        return max(now, self._answered_at + self.patience)

    def answered(self, now: float, callers: int) -> None:
        self._answered_at = now


class BatcherScenario(Scenario):
    """A batcher with up to three devices and classes."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(seed, monkeypatch)
        self.devices = self.random.choice([1, 1, 2, 3])
        self.pipelined = self.random.random() < 0.5
        self.window = self.random.choice([0.0, 0.0, 0.0, 0.03])
        # One device may be slower than the others.
        self.slowness = self.random.choice([1, 1, 3])
        self.slow_device = self.random.randrange(self.devices)
        self.classes = self.random.choice([1, 2, 3])
        self.anchored = self.random.random() < 0.5
        # Callers are always expected to return, and waited for this long.
        self.patience = self.random.choice([None, 0.0, 0.003])
        if self.patience is not None:
            loyal = type("Loyal", (Loyal,), {"patience": self.patience})
            monkeypatch.setattr("tensorferry.batcher.queue.request_queue.ReturnModel", loyal)
        # This many callers run short batches inline; some batches are short.
        self.attending, self.short = 0, 0.0
        self.idle_since = math.inf
        self.running = [0] * self.devices

    def model_fn(self, device: int) -> Any:
        def run(x: Any) -> Any:
            assert len(x) <= MOST
            self.running[device] += 1
            self.most_at_once = max(self.most_at_once, self.running[device])
            seconds = 0.01 + 0.001 * len(x) + 0.002 * self.random.random()
            self.interleaver.sleep(seconds * (self.slowness if device == self.slow_device else 1))
            self.running[device] -= 1
            if (x == POISON).any():
                raise ValueError("poisoned")
            return x * 2

        return run

    most_at_once = 0

    def before_time_moves(self) -> None:
        if self.served is None:
            return
        sizes = self.served.statistics().sizes
        assert 0 <= sizes.queued_rows <= MOST_ROWS
        assert sum(sizes.class_rows) == sizes.queued_rows
        # A device whose workers are busy completing requests cannot take a batch; any other must.
        free = [device for device in self.served._queue._devices.each if device.idle and device.waiting]
        if self.patience is not None:
            free = [device for device in free if not device.batches_outstanding]
        if sizes.queued and free and not self.window:
            self.idle_since = min(self.idle_since, self.interleaver.now())
            lasted = self.interleaver.now() - self.idle_since
            assert lasted <= 3 * (self.patience or 0.0), "a device is idle, and requests wait"
        else:
            self.idle_since = math.inf
        self.check_deadlines()

    def check_deadlines(self) -> None:
        at_its_post = vars(self.served._queue._expiry._due)["_waiters"]
        for sent in self.sent if at_its_post else ():
            assert sent.request.state is not State.QUEUED or sent.deadline >= self.interleaver.now(), (
                "a deadline passed, and its caller got no answer"
            )

    def make(self) -> Batcher:
        batcher = Batcher(
            [self.model_fn(device) for device in range(self.devices)],
            MOST,
            self.window,
            max_queue_size=MOST_ROWS,
            priority_weights=(4, 2, 1)[: self.classes],
            pipelined=self.pipelined,
            clock=self.interleaver.clock,
        )
        if self.anchored:
            batcher.add_warmup_sample(1, 0.012)
            batcher.add_warmup_sample(MOST, 0.015)
        return batcher

    def new_sent(self, number: int, deadline: float) -> Sent:
        tag = POISON if self.random.random() < 0.1 else 100.0 + 10 * number + self.random.randrange(7)
        shape = (self.random.choice([0, 1, 1, 1, 2, 4, 6]), self.random.choice([1, 1, 1, 2]))
        request = new_request(
            np.full(shape, tag), deadline=deadline, priority=self.random.randint(0, self.classes)
        )
        return Sent(request, deadline, tag, "poisoned" if tag == POISON else None)

    def enqueue(self, number: int, request: Request) -> None:
        if number >= self.attending:
            self.served.enqueue(request)
        elif self.served.enqueue(request, notify=False):
            self.run_inline(self.short)

    def check_answer(self, sent: Sent, outputs: Any) -> None:
        assert (outputs == 2 * sent.tag).all(), "its own rows"
        assert len(outputs) == sent.request.rows

    def check_error(self, error: BaseException) -> None:
        # A batch that failed after a long inline run is left to a worker, and a closed batcher has none.
        left = isinstance(error, InstanceFailed) and "too long for the thread" in str(error)
        if not (left and self.attending and self.closing != "after"):
            super().check_error(error)

    def check(self) -> None:
        super().check()
        figures_add_up(self.served.statistics())
        assert self.most_at_once <= 1, "one thread at a time on a device"


def attend(scenario: BatcherScenario) -> None:
    """Let callers run short batches inline."""
    scenario.attending, scenario.short = scenario.random.choice([1, 2, 3]), 1.0
    scenario.devices, scenario.pipelined, scenario.window, scenario.anchored = 1, False, 0.0, True


@pytest.mark.parametrize("block", range(3))
def test_with_inline_runs_nothing_is_lost_or_doubled(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(scenario: BatcherScenario) -> None:
        if scenario.random.random() < 0.9:
            attend(scenario)
        scenario.short = scenario.random.choice([0.0125, 0.0135, 1.0])

    play(range(1000 + 30 * block, 1030 + 30 * block), monkeypatch, BatcherScenario, prepare)


@pytest.mark.parametrize("block", range(5))
def test_in_whatever_order_threads_go_on_nothing_is_lost_or_doubled(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(range(30 * block, 30 * (block + 1)), monkeypatch, BatcherScenario)


def test_a_lost_wake_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: a queue that does not wake its worker fails the run."""
    interleaver = Interleaver(0)
    interleaver.install(monkeypatch)
    monkeypatch.setattr("tensorferry.batcher.queue.wakeup.WorkerWakeup.wake", lambda self, now: None)

    def main() -> None:
        batcher = Batcher(lambda x: x, clock=interleaver.clock)
        interleaver.sleep(1.0)
        future = batcher.submit(1.0)
        interleaver.wait(future.done)

    with pytest.raises(AssertionError, match="no thread can ever run again"):
        interleaver.run(main)
