"""Limits of rows by device memory, learned from batches that did not fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

# A larger batch is tried after this many seconds; after each failed try the time doubles, up to the last value.
_FIRST_SECONDS = 10.0
_LAST_SECONDS = 640.0
# Limits kept, the last used: one for each device and bucket.
_LIMITS = 256


class MemoryRowLimit:
    """The most rows of a batch on one device, after a batch did not fit. Guarded by the queue's lock.

    A batch that does not fit halves the limit. Memory may become free again, so from time to time a larger batch is
    tried, half-way to the size that failed. A failed try costs one run, so tries become rarer.
    """

    __slots__ = ("_failed", "_interval", "_most", "_try_at", "rows")

    def __init__(self, most: int) -> None:
        self._most = most
        # The fewest rows that did not fit.
        self._failed = most + 1
        self._interval = _FIRST_SECONDS
        self._try_at = 0.0
        self.rows = most

    @property
    def removed(self) -> bool:
        """Whether the limit is no longer needed."""
        return self.rows >= self._most

    def allowed(self, now: float) -> int:
        """Return the most rows of a batch that is closed now."""
        if now < self._try_at:
            return self.rows
        return min(self._most, self.rows + max(1, (self._failed - self.rows) // 2))

    def dispatched(self, rows: int, now: float) -> None:
        """Note a batch that is closed; a larger one than known to fit is the only try for a while."""
        if rows > self.rows:
            self._try_at = now + self._interval

    def record_success(self, rows: int) -> None:
        """Note a batch that ran."""
        if rows > self.rows:
            self.rows = rows
            self._interval = _FIRST_SECONDS
            if rows >= self._failed:
                self._failed = self._most + 1

    def record_oom(self, rows: int, now: float) -> None:
        """Note a batch that did not fit."""
        if rows > self.rows:
            self._interval = min(2 * self._interval, _LAST_SECONDS)
        else:
            self.rows = max(1, rows // 2)
        self._failed = min(self._failed, rows)
        self._try_at = now + self._interval


class MemoryRowLimits:
    """The limits of all devices and buckets that have one. Guarded by the queue's lock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._limits: OrderedDict[tuple[int, Hashable], MemoryRowLimit] = OrderedDict()
        # Whether there are limits; read for each batch.
        self.needed = False

    def rows(self, device: int, key: Hashable) -> int:
        """Return the most rows that are known to fit."""
        limit = self._limits.get((device, key))
        return self._most if limit is None else limit.rows

    def rows_of_all(self, key: Hashable) -> int:
        """Return the most rows that are known to fit into every device's memory."""
        return min([limit.rows for (_, of), limit in self._limits.items() if of == key], default=self._most)

    def allowed(self, device: int, key: Hashable, rows: int, now: float) -> int:
        """Return `rows`, or fewer if a batch that is closed now may have only these."""
        limit = self._limits.get((device, key))
        return rows if limit is None else min(rows, limit.allowed(now))

    def dispatched(self, device: int, key: Hashable, rows: int, now: float) -> None:
        """Note a batch that is closed."""
        limit = self._limits.get((device, key))
        if limit is not None:
            limit.dispatched(rows, now)

    def record_success(self, device: int, key: Hashable, rows: int) -> None:
        """Note a batch that ran."""
        limit = self._limits.get((device, key))
        if limit is not None:
            limit.record_success(rows)
            if limit.removed:
                del self._limits[device, key]
                self.needed = bool(self._limits)

    def record_oom(self, device: int, key: Hashable, rows: int, now: float) -> None:
        """Note a batch that did not fit."""
        limit = self._limits.setdefault((device, key), MemoryRowLimit(self._most))
        self.needed = True
        self._limits.move_to_end((device, key))
        limit.record_oom(rows, now)
        if len(self._limits) > _LIMITS:
            self._limits.popitem(last=False)
