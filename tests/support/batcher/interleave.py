"""Threads whose interleaving is chosen: one runs at a time, and another may go on at every lock.

`Loom` stands in for `threading` and the clock. It moves time only when nobody can run; when then
nobody waits for a time either, a wake-up was lost, and the run fails. Every choice comes from one
seed, so a failing interleaving fails again.
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
    """Ends the threads of a run that has failed."""


class Strand:
    """One of the threads: it runs while it holds the baton."""

    def __init__(self, loom: Loom, target: Callable[[], object], name: str) -> None:
        self.loom = loom
        self.name = name
        self.baton = threading.Lock()
        self.baton.acquire()
        self.alive = False
        self.stopped = False
        # What it waits for, and until when.
        self.ready: Callable[[], bool] = lambda: True
        self.until = math.inf
        self._target = target
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.alive = True
        self.loom.strands.append(self)
        self._thread.start()

    def _run(self) -> None:
        self.baton.acquire()
        try:
            if self.loom.failure is None:
                self._target()
        except Stopped:
            pass
        except BaseException as error:
            self.loom.fail(error)
        finally:
            self.alive = False
            self.loom.hand_over()

    def is_alive(self) -> bool:
        return self.alive

    def join(self, timeout: float | None = None) -> None:
        until = math.inf if timeout is None else self.loom.now() + timeout
        self.loom.wait(lambda: not self.alive, until)


class Lock:
    def __init__(self, loom: Loom) -> None:
        self._loom = loom
        self.held = False

    def __enter__(self) -> Lock:
        self._loom.wait(lambda: True)
        while self.held:
            self._loom.wait(lambda: not self.held)
        self.held = True
        return self

    def __exit__(self, *_: object) -> None:
        self.held = False


class Condition:
    def __init__(self, loom: Loom, lock: Lock) -> None:
        self._loom = loom
        self._lock = lock
        self._waiters: list[object] = []

    def wait(self, until: float = math.inf) -> None:
        mine = object()
        self._waiters.append(mine)
        self._lock.held = False
        self._loom.wait(lambda: mine not in self._waiters, until)
        if mine in self._waiters:
            self._waiters.remove(mine)
        while self._lock.held:
            self._loom.wait(lambda: not self._lock.held)
        self._lock.held = True

    def notify(self, count: int = 1) -> None:
        del self._waiters[:count]

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Loom:
    """Runs threads one at a time, in an order drawn from a seed. It is a clock, too."""

    def __init__(self, seed: int, at_rest: Callable[[], None] = lambda: None) -> None:
        self.time = 0.0
        self.strands: list[Strand] = []
        self.failure: BaseException | None = None
        # Called when nobody can run, before time moves.
        self.at_rest = at_rest
        self._resting = False
        self._random = random.Random(seed)
        self._current: Strand | None = None
        self._over = threading.Event()

    def now(self) -> float:
        return self.time

    def wait_on(self, condition: Condition, until: float) -> None:
        if self.time < until:
            condition.wait(until)

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, self.time + seconds)

    def run(self, main: Callable[[], object]) -> None:
        """Runs `main` and every thread that it starts to their ends."""
        Strand(self, main, "main").start()
        self.hand_over()
        assert self._over.wait(60), "the run did not end"
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def wait(self, ready: Callable[[], bool], until: float = math.inf) -> None:
        """Lets others run, until this thread is ready, or it is so late, and its turn comes."""
        if self._resting or self._over.is_set():
            return
        if self.failure is not None:
            self._stop()
        mine = self._current
        assert mine is not None
        mine.ready, mine.until = ready, until
        self.hand_over()
        mine.baton.acquire()
        if self.failure is not None:
            self._stop()

    def _stop(self) -> None:
        """Ends the current thread; one that will not end waits for good."""
        mine = self._current
        assert mine is not None
        if mine.stopped:
            mine.alive = False
            self.hand_over()
            mine.baton.acquire()
        mine.stopped = True
        raise Stopped

    def hand_over(self) -> None:
        """Chooses who runs next."""
        alive = [strand for strand in self.strands if strand.alive]
        if not alive:
            self._over.set()
            return
        runnable = alive if self.failure else self._runnable(alive)
        self._current = self._random.choice(runnable or alive)
        self._current.baton.release()

    def _runnable(self, alive: list[Strand]) -> list[Strand]:
        runnable = [strand for strand in alive if strand.ready() or strand.until <= self.time]
        if runnable:
            return runnable
        try:
            self._resting = True
            self.at_rest()
        except AssertionError as error:
            self.fail(error)
        finally:
            self._resting = False
        due = min(strand.until for strand in alive)
        if due == math.inf:
            self.fail(AssertionError(f"nobody will ever run again: {[strand.name for strand in alive]}"))
            return []
        self.time = due
        return [strand for strand in alive if strand.until <= due]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gives the batcher's modules these locks and threads instead of the real ones."""

        def thread(*, target: Callable[[], object], name: str, daemon: bool) -> Strand:
            return Strand(self, target, name)

        fakes = SimpleNamespace(
            Lock=lambda: Lock(self),
            Condition=lambda lock: Condition(self, lock),
            Thread=thread,
            current_thread=lambda: self._current,
            get_ident=lambda: id(self._current),
        )
        for module in modules_with_threading():
            monkeypatch.setattr(module, "threading", fakes)

    @property
    def clock(self) -> Any:
        """As the batcher's clock."""
        return SimpleNamespace(now=self.now, wait=self.wait_on)
