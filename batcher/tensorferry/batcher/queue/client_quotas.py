"""How the clients of a batcher share it: what it is told, and the bounds and rates that each is held to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from tensorferry.batcher.errors import QueueFull, RequestTooLarge
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import ClientPolicy

# So many clients are remembered who have used some of their rate; beyond, who was not seen for longest is forgotten.
_MOST_METERS = 4096
# So many that need not be remembered any more are forgotten for each that is looked up.
_FORGET_TRIES = 2


class ClientUsage:
    """What was accepted of a client and is not done."""

    __slots__ = ("nbytes", "requests", "rows")

    def __init__(self) -> None:
        self.requests = self.rows = self.nbytes = 0


class ClientQuotas:
    """Holds each client to its bounds. Not thread-safe: the queue's lock guards it, but for `check_size`.

    A client is remembered while something of its is not done, or it has used some of its rate; of the latter
    at most so many that nobody makes memory grow by inventing names.
    """

    __slots__ = ("_at_once", "_held", "_meters", "_policy")

    def __init__(self, policy: ClientPolicy) -> None:
        self._policy = policy
        self._at_once = policy.most_at_once
        self._held: dict[str, ClientUsage] = {}
        # The rows that each may still send at once, and when that was; who was seen last at the end.
        self._meters: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def clients(self) -> int:
        """How many are remembered, at most those twice who are in both tables."""
        return len(self._held) + len(self._meters)

    def check_size(self, rows: int, nbytes: int) -> None:
        """RequestTooLarge when so many rows or bytes could never be accepted of one client. Thread-safe."""
        policy = self._policy
        if policy.max_rows and rows > policy.max_rows:
            raise RequestTooLarge(
                f"the request has {rows} rows; a client may have {policy.max_rows}: send fewer rows at once"
            )
        if rows > self._at_once:
            raise RequestTooLarge(
                f"the request has {rows} rows; a client may send {self._at_once:g} at once and {policy.rate:g} "
                "a second: send fewer rows at once"
            )
        if policy.max_bytes and nbytes > policy.max_bytes:
            raise RequestTooLarge(
                f"the request has {nbytes} bytes; a client may have {policy.max_bytes}: send less at once"
            )

    def check(self, client: str, rows: int, nbytes: int, now: float, drain_time: Callable[[], float]) -> None:
        """QueueFull when a client may not have so many rows and bytes more now; when it may is in it.

        `drain_time` tells how long all that is queued takes.
        """
        self.check_size(rows, nbytes)
        policy, held = self._policy, self._held.get(client)
        if held is not None and (
            0 < policy.max_requests <= held.requests
            or 0 < policy.max_rows < held.rows + rows
            or 0 < policy.max_bytes < held.nbytes + nbytes
        ):
            for what, has, more, most in (
                ("requests", held.requests, 1, policy.max_requests),
                ("rows", held.rows, rows, policy.max_rows),
                ("bytes", held.nbytes, nbytes, policy.max_bytes),
            ):
                if most and has + more > most:
                    # There is room when so much of what it has is done.
                    retry_after = max(0.001, drain_time() * min(1.0, (has + more - most) / has))
                    raise QueueFull(
                        f"{has} {what} of client {client!r} are not answered yet, the request has {more}, and a client "
                        f"may have {most}; retry in {retry_after:.3f} s",
                        retry_after,
                    )
        if policy.rate and (lacking := rows - self._level(client, now)) > 1e-9:
            retry_after = lacking / policy.rate
            raise QueueFull(
                f"client {client!r} sends more than {policy.rate:g} rows a second; retry in {retry_after:.3f} s",
                retry_after,
            )

    def _level(self, client: str, now: float) -> float:
        """The rows that a client may send at once now."""
        meter = self._meters.get(client)
        if meter is None:
            return self._at_once
        level, at = meter
        return min(self._at_once, level + (now - at) * self._policy.rate)

    def accepted(self, requests: Iterable[Request], now: float) -> None:
        """Requests of a client, for which there was room."""
        rows = nbytes = count = 0
        client = ""
        for request in requests:
            client = request.client
            count += 1
            rows += request.rows_counted
            nbytes += request.nbytes
        held = self._held.get(client)
        if held is None:
            held = self._held[client] = ClientUsage()
        held.requests += count
        held.rows += rows
        held.nbytes += nbytes
        if self._policy.rate:
            self._meters[client] = (self._level(client, now) - rows, now)
            self._meters.move_to_end(client)
            self._forget(now)

    def _forget(self, now: float) -> None:
        # Who was quiet for long enough has all of its burst again, as if it had never been here.
        for _ in range(_FORGET_TRIES):
            oldest = next(iter(self._meters))
            if self._level(oldest, now) < self._at_once and len(self._meters) <= _MOST_METERS:
                return
            del self._meters[oldest]
            if not self._meters:
                return

    def done(self, request: Request) -> None:
        """One that was accepted is done, whatever became of it."""
        held = self._held[request.client]
        held.requests -= 1
        held.rows -= request.rows_counted
        held.nbytes -= request.nbytes
        if not held.requests:
            del self._held[request.client]
