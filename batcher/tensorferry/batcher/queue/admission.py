"""Admission: which requests are accepted, which are rejected, and which queued ones make room."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import (
    BatcherClosed,
    DeadlineExceeded,
    InstanceFailed,
    QueueFull,
    RequestTooLarge,
)
from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.batch_selection import BatchSelector
from tensorferry.batcher.queue.client_quotas import ClientQuotas
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import BatcherSettings


class Admission:
    """Accepts or rejects requests by the queue's bounds, the clients' quotas, and their deadlines.

    Guarded by the queue's lock, which thread-safe methods take.
    """

    def __init__(
        self,
        settings: BatcherSettings,
        lock: threading.Lock,
        clock: Clock,
        backlog: Backlog,
        devices: Devices,
        selector: BatchSelector,
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._backlog = backlog
        self._devices = devices
        self._arrivals = selector.arrivals
        self._overload = selector.overload
        clients = settings.clients
        self._quotas = ClientQuotas(clients) if clients is not None and clients.bounds else None
        self._policies = settings.policies
        self._ranks_per_class = settings.ranks_per_class
        # Bounds the rows queued, and the bytes of all accepted requests that are not done: they are held in memory.
        self._max_batch_size = settings.batch_rows
        self._max_rows = settings.max_queue_size
        self._max_bytes = settings.max_queue_bytes
        self.bytes_in_flight = 0
        self._closed = False
        # The error of every new request while no device is expected back.
        self._unavailable: InstanceFailed | None = None
        self._bounded = self._quotas is not None or any(policy.max_requests for policy in settings.policies)
        # Whether to check more than whether there is room, and whether the deadline can be met.
        self._must_check = self._bounded

    def check_size(self, rows: int, nbytes: int) -> None:
        """Raise RequestTooLarge if a request of this size can never be accepted. Thread-safe."""
        if rows > self._max_rows:
            raise RequestTooLarge(
                f"the request has {rows} rows; the queue holds {self._max_rows}: send fewer rows at once"
            )
        if nbytes > self._max_bytes:
            raise RequestTooLarge(
                f"the request has {nbytes} bytes; the queue holds {self._max_bytes}: send less at once"
            )
        if self._quotas is not None:
            self._quotas.check_size(rows, nbytes)

    @property
    def unavailable(self) -> bool:
        """Return whether no device is left that could run requests."""
        return self._unavailable is not None

    def close(self) -> None:
        """Accept nothing from now on."""
        self._closed = self._must_check = True

    def reject_all(self, error: InstanceFailed) -> None:
        """Reject every request with this error until `accept_again`."""
        self._unavailable, self._must_check = InstanceFailed(str(error), error.retry_after), True

    def accept_again(self) -> None:
        """Accept requests again, because a device has recovered."""
        self._unavailable, self._must_check = None, self._closed or self._bounded

    def admit(
        self, requests: Sequence[Request], rows: int, nbytes: int, now: float, *, skip_admission: bool = False
    ) -> Sequence[Request]:
        """Accept a request, or all parts of one, and return the queued requests to drop for it; raise if it is rejected.

        `rows` and `nbytes` are those of all parts. With `skip_admission` it is rejected only if it is too late even alone, or
        nothing can run it.
        """
        first = requests[0]
        # A request that is rejected in any case must get that error, not its quota's.
        if self._quotas is not None and not (skip_admission or self._closed or self._unavailable is not None):
            self._quotas.check(first.client, rows, nbytes, now, self._drain_time)
        displaced: Sequence[Request] = ()
        if skip_admission:
            self._check_open()
        elif (
            self._must_check
            or self._backlog.rows + rows > self._max_rows
            or self.bytes_in_flight + nbytes > self._max_bytes
        ):
            displaced = self._check_bounds(first, rows, nbytes, now)
        # NaN must be checked too: it is rejected.
        if first.deadline != math.inf:
            backlog, devices = self._backlog, self._devices
            start = devices.next_start or devices.find_next_start(now)
            if start < now:
                start = now
            bucket = backlog.queued_buckets.get(first.key) or backlog.bucket(first.key)
            # A request that has time for the longest batch has time for its own.
            if not first.deadline > start + bucket.cost_model.upper(self._max_batch_size):
                for request in requests:
                    _check_feasible(request, backlog.bucket(request.key).cost_model, start, now)
            if backlog.rows > bucket.full_rows * len(devices.each) and not skip_admission:
                error = self._overload.rejection(first, bucket, start, now)
                if error is not None:
                    # A rejected request is part of the demand, which batches must keep up with.
                    self._arrivals.arrived(first.rank, now, rows, first.deadline - now)
                    raise error
        if self._quotas is not None:
            self._quotas.accepted(requests, now)
        self.bytes_in_flight += nbytes
        return displaced

    def _check_bounds(self, first: Request, rows: int, nbytes: int, now: float) -> Sequence[Request]:
        """Return the queued requests to drop so that there is room for `rows` and `nbytes`; raise if there is none."""
        _check_not_passed(first, now)
        self.check_size(rows, nbytes)
        self._check_open()
        if self._policies:
            self._check_policy(first)
        displaced = self._displaced(first, rows)
        if self.bytes_in_flight + nbytes > self._max_bytes:
            held = f"it holds {self.bytes_in_flight} of {self._max_bytes} bytes"
            raise self._full(f"{held}, the request has {nbytes}")
        return displaced

    def released(self, requests: Sequence[Request]) -> None:
        """Free what accepted requests hold, because they have ended."""
        for request in requests:
            self.bytes_in_flight -= request.nbytes
            if self._quotas is not None:
                self._quotas.done(request)

    def fast_reject(self, deadline: float) -> QueueFull | None:
        """Return why a request with this deadline would be rejected; None if that is uncertain. Thread-safe."""
        with self._lock:
            now = self._clock.now()
            error = self._overload.fast_reject(deadline, now)
            if error is not None:
                self._arrivals.arrived(0, now, 1, deadline - now)
            return error

    def queue_full(self) -> QueueFull | None:
        """Return why there is no room for anything; None if there is. Thread-safe."""
        # Without the lock, because there nearly always is room. A late look at it only costs a request more or less.
        if not self._is_full():
            return None
        with self._lock:
            if not self._is_full():
                return None
            return self._full(
                f"{self._backlog.rows} of {self._max_rows} rows wait, and it holds {self.bytes_in_flight} of "
                f"{self._max_bytes} bytes"
            )

    def _is_full(self) -> bool:
        return self._backlog.rows >= self._max_rows or self.bytes_in_flight >= self._max_bytes

    def check_answered(self, request: Request, now: float) -> None:
        """Raise as `admit` does for a request that needs no room, because nothing is run for it."""
        _check_not_passed(request, now)
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
            retry_after = self._drain_time()
            raise QueueFull(
                f"{queued} requests of priority {request.priority} wait, and the model's "
                f"queue policy allows {limit}; retry in {retry_after:.3f} s",
                retry_after,
            )

    def _displaced(self, first: Request, rows: int) -> Sequence[Request]:
        """Return the queued requests to drop for `rows` new rows; raise QueueFull if there are too few."""
        backlog = self._backlog
        lacking = backlog.rows + rows - self._max_rows
        if lacking <= 0:
            return ()
        displaced = backlog.displaceable(first.rank, lacking, first.client, self._max_rows)
        if not displaced:
            raise self._full(f"{backlog.rows} of {self._max_rows} rows wait, the request has {rows}")
        return displaced

    def _full(self, why: str) -> QueueFull:
        retry_after = self._drain_time()
        return QueueFull(f"the queue is full: {why}; retry in {retry_after:.3f} s", retry_after)

    def drain_time(self) -> float:
        """Estimate how long the queued requests take to run, in seconds; at least a millisecond. Thread-safe."""
        with self._lock:
            return self._drain_time()

    def _drain_time(self) -> float:
        return max(0.001, self._backlog.drain_time() / len(self._devices.available))


def _check_not_passed(request: Request, now: float) -> None:
    """Raise DeadlineExceeded if the deadline has passed."""
    # Written so that NaN is rejected too, which no comparison would ever expire.
    if not request.deadline > now:
        raise DeadlineExceeded("the deadline had passed before the request was enqueued")


def _check_feasible(request: Request, cost_model: BatchCostModel, start: float, now: float) -> None:
    """Raise DeadlineExceeded if a request could not meet its deadline even if it ran alone from `start` on."""
    _check_not_passed(request, now)
    end = start + cost_model.upper_if_recent(request.rows_counted, now)
    if request.deadline <= end:
        left = request.deadline - now
        raise DeadlineExceeded(
            f"the deadline is {left * 1e3:.1f} ms away; alone the request would take until "
            f"{(end - now) * 1e3:.1f} ms from now: allow more time"
        )
