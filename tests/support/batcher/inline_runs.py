"""Threads that enqueue quietly and run short batches inline."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from batcher.conftest import Make
from support.batcher.rig import PATIENCE, Recorder, fails_below_zero, new_request

from tensorferry.batcher import Batcher, Request
from tensorferry.batcher.testing import VirtualClock

SHORT, LONG = 100e-6, 0.5
# Longest batch, in seconds, that the submitting thread may run.
MOST = 1e-3


class Model:
    """Model that doubles its input, calls a hook of the test, and records its threads."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.batches: list[list[float]] = []
        # Hooks of the first batch, the second, and so on.
        self.script: list[Callable[[], object]] = []
        self._running = 0

    def __call__(self, x: Any) -> Any:
        self._running += 1
        assert self._running == 1, "one thread at a time"
        self.threads.append(threading.current_thread())
        self.batches.append(x.tolist())
        try:
            if self.script:
                self.script.pop(0)()
        finally:
            self._running -= 1
        return fails_below_zero(x)

    @property
    def here(self) -> bool:
        """Whether all batches ran on the calling thread."""
        return all(thread is threading.current_thread() for thread in self.threads)


def await_worker(clock: VirtualClock) -> None:
    """Wait until the worker waits for work."""
    clock.await_sleepers(until=math.inf)


def quietly(batcher: Batcher, x: Any, **options: Any) -> tuple[Request, Recorder, bool]:
    """Enqueue the rows `x` quietly; return whether an inline run must follow."""
    recorder = Recorder()
    request = new_request(x, recorder, **options)
    return request, recorder, batcher.enqueue(request, notify=False)


def elsewhere(action: Callable[[], object]) -> None:
    """Run a function on another thread, and wait for it."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def wake_ups(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """List that grows with each wake-up of the worker from now on."""
    woken: list[None] = []
    ready = batcher._queue._devices.each[0].ready
    notify = ready.notify

    def watched(n: int = 1) -> None:
        woken.append(None)
        notify(n)

    monkeypatch.setattr(ready, "notify", watched)
    return woken


def short_batches(make: Make, model: Model, clock: VirtualClock) -> Batcher:
    """A batcher whose batches are known to be short. Its worker waits."""
    made = make(model, 4, clock=clock)
    for rows in (1, 4):
        made.add_warmup_sample(rows, SHORT)
    await_worker(clock)
    return made
