"""Quotas of each client: requests, rows and bytes that are not done, and rows a second."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from tensorferry.batcher.errors import QueueFull, RequestTooLarge
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import ClientPolicy

# Rate meters that are kept, the least recently used being forgotten first.
_MAX_METERS = 4096
# Meters that may be forgotten for each request that is accepted.
_FORGET_TRIES = 2


class ClientUsage:
    """Accepted requests of a client that are not done."""

    __slots__ = ("nbytes", "requests", "rows")

    def __init__(self) -> None:
        self.requests = self.rows = self.nbytes = 0

    def add(self, requests: int, rows: int, nbytes: int) -> None:
        """Add to the counts; negative numbers subtract."""
        self.requests += requests
        self.rows += rows
        self.nbytes += nbytes


class ClientQuotas:
    """Enforces a `ClientPolicy`. Guarded by the queue's lock, but for `check_size`.

    A client is remembered while a request of it is not done, or its rate meter is not full. The number of meters is
    bounded, so that clients cannot fill the memory by inventing names.
    """

    def __init__(self, policy: ClientPolicy) -> None:
        self._policy = policy
        self._burst = policy.most_at_once
        self._usage: dict[str, ClientUsage] = {}
        # The rows that a client could send at once, and when that was computed; the last used at the end.
        self._meters: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def clients(self) -> int:
        """Return how many entries are kept; a client may have two."""
        return len(self._usage) + len(self._meters)

    def check_size(self, rows: int, nbytes: int) -> None:
        """Raise RequestTooLarge if a client can never have a request of this size accepted. Thread-safe."""
        policy = self._policy
        if policy.max_rows and rows > policy.max_rows:
            raise RequestTooLarge(
                f"the request has {rows} rows; a client may have {policy.max_rows}: send fewer rows at once"
            )
        if rows > self._burst:
            raise RequestTooLarge(
                f"the request has {rows} rows; a client may send {self._burst:g} at once and {policy.rate:g} "
                "a second: send fewer rows at once"
            )
        if policy.max_bytes and nbytes > policy.max_bytes:
            raise RequestTooLarge(
                f"the request has {nbytes} bytes; a client may have {policy.max_bytes}: send less at once"
            )

    def check(self, client: str, rows: int, nbytes: int, now: float, drain_time: Callable[[], float]) -> None:
        """Raise QueueFull, with the time to retry, if a client's quota has no room for these rows and bytes now.

        `drain_time` returns how long all queued requests take, in seconds.
        """
        self.check_size(rows, nbytes)
        policy, usage = self._policy, self._usage.get(client)
        if usage is not None:
            for what, used, more, limit in (
                ("requests", usage.requests, 1, policy.max_requests),
                ("rows", usage.rows, rows, policy.max_rows),
                ("bytes", usage.nbytes, nbytes, policy.max_bytes),
            ):
                if limit and used + more > limit:
                    # There is room once this share of what the client has is done.
                    retry_after = max(0.001, drain_time() * min(1.0, (used + more - limit) / used))
                    raise QueueFull(
                        f"{used} {what} of client {client!r} are not answered yet, the request has {more}, and a client "
                        f"may have {limit}; retry in {retry_after:.3f} s",
                        retry_after,
                    )
        if policy.rate and (lacking := rows - self._meter(client, now)) > 1e-9:
            retry_after = lacking / policy.rate
            raise QueueFull(
                f"client {client!r} sends more than {policy.rate:g} rows a second; retry in {retry_after:.3f} s",
                retry_after,
            )

    def _meter(self, client: str, now: float) -> float:
        """Return the rows that a client may send at once now."""
        meter = self._meters.get(client)
        if meter is None:
            return self._burst
        rows, at = meter
        return min(self._burst, rows + (now - at) * self._policy.rate)

    def accepted(self, requests: Sequence[Request], now: float) -> None:
        """Count a request that was accepted, or all parts of one."""
        client = requests[0].client
        rows = sum([request.rows_counted for request in requests])
        usage = self._usage.setdefault(client, ClientUsage())
        usage.add(1, rows, sum([request.nbytes for request in requests]))
        if self._policy.rate:
            self._meters[client] = (self._meter(client, now) - rows, now)
            self._meters.move_to_end(client)
            self._forget(now)

    def _forget(self, now: float) -> None:
        # The meter of a client that was quiet for long is full again, as if it had never been used.
        for _ in range(_FORGET_TRIES):
            oldest = next(iter(self._meters))
            if self._meter(oldest, now) < self._burst and len(self._meters) <= _MAX_METERS:
                return
            del self._meters[oldest]
            if not self._meters:
                return

    def rejected(self, request: Request, now: float) -> None:
        """Take back what `accepted` counted for a request that was rejected after all."""
        self.done(request)
        if self._policy.rate:
            self._meters[request.client] = (self._meter(request.client, now) + request.rows_counted, now)

    def done(self, request: Request) -> None:
        """Release the quota of a request that has ended, in whatever way."""
        usage = self._usage[request.client]
        # Of a split request the last part counts, because parts mostly end in their order.
        usage.add(-1 if request.part_number <= 1 else 0, -request.rows_counted, -request.nbytes)
        if not usage.rows:
            del self._usage[request.client]
