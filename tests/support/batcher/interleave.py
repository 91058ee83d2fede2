"""Controlled interleaving of threads: one runs at a time, and at every lock another may continue.

`Interleaver` replaces `threading` and the clock. Time moves only when no thread can run; if then no
thread waits with a timeout either, a wake-up was lost, and the run fails. One seed decides every
choice, so a failing interleaving can be repeated.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import random
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tensorferry.batcher

# The clock is replaced as a whole; the virtual clock of the testing tools is never part of such a run.
REPLACED_OTHERWISE = frozenset(("tensorferry.batcher.clock", "tensorferry.batcher.testing"))


def modules_with_threading() -> list[ModuleType]:
    """Return the modules of the batcher that import `threading`."""
    found = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(tensorferry.batcher.__path__, "tensorferry.batcher.")
        if module.name not in REPLACED_OTHERWISE
    ]
    return [module for module in found if getattr(module, "threading", None) is threading]


class Stopped(BaseException):
    """Ends the threads of a failed run."""


class ControlledThread:
    """A controlled thread: it runs while it holds the permit."""

    def __init__(self, interleaver: Interleaver, target: Callable[[], object], name: str) -> None:
        self.interleaver = interleaver
        self.name = name
        self.permit = threading.Lock()
        self.permit.acquire()
        self.alive = False
        self.stopped = False
        # Condition that it waits for, and its timeout.
        self.ready: Callable[[], bool] = lambda: True
        self.until = math.inf
        self._target = target
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.alive = True
        self.interleaver.threads.append(self)
        self._thread.start()

    def _run(self) -> None:
        self.permit.acquire()
        try:
            if self.interleaver.failure is None:
                self._target()
        except Stopped:
            pass
        except BaseException as error:
            self.interleaver.fail(error)
        finally:
            self.alive = False
            self.interleaver.hand_over()

    def is_alive(self) -> bool:
        return self.alive

    def join(self, timeout: float | None = None) -> None:
        until = math.inf if timeout is None else self.interleaver.now() + timeout
        self.interleaver.wait(lambda: not self.alive, until)


class Lock:
    def __init__(self, interleaver: Interleaver) -> None:
        self._interleaver = interleaver
        self._holder: ControlledThread | None = None

    @property
    def held_by_this_thread(self) -> bool:
        return self._holder is not None and self._holder is self._interleaver.current

    def acquire(self) -> None:
        while self._holder is not None:
            self._interleaver.wait(lambda: self._holder is None)
        self._holder = self._interleaver.current

    def release(self) -> None:
        self._holder = None

    def __enter__(self) -> Lock:
        self._interleaver.wait(lambda: True)
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    def __init__(self, interleaver: Interleaver, lock: Lock) -> None:
        self._interleaver = interleaver
        self._lock = lock
        self._waiters: list[object] = []

    def wait(self, until: float = math.inf) -> None:
        mine = object()
        self._waiters.append(mine)
        self._lock.release()
        self._interleaver.wait(lambda: mine not in self._waiters, until)
        if mine in self._waiters:
            self._waiters.remove(mine)
        self._lock.acquire()

    def notify(self, count: int = 1) -> None:
        del self._waiters[:count]

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Interleaver:
    """Runs threads one at a time, in an order drawn from a seed. Also the clock."""

    def __init__(self, seed: int, before_time_moves: Callable[[], None] = lambda: None) -> None:
        self.time = 0.0
        self.threads: list[ControlledThread] = []
        self.failure: BaseException | None = None
        # Called when no thread can run, before time moves.
        self.before_time_moves = before_time_moves
        self._resting = False
        self._random = random.Random(seed)
        self.current: ControlledThread | None = None
        self._over = threading.Event()

    def now(self) -> float:
        return self.time

    def wait_on(self, condition: Condition, until: float) -> None:
        if self.time < until:
            condition.wait(until)

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, self.time + seconds)

    def run(self, main: Callable[[], object]) -> None:
        """Run `main` and every thread that it starts to their ends."""
        ControlledThread(self, main, "main").start()
        self.hand_over()
        assert self._over.wait(60), "the run did not end"
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def wait(self, ready: Callable[[], bool], until: float = math.inf) -> None:
        """Let other threads run, until this thread is ready or its timeout has passed, and it is
        chosen.
        """
        if self._resting or self._over.is_set():
            return
        if self.failure is not None:
            self._stop()
        mine = self.current
        assert mine is not None
        mine.ready, mine.until = ready, until
        self.hand_over()
        mine.permit.acquire()
        if self.failure is not None:
            self._stop()

    def _stop(self) -> None:
        """End the current thread; a thread that does not end waits for ever."""
        mine = self.current
        assert mine is not None
        if mine.stopped:
            mine.alive = False
            self.hand_over()
            mine.permit.acquire()
        mine.stopped = True
        raise Stopped

    def hand_over(self) -> None:
        """Choose the next thread."""
        alive = [thread for thread in self.threads if thread.alive]
        if not alive:
            self._over.set()
            return
        runnable = alive if self.failure else self._runnable(alive)
        self.current = self._random.choice(runnable or alive)
        self.current.permit.release()

    def _runnable(self, alive: list[ControlledThread]) -> list[ControlledThread]:
        runnable = [thread for thread in alive if thread.ready() or thread.until <= self.time]
        if runnable:
            return runnable
        try:
            self._resting = True
            self.before_time_moves()
        except AssertionError as error:
            self.fail(error)
        finally:
            self._resting = False
        due = min(thread.until for thread in alive)
        if due == math.inf:
            self.fail(AssertionError(f"no thread can ever run again: {[thread.name for thread in alive]}"))
            return []
        self.time = due
        return [thread for thread in alive if thread.until <= due]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace locks and threads of the batcher's modules."""

        def thread(*, target: Callable[[], object], name: str, daemon: bool) -> ControlledThread:
            return ControlledThread(self, target, name)

        fakes = SimpleNamespace(
            Lock=lambda: Lock(self),
            Condition=lambda lock: Condition(self, lock),
            Thread=thread,
            current_thread=lambda: self.current,
            get_ident=lambda: id(self.current),
        )
        for module in modules_with_threading():
            monkeypatch.setattr(module, "threading", fakes)

    @property
    def clock(self) -> Any:
        """Return the batcher's clock."""
        return SimpleNamespace(now=self.now, wait=self.wait_on)
