"""The private parts of grpcio that the lane uses. No other module may use them.

`selftest` checks at every start that they work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import grpc

try:
    from grpc._cython.cygrpc import (
        CompletionQueue,
        ReceiveCloseOnServerOperation,
        ReceiveMessageOperation,
        SendInitialMetadataOperation,
        SendMessageOperation,
        SendStatusFromServerOperation,
        WriteFlag,
        auth_context,
        peer_identities,
        peer_identity_key,
    )
except ImportError as error:  # pragma: no cover - a future grpcio
    raise LookupError(f"grpcio {grpc.__version__} has changed: {error}") from error

from tensorferry.server.security.access_control import ClientCertificate
from tensorferry.server.status import Status, status_of, trailing_metadata
from tensorferry.server.transport.unread_responses import ResponseAccount

__all__ = [
    "ReceiveCloseOnServerOperation",
    "ReceiveMessageOperation",
    "SendMessageOperation",
    "Server",
]

# Flag of a message that core may collect, up to a limit, because another message or a status follows it.
MORE_FOLLOWS = WriteFlag.buffer_hint

# Operations without contents, which any number of batches may share.
SEND_INITIAL_METADATA = SendInitialMetadataOperation((), 0)
SEND_OK = SendStatusFromServerOperation((), 0, b"", 0)
# Shared too, because its result is not read.
IGNORE_CLOSE = ReceiveCloseOnServerOperation(0)

# Events that are handled in a row before a due wake-up.
_MAX_EVENTS = 128
# The next wake-up after one that raised.
_AFTER_CRASH_SECONDS = 1.0
# The lane's wake-ups and grpcio's deadlines are sooner, unless the system clock was set back.
_MAX_WAIT_SECONDS = 5.0


class FinalStatus(NamedTuple):
    """A status other than OK in core's form. Any number of calls may share it."""

    trailing_metadata: tuple[tuple[str, str | bytes], ...]
    code: int
    message: bytes
    flags: int = 0


def final_status(status: Status) -> FinalStatus:
    """Return a status in core's form."""
    return FinalStatus(trailing_metadata(status), status.code.value[0], status.message.encode())


def send_final_status(final: FinalStatus) -> Any:
    """Return the operation that ends one call with this status."""
    return SendStatusFromServerOperation(*final)


def send_status(status: Status) -> Any:
    """Return the operation that ends one call with this status, which is not OK."""
    return send_final_status(final_status(status))


def end(call: Any, status: Status) -> None:
    """End a call with this status at once, even if a message is being sent or received. On any thread."""
    call.cancel(status.code.value[0], status.message)


def peer_of(call: Any) -> str:
    """Return the client's address as `grpc.ServicerContext.peer` does."""
    peer: bytes | str = call.peer()
    return peer.decode() if isinstance(peer, bytes) else peer


def account_of(call: Any) -> ResponseAccount:
    """Return an account for the responses of a call, which ends if they must not be kept."""
    return ResponseAccount(peer_of(call), lambda error: end(call, status_of(error)))


def certificate_of(call: Any) -> ClientCertificate:
    """Return the client certificate of the call's connection."""
    kind: bytes | str | None = peer_identity_key(call)
    (pem,) = auth_context(call).get(b"x509_pem_cert", (b"",))
    return ClientCertificate(
        kind.decode() if isinstance(kind, bytes) else kind, peer_identities(call) or (), pem
    )


class _EventLoop(CompletionQueue):  # type: ignore[misc]
    """Completion queue that handles the lane's events on the thread that polls it, which is grpcio's only one.

    With a queue and a thread for the lane alone, each thread would often do the other's input and output, and wake it.
    The lane's tags are bound methods, grpcio's are strings and functions, so no event of the lane reaches grpcio.
    """

    def configure(self, on_wakeup: Callable[[float], float], on_crash: Callable[[Any], None]) -> None:
        """Set the callbacks.

        `on_wakeup` gets the time when `next_wakeup` is due, and returns the next; both are seconds since the epoch.
        `on_crash` is called while an exception is handled, with the event's tag, or None if `on_wakeup` raised.
        """
        self._on_wakeup = on_wakeup
        self._on_crash = on_crash
        # Seconds since the epoch; changed on the polling thread only. 0 means once the waiting events are handled, or
        # `_MAX_EVENTS` of them.
        self.next_wakeup = math.inf
        # Whether no event was waiting when `on_wakeup` was called.
        self.idle = True

    def poll(self, deadline: float | None = None) -> Any:
        """Handle the lane's events until one of grpcio's arrives, or the deadline passes; return that."""
        poll = super().poll
        handled, polled_again = 0, False
        event = tag = None
        while True:
            # Released before the next poll, because an event may hold the last reference to a call.
            event = tag = None
            event = poll(self.next_wakeup if deadline is None or self.next_wakeup < deadline else deadline)
            tag = event.tag
            try:
                if type(tag) is MethodType:
                    tag(event)
                    handled, polled_again = handled + 1, False
                    if handled < _MAX_EVENTS:
                        continue
                elif tag is None and handled and not polled_again:
                    # Core's legacy listener looks at one connection in each poll, so another may have a call.
                    polled_again = True
                    continue
                handled, polled_again = 0, False
                now = time.time()
                if now >= self.next_wakeup or now + _MAX_WAIT_SECONDS < self.next_wakeup < math.inf:
                    self.next_wakeup = now + _AFTER_CRASH_SECONDS
                    self.idle = tag is None
                    self.next_wakeup = self._on_wakeup(now)
            except BaseException:
                # The exception would end the polling thread.
                self._on_crash(tag if type(tag) is MethodType else None)
            if type(tag) is not MethodType and (
                tag is not None
                or (deadline is not None and (now >= deadline or deadline > now + _MAX_WAIT_SECONDS))
            ):
                return event


class Server:
    """The core server of a public `grpc.server` that has not been started.

    Calls of registered methods do not reach grpcio. Each must be requested, and arrives as an event on the polling
    thread.
    """

    def __init__(self, server: grpc.Server) -> None:
        state = server._state  # type: ignore[attr-defined]
        self._core = state.server
        self.queue = _EventLoop()
        self._core.register_completion_queue(self.queue)
        # grpcio's thread polls this queue. The queue that grpcio made stays empty.
        state.completion_queue = self.queue

    def register(self, method: str) -> None:
        """Take a method over from grpcio. Call this before the server is started."""
        self._core.register_method(method)

    def request(self, calls: list[tuple[str, Callable[[Any], None]]]) -> None:
        """Request calls by method and tag, which gets the event, and remove those that core has taken from the list.

        In a stopping server the events have no success, or none come.
        """
        while calls:
            try:
                self._core.request_registered_call(self.queue, self.queue, *calls[-1])
            except ValueError:
                # The server is shutting down.
                pass
            calls.pop()
