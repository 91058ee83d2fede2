"""Admission: which requests are accepted, which are rejected, and which queued ones make room."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.batcher.errors import (
    BatcherClosed,
    DeadlineExceeded,
    InstanceFailed,
    QueueFull,
    RequestTooLarge,
)
from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import BatcherSettings


class Admission:
    """Checks requests against the queue's bounds. Guarded by the queue's lock, but for `check_size`.

    `max_queue_size` bounds the rows queued, `max_queue_bytes` the bytes of all accepted requests that are not done.
    """

    def __init__(self, settings: BatcherSettings, backlog: Backlog, devices: Devices) -> None:
        self._backlog = backlog
        self._devices = devices
        self._policies = settings.policies
        self._ranks_per_class = settings.ranks_per_class
        self.max_rows = settings.max_queue_size
        self.max_bytes = settings.max_queue_bytes
        self._closed = False
        # The error of every new request while no device is expected back.
        self._unavailable: InstanceFailed | None = None
        self._bounded = any(policy.max_requests for policy in settings.policies)
        # Whether `admit` must be called even if there is room.
        self.must_check = self._bounded

    def check_size(self, rows: int, nbytes: int) -> None:
        """Raise RequestTooLarge if a request of this size can never be accepted. Thread-safe."""
        if rows > self.max_rows:
            raise RequestTooLarge(
                f"the request has {rows} rows; the queue holds {self.max_rows}: send fewer rows at once"
            )
        if nbytes > self.max_bytes:
            raise RequestTooLarge(
                f"the request has {nbytes} bytes; the queue holds {self.max_bytes}: send less at once"
            )

    @property
    def open(self) -> bool:
        """Return whether new requests can be accepted at all."""
        return not self._closed and self._unavailable is None

    @property
    def unavailable(self) -> bool:
        """Return whether no device is left that could run requests."""
        return self._unavailable is not None

    def close(self) -> None:
        """Accept nothing from now on."""
        self._closed = self.must_check = True

    def reject_all(self, error: InstanceFailed) -> None:
        """Reject every request with this error until `accept_again`."""
        self._unavailable, self.must_check = InstanceFailed(str(error), error.retry_after), True

    def accept_again(self) -> None:
        """Accept requests again, because a device has recovered."""
        self._unavailable, self.must_check = None, self._closed or self._bounded

    def admit(
        self, first: Request, rows: int, nbytes: int, bytes_in_flight: int, now: float
    ) -> Sequence[Request]:
        """Return the queued requests to drop so that a request, or the parts of one, has room; raise if it is rejected.

        `rows` and `nbytes` are the new request's, `bytes_in_flight` those of all accepted requests that are not done.
        Must be called if that exceeds a bound, or `must_check` is set.
        """
        check_deadline(first, now)
        self.check_size(rows, nbytes)
        self._check_open()
        if self._policies:
            self._check_policy(first)
        displaced = self._displaced(first, rows)
        if bytes_in_flight + nbytes > self.max_bytes:
            held = f"it holds {bytes_in_flight} of {self.max_bytes} bytes"
            raise self._full(f"{held}, the request has {nbytes}")
        return displaced

    def check_empty(self, request: Request, now: float) -> None:
        """Raise as `admit` does for a request that needs no room, because nothing is run for it."""
        check_deadline(request, now)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise BatcherClosed("the batcher is draining or closed and accepts no new requests")
        if self._unavailable is not None:
            raise InstanceFailed(str(self._unavailable), self._unavailable.retry_after)

    def _check_policy(self, request: Request) -> None:
        """Raise QueueFull if the request's class may have no more requests in the queue."""
        limit = self._policies[request.priority - 1].max_requests
        if not limit:
            return
        queued = self._backlog.count(range(request.rank, request.rank + self._ranks_per_class))
        if queued >= limit:
            retry_after = self.drain_time()
            raise QueueFull(
                f"{queued} requests of priority {request.priority} wait, and the model's "
                f"queue policy allows {limit}; retry in {retry_after:.3f} s",
                retry_after,
            )

    def _displaced(self, first: Request, rows: int) -> Sequence[Request]:
        """Return the queued requests to drop for `rows` new rows; raise QueueFull if there are too few."""
        backlog = self._backlog
        lacking = backlog.rows + rows - self.max_rows
        if lacking <= 0:
            return ()
        displaced = backlog.displaceable(first.rank, lacking, first.client, self.max_rows)
        if not displaced:
            raise self._full(f"{backlog.rows} of {self.max_rows} rows wait, the request has {rows}")
        return displaced

    def _full(self, why: str) -> QueueFull:
        retry_after = self.drain_time()
        return QueueFull(f"the queue is full: {why}; retry in {retry_after:.3f} s", retry_after)

    def drain_time(self) -> float:
        """Estimate how long the queued requests take to run, in seconds; at least a millisecond."""
        return max(0.001, self._backlog.drain_time() / len(self._devices.available))


def check_deadline(request: Request, now: float) -> None:
    """Raise DeadlineExceeded if the deadline has passed."""
    # Written so that NaN is rejected too, which no comparison would ever expire.
    if not request.deadline > now:
        raise DeadlineExceeded("the deadline had passed before the request was enqueued")


def check_feasible(requests: Sequence[Request], cost_model: BatchCostModel, start: float, now: float) -> None:
    """Raise DeadlineExceeded if a request could not meet its deadline even if it ran alone from `start` on."""
    for request in requests:
        check_deadline(request, now)
        end = start + cost_model.upper_if_recent(request.rows_counted, now)
        if request.deadline <= end:
            left = request.deadline - now
            raise DeadlineExceeded(
                f"the deadline is {left * 1e3:.1f} ms away; alone the request would take until "
                f"{(end - now) * 1e3:.1f} ms from now: allow more time"
            )
