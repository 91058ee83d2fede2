"""Limit on the bytes of responses that clients have not read.

gRPC keeps a response in memory until its client makes room for it. A client that calls and never reads would
otherwise fill the memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tensorferry.server.errors import UnreadResponsesError

# A connection may hold this fraction of the limit for all connections.
_CONNECTION_SHARE = 4
# A call whose client has read nothing for this long is given up if others need its room.
_STALE_SECONDS = 10.0
_RETRY_SECONDS = 1.0

# Smaller responses of unary calls are not counted, because --max-calls limits their number.
SMALL_BYTES = 4096


def stale_error() -> UnreadResponsesError:
    """Return the error of a call whose responses are dropped because others need their room."""
    return UnreadResponsesError(
        f"the client has read nothing of its answers for {_STALE_SECONDS:g} s, and others needed their room; read answers "
        "as they come, or start the server with a larger --max-unsent-bytes",
        _RETRY_SECONDS,
    )


class ResponseAccount:
    """The responses of one call, for the methods of `UnreadResponses`.

    `give_up` is called at most once, on any thread, with the error with which the call must end.
    """

    __slots__ = ("closed", "connection", "give_up", "held")

    def __init__(self, connection: str, give_up: Callable[[UnreadResponsesError], None]) -> None:
        self.connection = connection
        self.give_up = give_up
        # Both belong to `UnreadResponses`.
        self.held = 0
        self.closed = False


class UnreadResponses:
    """Counts the bytes of responses from their completion until they are sent. Thread-safe.

    At most `limit` bytes in all and a quarter of it for each connection. The only response of a connection always fits.
    If a response does not fit, calls whose client has read nothing for 10 seconds are given up first.
    """

    def __init__(self, limit: int = 1 << 30, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.connection_limit = max(1, limit // _CONNECTION_SHARE)
        # A stream reads no more requests while their responses may be larger than this together.
        self.stream_limit = max(1, self.connection_limit // _CONNECTION_SHARE)
        self._clock = clock
        # Guards every field below, and `held` and `closed` of every account. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._total = 0
        self._connections: dict[str, int] = {}
        # Accounts that hold bytes, with the time of their last read; the oldest is the first.
        self._accounts: dict[ResponseAccount, float] = {}
        # The bytes of the last response that did not fit: per connection that has read nothing since, and for all.
        self._wanted: dict[str, int] = {}
        self._wanted_of_all = 0
        # Whether a response did not fit and nothing was read since.
        self.refuses_some = False

    @property
    def total(self) -> int:
        """The bytes that clients have not read."""
        with self._lock:
            return self._total

    def add(self, account: ResponseAccount, nbytes: int) -> UnreadResponsesError | None:
        """Count a response to be sent, or return why it must not be kept. A closed account counts nothing."""
        connection = account.connection
        stale: list[ResponseAccount] = []
        error = None
        with self._lock:
            if account.closed or not nbytes:
                return None
            if (
                self._connections.get(connection, 0) + nbytes > self.connection_limit
                or self._total + nbytes > self.limit
            ):
                stale = self._make_room_locked(connection, nbytes)
                error = self._refusal_locked(connection, nbytes)
            # Making room may have closed this account.
            if error is None and not account.closed:
                if not account.held:
                    self._accounts[account] = self._clock()
                account.held += nbytes
                self._connections[connection] = self._connections.get(connection, 0) + nbytes
                self._total += nbytes
        for other in stale:
            other.give_up(stale_error())
        return error

    def remove(self, account: ResponseAccount, nbytes: int) -> None:
        """Stop counting a response that was sent or dropped."""
        with self._lock:
            nbytes = min(nbytes, account.held)
            self._remove_locked(account, nbytes)

    def close(self, account: ResponseAccount) -> None:
        """Stop counting a call, which is over. Idempotent."""
        with self._lock:
            self._drop_locked(account)

    def _drop_locked(self, account: ResponseAccount) -> None:
        account.closed = True
        self._remove_locked(account, account.held)

    def _remove_locked(self, account: ResponseAccount, nbytes: int) -> None:
        if not nbytes:
            return
        account.held -= nbytes
        self._total -= nbytes
        # Its client reads, so it moves to the end.
        del self._accounts[account]
        if account.held:
            self._accounts[account] = self._clock()
        connection = account.connection
        self._connections[connection] -= nbytes
        if not self._connections[connection]:
            del self._connections[connection]
        if self.refuses_some:
            self._wanted.pop(connection, None)
            self._wanted_of_all = 0
            self.refuses_some = bool(self._wanted)

    def refusal(self, connection: str) -> UnreadResponsesError | None:
        """Return why a new call of this connection is refused; None if it is not. Call this only while `refuses_some`."""
        with self._lock:
            nbytes = self._wanted.get(connection, 0) or self._wanted_of_all
            if not nbytes:
                return None
            stale = self._make_room_locked(connection, nbytes)
            error = self._refusal_locked(connection, nbytes)
        for account in stale:
            account.give_up(stale_error())
        return error

    def _exceeds_locked(self, connection: str, nbytes: int) -> bool:
        held = self._connections.get(connection, 0)
        return (held > 0 and held + nbytes > self.connection_limit) or (
            self._total > 0 and self._total + nbytes > self.limit
        )

    def _make_room_locked(self, connection: str, nbytes: int) -> list[ResponseAccount]:
        """Close stale accounts until the bytes fit or none is left; return them, to be given up outside the lock."""
        stale: list[ResponseAccount] = []
        if not self._exceeds_locked(connection, nbytes):
            return stale
        long_ago = self._clock() - _STALE_SECONDS
        for account, since in list(self._accounts.items()):
            if since > long_ago or not self._exceeds_locked(connection, nbytes):
                break
            if self._total + nbytes > self.limit or account.connection == connection:
                self._drop_locked(account)
                stale.append(account)
        return stale

    def _refusal_locked(self, connection: str, nbytes: int) -> UnreadResponsesError | None:
        if not self._exceeds_locked(connection, nbytes):
            return None
        held = self._connections.get(connection, 0)
        self.refuses_some = True
        if held and held + nbytes > self.connection_limit:
            self._wanted[connection] = nbytes
            what, most = f"{held} bytes of answers to this connection", self.connection_limit
        else:
            self._wanted_of_all = nbytes
            what, most = f"{self._total} bytes of answers to all clients", self.limit
        return UnreadResponsesError(
            f"{what} wait to be read, of at most {most}; read answers as they come, or start the server with a larger "
            "--max-unsent-bytes",
            _RETRY_SECONDS,
        )
