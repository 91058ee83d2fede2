"""Limit on repeated warnings, so that a model that fails on each request cannot fill the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TypeAlias

# Limit for equal lines in a period.
MAX_REPEATS = 10
PERIOD_SECONDS = 60.0
# Limit, because subjects may be names that clients choose.
_MAX_KEYS = 1000

_Key: TypeAlias = tuple[str, str, str]


@dataclass(slots=True)
class _Period:
    began: float
    count: int = 0
    left_out: int = 0


class RepeatLimit(logging.Filter):
    """Filter that passes 10 equal warnings or errors per minute and counts the others. Thread-safe.

    Two records are equal if they have the same logger, template and model. The model is the first argument or a field.
    The next record that passes has the count of the others as the field `repeats_left_out`.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        # Guards _periods and its values. Nothing is logged while it is held, but by a destructor: it is reentrant, because the
        # garbage collector can run one while its thread holds the lock.
        self._lock = threading.RLock()
        self._periods: dict[_Key, _Period] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the record."""
        if record.levelno < logging.WARNING:
            return True
        key = _key(record)
        now = self._clock()
        with self._lock:
            period = self._period_locked(key, now)
            period.count += 1
            if period.count > MAX_REPEATS:
                period.left_out += 1
                return False
            left_out, period.left_out = period.left_out, 0
        if left_out:
            record.repeats_left_out = left_out
        return True

    def take_left_out(self) -> int:
        """Return and reset the number of dropped records that no later record has reported."""
        with self._lock:
            left_out = sum(period.left_out for period in self._periods.values())
            for period in self._periods.values():
                period.left_out = 0
        return left_out

    def _period_locked(self, key: _Key, now: float) -> _Period:
        period = self._periods.get(key)
        if period is None:
            if len(self._periods) >= _MAX_KEYS:
                # The oldest entry is dropped with its count.
                del self._periods[next(iter(self._periods))]
            period = self._periods[key] = _Period(now)
        elif now - period.began >= PERIOD_SECONDS:
            period.began, period.count = now, 0
        return period


def _key(record: logging.LogRecord) -> _Key:
    first = record.args[0] if isinstance(record.args, tuple) and record.args else None
    subject = first if isinstance(first, str) else getattr(record, "model", "")
    return record.name, str(record.msg), str(subject)
