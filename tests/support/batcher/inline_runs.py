"""Threads that run short batches themselves, which they enqueued quietly."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from batcher.conftest import Make
from support.batcher.rig import PATIENCE, Recorder, fails_below_zero

from tensorferry.batcher import Batcher, Request
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.testing import VirtualClock

SHORT, LONG = 100e-6, 0.5
# What the attending thread is ready to be kept for.
MOST = 1e-3


class Model:
    """Doubles its input, does on the way what the test wants, and remembers on which threads."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.batches: list[list[float]] = []
        # For the first batch, the second, and so on.
        self.script: list[Callable[[], object]] = []
        self._running = 0

    def __call__(self, x: Any) -> Any:
        self._running += 1
        assert self._running == 1, "one thread at a time"
        self.threads.append(threading.current_thread())
        self.batches.append(x.tolist())
        if self.script:
            self.script.pop(0)()
        self._running -= 1
        return fails_below_zero(x)

    @property
    def here(self) -> bool:
        """Whether all batches ran on the calling thread."""
        return all(thread is threading.current_thread() for thread in self.threads)


def await_worker(clock: VirtualClock) -> None:
    """Until the worker waits for work."""
    clock.await_sleepers(until=math.inf)


def quietly(batcher: Batcher, x: Any, **options: Any) -> tuple[Request, Recorder, bool]:
    """Enqueues the rows `x` quietly; whether `attend` must then be called."""
    recorder = Recorder()
    request = request_of(x, recorder, one_row=False, **options)
    return request, recorder, batcher.enqueue_quietly(request)


def elsewhere(action: Callable[[], object]) -> None:
    """Does something on another thread, and waits for it."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def polls(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when another thread than this has asked for work while the device was lent, and waits again."""
    asked, poll, here = threading.Event(), RequestQueue._poll_locked, threading.current_thread()

    def watched(queue: RequestQueue, device: Any) -> Any:
        step = poll(queue, device)
        if threading.current_thread() is not here:
            assert not isinstance(step, BatchAssignment), "the device is lent"
            asked.set()
        return step

    monkeypatch.setattr(RequestQueue, "_poll_locked", watched)
    return asked


def short_batches(make: Make, model: Model, clock: VirtualClock) -> Batcher:
    """A batcher of batches that are known to be short. Its worker waits."""
    made = make(model, 4, clock=clock)
    for rows in (1, 4):
        made.anchor(rows, SHORT)
    await_worker(clock)
    return made
