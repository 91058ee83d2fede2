"""How many rows fit into a device's memory: learned from batches that did not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

# After so many seconds a larger batch is tried; each time in vain, after twice as long, up to the last.
_FIRST_SECONDS = 10.0
_LAST_SECONDS = 640.0
# So many limits are kept, the last used: one for each device and bucket.
_LIMITS = 256


class RowLimit:
    """The most rows of a batch, where the most that are allowed did not fit. Guarded by the queue's lock.

    A batch that does not fit halves it. From then on a larger one is tried now and then, half-way to what
    failed: memory that others took may be free again, and what failed once need not be where the bound is. A
    try in vain costs one failed run, so the tries get rarer.
    """

    __slots__ = ("_failed", "_interval", "_most", "_try_at", "rows")

    def __init__(self, most: int) -> None:
        self._most = most
        # The fewest rows that are known not to fit.
        self._failed = most + 1
        self._interval = _FIRST_SECONDS
        self._try_at = 0.0
        self.rows = most

    @property
    def lifted(self) -> bool:
        """Whether there is none any more."""
        return self.rows >= self._most

    def allowed(self, now: float) -> int:
        """The most rows of a batch that leaves now."""
        if now < self._try_at:
            return self.rows
        return min(self._most, self.rows + max(1, (self._failed - self.rows) // 2))

    def left(self, rows: int, now: float) -> None:
        """A batch of so many rows leaves. One that is larger than known to fit is tried alone."""
        if rows > self.rows:
            self._try_at = now + self._interval

    def fitted(self, rows: int) -> None:
        """A batch of so many rows ran."""
        if rows > self.rows:
            self.rows = rows
            self._interval = _FIRST_SECONDS
            if rows >= self._failed:
                self._failed = self._most + 1

    def did_not_fit(self, rows: int, now: float) -> None:
        """A batch of so many rows did not."""
        if rows > self.rows:
            self._interval = min(2 * self._interval, _LAST_SECONDS)
        else:
            self.rows = max(1, rows // 2)
        self._failed = min(self._failed, rows)
        self._try_at = now + self._interval


class RowLimits:
    """Those of a batcher's devices and buckets, while there are any. Guarded by the queue's lock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._limits: OrderedDict[tuple[int, Hashable], RowLimit] = OrderedDict()
        # Whether there are any: asked for each batch.
        self.needed = False

    def rows(self, device: int, key: Hashable) -> int:
        """The most rows that are known to fit."""
        limit = self._limits.get((device, key))
        return self._most if limit is None else limit.rows

    def allowed(self, device: int, key: Hashable, rows: int, now: float) -> int:
        """At most so many rows, as a batch that leaves now may have."""
        limit = self._limits.get((device, key))
        return rows if limit is None else min(rows, limit.allowed(now))

    def left(self, device: int, key: Hashable, rows: int, now: float) -> None:
        """A batch of so many rows leaves."""
        limit = self._limits.get((device, key))
        if limit is not None:
            limit.left(rows, now)

    def fitted(self, device: int, key: Hashable, rows: int) -> None:
        """A batch of so many rows ran."""
        limit = self._limits.get((device, key))
        if limit is not None:
            limit.fitted(rows)
            if limit.lifted:
                del self._limits[device, key]
                self.needed = bool(self._limits)

    def did_not_fit(self, device: int, key: Hashable, rows: int, now: float) -> None:
        """A batch of so many rows did not."""
        limit = self._limits.setdefault((device, key), RowLimit(self._most))
        self.needed = True
        self._limits.move_to_end((device, key))
        limit.did_not_fit(rows, now)
        if len(self._limits) > _LIMITS:
            self._limits.popitem(last=False)
