"""Requests of a front-end: an engine has each, or it is held until one can take it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tensorferry.batcher import Cancelled
from tensorferry.server.inference.reply import InferenceCall, InferenceReply, error_reply
from tensorferry.server.link import FrontEndLink
from tensorferry.server.wire.structure import peek_request_id

_CANCELLED = "the request was cancelled while it waited for an engine"


class RemoteCall(InferenceCall):
    """A request that an engine has, or will have. `complete` is called once with the reply, on any thread.

    `submit`, `lose` and `held_by` are called by one thread at a time.
    """

    __slots__ = ("_cancelled", "_holder", "_sent", "complete", "lost")

    def __init__(self, complete: Callable[[InferenceReply], None]) -> None:
        self.complete = complete
        # One tuple, so that a ticket is never used with another link.
        self._sent: tuple[FrontEndLink, int] | None = None
        self._holder: HeldRequests | None = None
        self._cancelled = False
        # Whether an engine was lost that had not begun with it.
        self.lost = False

    def submit(self, link: FrontEndLink, message: bytes, deadline: float, extra: bytes) -> None:
        """Send the request; the link's `flush` wakes the engine for it. LinkFull or LinkClosed if it was not sent."""
        self._sent = link, link.submit(message, deadline, extra, self)
        if self._cancelled:
            self.cancel()

    def lose(self) -> None:
        """Note that the engine was lost."""
        self.lost = True

    def held_by(self, holder: HeldRequests) -> None:
        """Let `cancel` withdraw the request from this holder. Call it when the holder has the request."""
        self._holder = holder
        if self._cancelled:
            holder.cancel(self)

    def cancel(self) -> None:
        """See `InferenceCall`."""
        # Written before the others are read: what holds or sends the request meanwhile sees it.
        self._cancelled = True
        holder, sent = self._holder, self._sent
        if holder is not None and holder.cancel(self):
            return
        if sent is not None:
            link, ticket = sent
            if link.cancel(ticket):
                link.flush()


class HeldRequest(NamedTuple):
    """What is sent to the next engine."""

    call: RemoteCall
    message: bytes
    deadline: float
    extra: bytes

    @property
    def request_id(self) -> str:
        """The client's id of the request."""
        return peek_request_id(self.message)

    def fail(self, error: Exception) -> None:
        """Answer the request with an error."""
        self.call.complete(error_reply(self.request_id, error, ("", ""), ()))


class HeldRequests:
    """Requests that no engine has at the moment, in order. Thread-safe: each is taken or cancelled, once."""

    def __init__(self) -> None:
        # Guards _requests.
        self._lock = threading.Lock()
        self._requests: dict[RemoteCall, HeldRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def hold(self, requests: Sequence[HeldRequest]) -> None:
        """Add requests."""
        with self._lock:
            self._requests.update((request.call, request) for request in requests)
        for request in requests:
            request.call.held_by(self)

    def take(self) -> HeldRequest | None:
        """Remove and return the oldest; None if there is none."""
        with self._lock:
            if not self._requests:
                return None
            return self._requests.pop(next(iter(self._requests)))

    def cancel(self, call: RemoteCall) -> bool:
        """Answer a request with Cancelled. Return whether it was held."""
        with self._lock:
            request = self._requests.pop(call, None)
        if request is None:
            return False
        request.fail(Cancelled(_CANCELLED))
        return True

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """Answer all requests, each with a new error."""
        while (request := self.take()) is not None:
            request.fail(error())
