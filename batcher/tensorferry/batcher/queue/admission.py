"""The door: who is accepted, who is refused, and who makes room."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.batcher.errors import (
    BatcherClosed,
    DeadlineExceeded,
    InstanceFailed,
    QueueFull,
    RequestTooLarge,
)
from tensorferry.batcher.learning.cost_model import Profile
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import QueuePolicy


class Admission:
    """Holds requests against the bounds. Guarded by the queue's lock, but for `check_size`.

    `max_rows` bounds the rows queued, `max_bytes` the bytes of all accepted requests that are not done.
    `policies` has one for each class, of so many `ranks`, or none at all.
    """

    def __init__(
        self,
        backlog: Backlog,
        max_rows: int,
        max_bytes: int,
        devices: Devices,
        policies: Sequence[QueuePolicy],
        ranks: int,
    ) -> None:
        self._backlog = backlog
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        # Of all that were accepted and are not done.
        self.held_bytes = 0
        self._devices = devices
        self._policies = tuple(policies)
        self._ranks = ranks
        self.closed = False
        # What every new request is refused with while no device is expected back.
        self.broken: InstanceFailed | None = None
        self._bounded = any(policy.max_requests for policy in policies)
        # Whether to ask `admit` even where there is room.
        self.picky = self._bounded

    def check_size(self, rows: int, nbytes: int) -> None:
        """RequestTooLarge when so many rows or bytes could never be accepted. Thread-safe."""
        if rows > self.max_rows:
            raise RequestTooLarge(
                f"the request has {rows} rows; the queue holds {self.max_rows}: send fewer rows at once"
            )
        if nbytes > self.max_bytes:
            raise RequestTooLarge(
                f"the request has {nbytes} bytes; the queue holds {self.max_bytes}: send less at once"
            )

    def close(self) -> None:
        """Accepts nothing from now on."""
        self.closed = self.picky = True

    def refuse(self, error: InstanceFailed) -> None:
        """Accepts nothing until a device is back."""
        self.broken, self.picky = InstanceFailed(str(error), error.retry_after), True

    def refuse_no_more(self) -> None:
        """A device is back."""
        self.broken, self.picky = None, self.closed or self._bounded

    def admit(self, first: Request, rows: int, nbytes: int, now: float) -> Sequence[Request]:
        """Who must go for a request, or the parts of one, to find room; raises when it is not accepted.

        To be asked where there is no room for so many rows and bytes, or this is `picky`.
        """
        _check_deadline(first, now)
        self.check_size(rows, nbytes)
        self._check_open()
        if self._policies:
            self._check_policy(self._policies[first.priority - 1], first)
        return self._make_room(first, rows, nbytes)

    def check_empty(self, request: Request, now: float) -> None:
        """Raises as `admit` does for a request that needs no room, since nothing is run for it."""
        _check_deadline(request, now)
        self._check_open()

    def _check_open(self) -> None:
        if self.closed:
            raise BatcherClosed("the batcher is draining or closed and accepts no new requests")
        if self.broken is not None:
            raise InstanceFailed(str(self.broken), self.broken.retry_after)

    def _check_policy(self, policy: QueuePolicy, request: Request) -> None:
        """QueueFull when as many requests of its class are queued as may be."""
        if not policy.max_requests:
            return
        queued = self._backlog.requests(range(request.rank, request.rank + self._ranks))
        if queued >= policy.max_requests:
            retry_after = self.drain_time()
            raise QueueFull(
                f"{queued} requests of priority {request.priority} wait, and the model's "
                f"queue policy allows {policy.max_requests}; retry in {retry_after:.3f} s",
                retry_after,
            )

    def _make_room(self, first: Request, rows: int, nbytes: int) -> Sequence[Request]:
        """Who must go for so many rows, as of `first`, to find room; QueueFull when they cannot. Bytes displace nobody."""
        backlog = self._backlog
        displaced: Sequence[Request] = ()
        lacking = backlog.rows + rows - self.max_rows
        if lacking > 0:
            displaced = backlog.displaceable(first.rank, lacking, first.client, self.max_rows)
            if not displaced:
                self._refuse(f"{backlog.rows} of {self.max_rows} rows wait, the request has {rows}")
        if self.held_bytes + nbytes > self.max_bytes:
            held = f"it holds {self.held_bytes} of {self.max_bytes} bytes"
            self._refuse(f"{held}, the request has {nbytes}")
        return displaced

    def _refuse(self, why: str) -> None:
        retry_after = self.drain_time()
        raise QueueFull(f"the queue is full: {why}; retry in {retry_after:.3f} s", retry_after)

    def drain_time(self) -> float:
        """How long the queue as it is takes to drain, in seconds; at least a millisecond."""
        return max(0.001, self._backlog.drain_time() / len(self._devices.work))

    def check_feasible(
        self,
        requests: Sequence[Request],
        profile: Profile,
        start: float,
        now: float,
    ) -> None:
        """DeadlineExceeded when one could not make its deadline even if it ran alone from `start` on."""
        for request in requests:
            _check_deadline(request, now)
            ends = start + profile.needs(request.rows_counted, now)
            if request.deadline <= ends:
                left = request.deadline - now
                raise DeadlineExceeded(
                    f"the deadline is {left * 1e3:.1f} ms away; alone the request would take until "
                    f"{(ends - now) * 1e3:.1f} ms from now: allow more time"
                )


def _check_deadline(request: Request, now: float) -> None:
    # Written so that it refuses NaN, which no comparison would ever expire.
    if not request.deadline > now:
        raise DeadlineExceeded("the deadline had passed before the request was enqueued")
