"""The door: who is accepted, who is refused, and who makes room."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.batcher.backlog import Backlog
from tensorferry.batcher.errors import DeadlineExceeded, QueueFull, RequestTooLarge
from tensorferry.batcher.request import Request


class Admission:
    """Holds requests against the bounds. Guarded by the queue's lock, but for `check_size`."""

    def __init__(self, backlog: Backlog, max_rows: int, max_bytes: int, devices: int) -> None:
        self._backlog = backlog
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._devices = devices

    def check_size(self, rows: int, nbytes: int) -> None:
        """RequestTooLarge when so many rows or bytes could never be accepted. Thread-safe."""
        if rows > self._max_rows:
            raise RequestTooLarge(
                f"the request has {rows} rows; the queue holds {self._max_rows}: send fewer rows at once"
            )
        if nbytes > self._max_bytes:
            raise RequestTooLarge(
                f"the request has {nbytes} bytes; the queue holds {self._max_bytes}: send less at once"
            )

    def has_room(self, rows: int, nbytes: int, held_bytes: int) -> bool:
        """Whether so many rows find room and displace nobody, where all that are not done hold `held_bytes`."""
        return self._backlog.rows + rows <= self._max_rows and held_bytes + nbytes <= self._max_bytes

    def make_room(self, level: int, rows: int, nbytes: int, held_bytes: int) -> Sequence[Request]:
        """Who must go for so many rows of a class to find room; QueueFull when they cannot.

        `held_bytes` are those of all requests that are not done. Bytes displace nobody.
        """
        backlog = self._backlog
        displaced: Sequence[Request] = ()
        lacking = backlog.rows + rows - self._max_rows
        if lacking > 0:
            displaced = backlog.displaceable(level, lacking)
            if not displaced:
                self._refuse(f"{backlog.rows} of {self._max_rows} rows wait, the request has {rows}")
        if held_bytes + nbytes > self._max_bytes:
            held = f"it holds {held_bytes} of {self._max_bytes} bytes"
            self._refuse(f"{held}, the request has {nbytes}")
        return displaced

    def _refuse(self, why: str) -> None:
        retry_after = self.drain_time()
        raise QueueFull(f"the queue is full: {why}; retry in {retry_after:.3f} s", retry_after)

    def drain_time(self) -> float:
        """How long the queue as it is takes to drain, in seconds; at least a millisecond."""
        return max(0.001, self._backlog.drain_time() / self._devices)

    def check_feasible(self, request: Request, start: float, now: float) -> None:
        """DeadlineExceeded when a request could not make its deadline even alone, run from `start` on."""
        needed = self._backlog.profile(request.key).needs(request.cost, now)
        if request.deadline <= start + needed:
            left = request.deadline - now
            raise DeadlineExceeded(
                f"the deadline is {left * 1e3:.1f} ms away; alone the request would take until "
                f"{(start + needed - now) * 1e3:.1f} ms from now: allow more time"
            )
