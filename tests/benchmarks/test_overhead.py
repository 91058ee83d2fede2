"""Timing of the queue's lock."""

from __future__ import annotations

import math
import threading

from overhead import TimedLock, lock_seconds


def test_only_the_watched_thread_is_timed() -> None:
    lock = TimedLock()
    with lock:
        assert lock.locked()
    assert lock.holds == []
    lock.watched = threading.get_ident()
    with lock:
        assert not lock.acquire(blocking=False)
    assert len(lock.holds) == 1


def test_every_batch_is_timed_but_those_that_warm_up() -> None:
    held = lock_seconds(60, 64, math.inf)
    assert len(held) == 10
    assert all(held)
