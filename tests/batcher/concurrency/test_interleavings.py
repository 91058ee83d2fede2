"""Properties 1, 2, 3, 5, 10, 11 and 13, in any order in which threads continue at locks.

Each seed is another interleaving of callers, workers, the expiry thread and a closer, in virtual
time. The harness fails a run with a lost wake-up: every thread waits, and none with a timeout.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.batcher.interleave import ControlledThread, Interleaver
from support.batcher.rig import figures_add_up

from tensorferry.batcher import (
    Batcher,
    BatcherClosed,
    BatcherError,
    Cancelled,
    DeadlineExceeded,
    Outcome,
    Request,
    Shed,
)
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.learning.return_model import ReturnModel
from tensorferry.batcher.request import State

MOST, MOST_ROWS = 4, 12
POISON = 7.0


@dataclass
class Sent:
    tag: float
    rows: int
    deadline: float
    request: Request | None = None
    outcomes: list[tuple[float, Outcome]] = field(default_factory=list)


class Loyal(ReturnModel):
    expected = True
    patience = 0.0

    def wait_until(self, now: float, queued: int, batch_time: Any, room: int, answering: Any = None) -> float:
        """Wait for this long after the last answers, however many requests arrive."""
        self.wanted = 1 << 62
        return max(now, self._answered_at + self.patience)

    def answered(self, now: float, callers: int) -> None:
        self._answered_at = now


class Scenario:
    """A batcher, its callers and the thread that closes it, made from a seed."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.interleaver = Interleaver(seed, self.before_time_moves)
        self.interleaver.install(monkeypatch)
        self.devices = self.random.choice([1, 1, 2, 3])
        self.pipelined = self.random.random() < 0.5
        self.window = self.random.choice([0.0, 0.0, 0.0, 0.03])
        # One device may be slower than the others.
        self.slowness = self.random.choice([1, 1, 3])
        self.slow_device = self.random.randrange(self.devices)
        self.classes = self.random.choice([1, 2, 3])
        self.anchored = self.random.random() < 0.5
        # Completions take time.
        self.slow = self.random.random() < 0.5
        # Callers are always expected to return, and waited for this long.
        self.patience = self.random.choice([None, 0.0, 0.003])
        if self.patience is not None:
            loyal = type("Loyal", (Loyal,), {"patience": self.patience})
            monkeypatch.setattr("tensorferry.batcher.queue.request_queue.ReturnModel", loyal)
        # This many callers run short batches inline; some batches are short.
        self.attending, self.short = 0, 0.0
        self.idle_since = math.inf
        self.sent: list[Sent] = []
        self.running = [0] * self.devices
        self.callers = 3
        self.batcher: Batcher

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
        """Check, before time moves, that every thread waits where it should."""
        if not hasattr(self, "batcher"):
            return
        sizes = self.batcher.statistics().sizes
        assert 0 <= sizes.queued_rows <= MOST_ROWS
        assert sum(sizes.class_rows) == sizes.queued_rows
        # A device whose workers are busy completing requests cannot take a batch; any other must.
        queue = self.batcher._queue
        free = [device for device in queue._devices.each if device.idle and device.waiting]
        if self.patience is not None:
            free = [device for device in free if not device.batches_outstanding]
        if sizes.queued and free and not self.window:
            self.idle_since = min(self.idle_since, self.interleaver.now())
            lasted = self.interleaver.now() - self.idle_since
            allowed = 3 * (self.patience or 0.0)
            assert lasted <= allowed, "a device is idle, and requests wait"
        else:
            self.idle_since = math.inf
        at_its_post = vars(queue._expiry._due)["_waiters"]
        for sent in self.sent if at_its_post else ():
            waits = sent.request is not None and sent.request.state is State.QUEUED
            assert not waits or sent.deadline >= self.interleaver.now(), (
                "a deadline passed, and its caller got no answer"
            )

    def main(self) -> None:
        self.batcher = Batcher(
            [self.model_fn(device) for device in range(self.devices)],
            MOST,
            self.window,
            max_queue_size=MOST_ROWS,
            priority_weights=(4, 2, 1)[: self.classes],
            pipelined=self.pipelined,
            clock=self.interleaver.clock,
        )
        if self.anchored:
            self.batcher.add_warmup_sample(1, 0.012)
            self.batcher.add_warmup_sample(MOST, 0.015)
        callers = [
            self.start_thread(f"caller-{number}", partial(self.call, number))
            for number in range(self.callers)
        ]
        closing = self.random.choice(["after", "drain", "abandon"])
        if closing != "after":
            self.interleaver.sleep(self.random.choice([0.0, 0.02, 0.05]))
            self.batcher.close(drain=closing == "drain", timeout=self.random.choice([None, None, 0.005]))
        for caller in callers:
            caller.join()
        if self.random.random() < 0.5:
            assert self.batcher.drain()
            assert all(len(sent.outcomes) == 1 for sent in self.sent), "drained, completions included"
        assert self.batcher.close()

    def start_thread(self, name: str, target: Callable[[], object]) -> ControlledThread:
        thread = ControlledThread(self.interleaver, target, name)
        thread.start()
        return thread

    def call(self, number: int) -> None:
        mine: list[Sent] = []
        for turn in range(7):
            if self.random.random() < 0.5:
                self.interleaver.sleep(self.random.choice([0.0, 0.001, 0.012, 0.03]))
            if mine and self.random.random() < 0.2:
                request = self.random.choice(mine).request
                assert request is not None
                self.batcher.cancel(request)
                continue
            tag = POISON if self.random.random() < 0.1 else 100.0 + 10 * number + turn
            timeout = self.random.choice([math.inf, math.inf, 0.004, 0.02, 0.05])
            sent = Sent(tag, self.random.choice([0, 1, 1, 1, 2, 4, 6]), self.interleaver.now() + timeout)
            width = self.random.choice([1, 1, 1, 2])
            request = request_of(
                np.full((sent.rows, width), tag),
                lambda outcome, sent=sent: self.complete(sent, outcome),  # type: ignore[misc]
                one_row=False,
                deadline=sent.deadline,
            )
            request.priority = self.random.randint(0, self.classes)
            try:
                self.enqueue(number, request)
            except BatcherError:
                assert not sent.outcomes
                continue
            sent.request = request
            mine.append(sent)
            self.sent.append(sent)

    def enqueue(self, number: int, request: Request) -> None:
        if number >= self.attending:
            self.batcher.enqueue(request)
        elif self.batcher.enqueue(request, notify=False):
            while (again := self.batcher.run_inline(self.short)) < math.inf:
                self.interleaver.sleep(again - self.interleaver.now())

    def complete(self, sent: Sent, outcome: Outcome) -> None:
        sent.outcomes.append((self.interleaver.now(), outcome))
        if self.slow and self.random.random() < 0.3:
            self.interleaver.sleep(self.random.choice([0.0, 0.002, 0.02]))

    def check(self) -> None:
        for sent in self.sent:
            ((when, outcome),) = sent.outcomes
            if outcome.error is None:
                assert (outcome.outputs == 2 * sent.tag).all(), "its own rows"
                assert len(outcome.outputs) == sent.rows
                assert self.slow or when < sent.deadline
            elif isinstance(outcome.error, ValueError):
                assert sent.tag == POISON, "failed by a neighbour's fault"
            elif isinstance(outcome.error, DeadlineExceeded):
                assert sent.deadline < math.inf
            else:
                self.check_error(outcome.error)
        counts = self.batcher.statistics()
        assert counts.accepted == len(self.sent)
        figures_add_up(counts)
        assert self.most_at_once <= 1, "one thread at a time on a device"

    def check_error(self, error: BaseException) -> None:
        """Check another error of a request."""
        assert isinstance(error, (Cancelled, Shed, BatcherClosed)), error


def play(
    seeds: range,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[int, pytest.MonkeyPatch], Scenario] = Scenario,
    prepare: Callable[[Any], None] = lambda scenario: None,
) -> None:
    """Run the scenario of each seed to its end; the error of a failing seed names it."""
    for seed in seeds:
        with monkeypatch.context() as patch:
            scenario = make(seed, patch)
            prepare(scenario)
            try:
                scenario.interleaver.run(scenario.main)
                scenario.check()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise


def seeds_of(block: int, count: int, start: int = 0) -> range:
    """Return the seeds of one block of this size."""
    return range(start + count * block, start + count * (block + 1))


@pytest.mark.parametrize("block", range(5))
def test_with_inline_runs_nothing_is_lost_or_doubled(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like the next test, but callers run short batches inline."""

    def attend(scenario: Scenario) -> None:
        scenario.attending = scenario.random.choice([1, 2, 3])
        scenario.short = scenario.random.choice([0.0125, 0.0135, 1.0])
        if scenario.random.random() < 0.9:
            scenario.devices, scenario.pipelined, scenario.window, scenario.anchored = 1, False, 0.0, True

    play(seeds_of(block, 40, 1000), monkeypatch, prepare=attend)


@pytest.mark.parametrize("block", range(10))
def test_in_whatever_order_threads_go_on_nothing_is_lost_or_doubled(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(seeds_of(block, 40), monkeypatch)


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
