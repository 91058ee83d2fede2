"""Supervised threads are restarted after a crash, with growing pauses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tensorferry.batcher.supervision import RestartBackoff, supervise
from tensorferry.batcher.testing import VirtualClock

PATIENCE = 30.0
Make = Callable[..., "CrashingThread"]


class CrashingThread:
    """A supervised thread whose work crashes whenever the test lets it."""

    def __init__(self, on_crash: Callable[[BaseException], None] = lambda fault: None) -> None:
        self.clock = VirtualClock()
        self.backoff = RestartBackoff(self.clock)
        self._started, self._may_crash = threading.Semaphore(0), threading.Semaphore(0)
        self._recovered = False
        self.thread = threading.Thread(
            target=supervise, args=(self._work, on_crash, self.backoff), daemon=True
        )
        self.thread.start()

    def _work(self) -> None:
        self._started.release()
        assert self._may_crash.acquire(timeout=PATIENCE)
        if not self._recovered:
            raise SystemExit

    def crash(self) -> None:
        """Wait until the work has started, and let it crash."""
        assert self._started.acquire(timeout=PATIENCE)
        self._may_crash.release()

    def pause(self, seconds: float) -> None:
        """Check that the work is not restarted before this pause, and let the pause pass."""
        self.clock.await_sleepers(until=self.clock.now() + seconds)
        assert not self._started.acquire(blocking=False)
        self.clock.advance(seconds)

    def end(self) -> None:
        self._recovered = True
        self._may_crash.release()
        self.backoff.end()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[CrashingThread] = []

    def thread(*on_crash: Callable[[BaseException], None]) -> CrashingThread:
        made.append(CrashingThread(*on_crash))
        return made[-1]

    yield thread
    for each in made:
        each.end()


def test_pauses_grow_up_to_a_bound(make: Make) -> None:
    thread = make()
    for seconds in (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0):
        thread.crash()
        thread.pause(seconds)


def test_pauses_start_over_after_a_minute_without_a_crash(make: Make) -> None:
    thread = make()
    for seconds, runs_for in ((0.01, 1.0), (0.02, 59.0), (0.04, 60.0), (0.01, 1.0), (0.02, 0.0)):
        thread.crash()
        thread.pause(seconds)
        thread.clock.advance(runs_for)


def test_ending_the_backoff_ends_the_pause(make: Make) -> None:
    thread = make()
    thread.crash()
    thread.clock.await_sleepers()
    # The clock does not advance.
    thread.end()
    assert thread._started.acquire(blocking=False), "the work runs once more"


def test_a_crash_of_the_handler_is_reported_after_a_pause_too(make: Make) -> None:
    faults = [MemoryError(), KeyError()]
    reported: list[type[BaseException]] = []

    def on_crash(fault: BaseException) -> None:
        reported.append(type(fault))
        if faults:
            raise faults.pop(0)

    thread = make(on_crash)
    thread.crash()
    for count, seconds in enumerate((0.01, 0.02, 0.04), 1):
        thread.clock.await_sleepers(until=thread.clock.now() + seconds)
        assert reported == [SystemExit, MemoryError, KeyError][:count]
        thread.pause(seconds)
    thread.crash()
    thread.pause(0.08)
