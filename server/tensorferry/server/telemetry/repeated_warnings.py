"""A limit on warnings that repeat: a model that fails on each request must not fill the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeAlias

# Of lines with the same words about the same subject.
MOST_REPEATS = 10
PERIOD_SECONDS = 60.0
# Subjects may be names that clients choose.
_MOST_KEYS = 1000

_Key: TypeAlias = tuple[str, str, str]


class _Period:
    __slots__ = ("began", "count", "left_out")

    def __init__(self, began: float) -> None:
        self.began = began
        self.count = self.left_out = 0


class RepeatLimit(logging.Filter):
    """Filter that lets 10 equal warnings or errors a minute through, and counts the others. Thread-safe.

    Two are equal if they have the same logger, template and model, which is the first argument or a field. The
    next that is let through has the count of the others as the field `repeats_left_out`.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        # Guards _periods and what is in it. Nothing is logged while it is held.
        self._lock = threading.Lock()
        self._periods: dict[_Key, _Period] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if record.levelno < logging.WARNING:
            return True
        key = _key(record)
        now = self._clock()
        with self._lock:
            period = self._period_locked(key, now)
            period.count += 1
            if period.count > MOST_REPEATS:
                period.left_out += 1
                return False
            left_out, period.left_out = period.left_out, 0
        if left_out:
            record.repeats_left_out = left_out
        return True

    def take_left_out(self) -> int:
        """The number of records that were left out and not told of by a later record. They then count as told of."""
        with self._lock:
            left_out = sum(period.left_out for period in self._periods.values())
            for period in self._periods.values():
                period.left_out = 0
        return left_out

    def _period_locked(self, key: _Key, now: float) -> _Period:
        period = self._periods.get(key)
        if period is None:
            if len(self._periods) >= _MOST_KEYS:
                # The oldest is forgotten, and its count with it.
                del self._periods[next(iter(self._periods))]
            period = self._periods[key] = _Period(now)
        elif now - period.began >= PERIOD_SECONDS:
            period.began, period.count = now, 0
        return period


def _key(record: logging.LogRecord) -> _Key:
    first = record.args[0] if isinstance(record.args, tuple) and record.args else None
    subject = first if isinstance(first, str) else getattr(record, "model", "")
    return record.name, str(record.msg), str(subject)
