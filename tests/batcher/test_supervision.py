"""Work that is begun again: what comes between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tensorferry.batcher.supervision import Pauses, last
from tensorferry.batcher.testing import VirtualClock

PATIENCE = 30.0
Make = Callable[..., "Falling"]


class Falling:
    """A thread whose work ends by a fault whenever the test lets it."""

    def __init__(self, mend: Callable[[BaseException], None] = lambda fault: None) -> None:
        self.clock = VirtualClock()
        self.pauses = Pauses(self.clock)
        self._begun, self._go_on = threading.Semaphore(0), threading.Semaphore(0)
        self._well = False
        self.thread = threading.Thread(target=last, args=(self._work, mend, self.pauses), daemon=True)
        self.thread.start()

    def _work(self) -> None:
        self._begun.release()
        assert self._go_on.acquire(timeout=PATIENCE)
        if not self._well:
            raise SystemExit

    def fall(self) -> None:
        """The work has begun, and ends."""
        assert self._begun.acquire(timeout=PATIENCE)
        self._go_on.release()

    def pause(self, seconds: float) -> None:
        """It has ended, and is not begun again until this has passed."""
        self.clock.await_sleepers(until=self.clock.now() + seconds)
        assert not self._begun.acquire(blocking=False)
        self.clock.advance(seconds)

    def end(self) -> None:
        self._well = True
        self._go_on.release()
        self.pauses.end()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Falling] = []

    def falling(*mend: Callable[[BaseException], None]) -> Falling:
        made.append(Falling(*mend))
        return made[-1]

    yield falling
    for each in made:
        each.end()


def test_pauses_grow_up_to_a_bound(make: Make) -> None:
    falling = make()
    for seconds in (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0):
        falling.fall()
        falling.pause(seconds)


def test_work_that_has_gone_on_for_a_minute_has_recovered(make: Make) -> None:
    falling = make()
    for seconds, goes_on in ((0.01, 1.0), (0.02, 59.0), (0.04, 60.0), (0.01, 1.0), (0.02, 0.0)):
        falling.fall()
        falling.pause(seconds)
        falling.clock.advance(goes_on)


def test_the_end_waits_for_no_pause(make: Make) -> None:
    falling = make()
    falling.fall()
    falling.clock.await_sleepers()
    # The time stands still.
    falling.end()
    assert falling._begun.acquire(blocking=False), "what is left is looked at once more"


def test_what_mends_may_fall_too_and_a_pause_comes_all_the_same(make: Make) -> None:
    faults = [MemoryError(), KeyError()]
    mended: list[type[BaseException]] = []

    def mend(fault: BaseException) -> None:
        mended.append(type(fault))
        if faults:
            raise faults.pop(0)

    falling = make(mend)
    falling.fall()
    for count, seconds in enumerate((0.01, 0.02, 0.04), 1):
        falling.clock.await_sleepers(until=falling.clock.now() + seconds)
        assert mended == [SystemExit, MemoryError, KeyError][:count]
        falling.pause(seconds)
    falling.fall()
    falling.pause(0.08)
