"""What the lane uses of grpcio that is not public: all of it, and only here.

`lane_proof` shows at start that it is there and works; nothing else of the server depends on it.
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
        auth_context,
        peer_identities,
        peer_identity_key,
    )
except ImportError as error:  # pragma: no cover - of a grpcio that is yet to come
    raise LookupError(f"grpcio {grpc.__version__} has changed: {error}") from error

from tensorferry.server.security.access_control import ClientCertificate
from tensorferry.server.status import Status, trailing_metadata

__all__ = [
    "ReceiveCloseOnServerOperation",
    "ReceiveMessageOperation",
    "SendMessageOperation",
    "Server",
]

# Operations without contents of their own, which batches may share.
SEND_INITIAL_METADATA = SendInitialMetadataOperation((), 0)
SEND_OK = SendStatusFromServerOperation((), 0, b"", 0)
# Likewise, for those who do not read what they hear.
IGNORE_CLOSE = ReceiveCloseOnServerOperation(0)

# How many events are handled in a row before it is looked what else is due.
_MOST_EVENTS = 128
_AFTER_A_BUG_SECONDS = 1.0
# Neither what is due nor grpcio's deadline is further away than a second.
_MAX_WAIT_SECONDS = 5.0


class FinalStatus(NamedTuple):
    """What ends a call with a status other than OK, as core takes it."""

    trailing_metadata: tuple[tuple[str, str | bytes], ...]
    code: int
    message: bytes
    flags: int = 0


def final_status(status: Status) -> FinalStatus:
    """The end with this status, for any number of calls."""
    return FinalStatus(trailing_metadata(status), status.code.value[0], status.message.encode())


def send_final_status(ending: FinalStatus) -> Any:
    """The operation that ends a call so."""
    return SendStatusFromServerOperation(*ending)


def send_status(status: Status) -> Any:
    """The operation that ends a call with a status other than OK."""
    return send_final_status(final_status(status))


def end(call: Any, status: Status) -> None:
    """End a call with this status at once, though a message of it is still being sent or received. On any thread."""
    call.cancel(status.code.value[0], status.message)


def peer_of(call: Any) -> str:
    """Where a call comes from, as `grpc.ServicerContext.peer` has it."""
    peer: bytes | str = call.peer()
    return peer.decode() if isinstance(peer, bytes) else peer


def certificate_of(call: Any) -> ClientCertificate:
    """Whose certificate the call's connection has, as `peer_identity_key` and `peer_identities` of `grpc.ServicerContext`."""
    kind: bytes | str | None = peer_identity_key(call)
    (pem,) = auth_context(call).get(b"x509_pem_cert", (b"",))
    return ClientCertificate(
        kind.decode() if isinstance(kind, bytes) else kind, peer_identities(call) or (), pem
    )


class _EventLoop(CompletionQueue):  # type: ignore[misc]
    """A completion queue that handles the lane's events on the thread that polls it.

    That is the one thread of grpcio's server: with a second queue and a thread of its own, each
    would often do the other's input and output, and wake it. grpcio's own tags are strings and
    functions, the lane's are bound methods; so nothing of the lane ever reaches grpcio.
    """

    def configure(self, on_wakeup: Callable[[float], float], on_crash: Callable[[Any], None]) -> None:
        """`overdue` is called with the time when it is `due`, and returns when it is due again.

        `unforeseen` is called within the handling of an exception, with what handled the event; None if it was `overdue`.
        """
        self._on_wakeup = on_wakeup
        self._on_crash = on_crash
        # In seconds since the epoch, changed on the polling thread only. What is there already is
        # handled before, though not more than `_MOST_EVENTS`.
        self.next_wakeup = math.inf
        # Whether nothing more was there when `overdue` was called.
        self.idle = True

    def poll(self, deadline: float | None = None) -> Any:
        """The next event that is grpcio's own, or the time-out."""
        poll = super().poll
        handled = 0
        event = tag = None
        while True:
            # Let go first: an event may be the last that holds a call that has ended.
            event = tag = None
            event = poll(self.next_wakeup if deadline is None or self.next_wakeup < deadline else deadline)
            tag = event.tag
            try:
                if type(tag) is MethodType:
                    tag(event)
                    handled += 1
                    if handled < _MOST_EVENTS:
                        continue
                handled = 0
                now = time.time()
                # Nothing is ever due so late, unless the clock was put back since.
                if now >= self.next_wakeup or now + _MAX_WAIT_SECONDS < self.next_wakeup < math.inf:
                    self.next_wakeup = now + _AFTER_A_BUG_SECONDS
                    self.idle = tag is None
                    self.next_wakeup = self._on_wakeup(now)
            except BaseException:
                # It would end the thread that serves everyone.
                self._on_crash(tag if type(tag) is MethodType else None)
            if type(tag) is not MethodType and (
                tag is not None
                or (deadline is not None and (now >= deadline or deadline > now + _MAX_WAIT_SECONDS))
            ):
                return event


class Server:
    """The core server behind a public `grpc.server` that has not been started.

    Methods that are registered are taken from grpcio: each call of theirs that was requested comes
    as an event to the tag it was requested with, on the polling thread.
    """

    def __init__(self, server: grpc.Server) -> None:
        state = server._state  # type: ignore[attr-defined]
        self._core = state.server
        self.queue = _EventLoop()
        self._core.register_completion_queue(self.queue)
        # The thread that grpcio starts polls this one; the one that it made stays empty.
        state.completion_queue = self.queue

    def register(self, method: str) -> None:
        """Takes a method from grpcio. Before the server is started."""
        self._core.register_method(method)

    def request(self, method: str, tag: Callable[[Any], None]) -> None:
        """Asks for one call of the method. Once the server stops it does nothing, or the event has no success."""
        try:
            self._core.request_registered_call(self.queue, self.queue, method, tag)
        except ValueError:
            # So it says that it is shutting down.
            pass
