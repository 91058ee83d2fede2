"""The connection of a front-end to one engine: requests in flight over one link."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tensorferry.batcher import QueueFull
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.front_end.remote_call import HeldRequest, RemoteCall
from tensorferry.server.identity import Metadata
from tensorferry.server.inference.reply import InferenceReply, error_reply
from tensorferry.server.link import FrontEndLink, LinkBroken, LinkFull, Response
from tensorferry.server.link_messages import ANSWERED, decode_failure
from tensorferry.server.status import Status, StatusCode, StatusError

if TYPE_CHECKING:
    from tensorferry.batcher import ResponseBurstHook

_log = logging.getLogger("tensorferry.server")

# When to retry a request for which the link has no room. The engine frees room with each batch.
_RETRY_SECONDS = 0.1

# When to retry a request that finds no engine. A new one takes longer, but clients wait longer with each attempt.
_ENGINE_SECONDS = 0.5

# How long `run_inline` waits for responses, and for how many requests at most. With more, or if a response comes later, the
# receiving thread receives for a while: the polling thread has other calls to serve, and to resume that thread costs more.
_WAIT_SECONDS = 1e-3
_MOST_AWAITED = 32
_WHILE_SECONDS = 0.02

NO_ENGINE = "the server's engine is not ready: it is loading its models; retry"
LOST = "the server's engine ended before it answered; the request may have run; retry if that does no harm"


def no_engine_error() -> StatusError:
    """Return the error of a request that no engine has run."""
    return StatusError(Status(StatusCode.UNAVAILABLE, NO_ENGINE, _ENGINE_SECONDS))


def lost_error() -> StatusError:
    """Return the error of a request that may have ended the engine."""
    return StatusError(Status(StatusCode.UNAVAILABLE, LOST, answered=False))


class RemoteReply(InferenceReply):
    """A response of the engine."""

    __slots__ = ("_message",)

    request_id = ""
    metadata: Metadata = ()
    trace = None

    def __init__(self, message: bytes) -> None:
        self._message: bytes | Exception = message

    @property
    def addressed(self) -> tuple[str, str]:
        """See `InferenceReply`."""
        return "", ""

    @property
    def output_bytes(self) -> int:
        """See `InferenceReply`."""
        return len(self._message) if isinstance(self._message, bytes) else 0

    def replace_with_error(self, error: Exception) -> None:
        """See `InferenceReply`."""
        self._message = error

    def pieces(self) -> Sequence[bytes]:
        """See `InferenceReply`."""
        if isinstance(self._message, Exception):
            raise self._message
        return (self._message,)


class EngineConnection:
    """Requests in flight to one engine. Thread-safe; a thread of its own receives the responses.

    `run_inline` itself receives those that come soon, so that the polling thread sends them without waking another thread.
    At any time one thread receives, or none while no request is in flight: then it pauses.

    When the engine is gone, `lost` gets the requests without a response, on the receiving thread: those that had not begun,
    and those that had.
    """

    def __init__(
        self,
        link: FrontEndLink,
        response_hook: ResponseBurstHook,
        lost: Callable[[Sequence[HeldRequest], Sequence[HeldRequest]], None],
    ) -> None:
        self._link = link
        self._lost = lost
        self._response_hook = response_hook
        # Guards the next two fields. Nothing is called while it is held.
        self._lock = threading.Lock()
        # Whether no thread receives.
        self._paused = True
        self._closed = False
        # Released to end the receiving thread's pause.
        self._resume = threading.Lock()
        self._resume.acquire()
        # No pause begins before this time. Only the thread that receives uses it.
        self._pause_from = -math.inf
        self._receiver = threading.Thread(target=self._receive, name="engine-responses", daemon=True)
        self._receiver.start()

    def submit(self, call: RemoteCall, message: bytes, deadline: float, extra: bytes) -> None:
        """Send a request; `flush` wakes the engine for it.

        QueueFull if the link has no room, InvalidRequestError if it never has, LinkClosed if the engine is gone.
        """
        try:
            call.submit(self._link, message, deadline, extra)
        except LinkFull as error:
            if error.what == "size":
                raise InvalidRequestError(str(error)) from None
            raise QueueFull(f"{error}; retry in {_RETRY_SECONDS} s", _RETRY_SECONDS) from None

    def flush(self) -> None:
        """Wake the engine if there are new requests."""
        self._link.flush()
        if self._end_pause():
            self._resume.release()

    def run_inline(self, max_seconds: float) -> float:
        """Wake the engine, from a thread that has submitted many requests. See `InlineRunner`."""
        self._link.flush()
        if not self._end_pause():
            return math.inf
        if self._link.in_flight <= _MOST_AWAITED and self._link.wait(_WAIT_SECONDS):
            # The receiving thread gets the error again.
            with suppress(LinkBroken):
                self._complete(self._link.receive())
        else:
            self._pause_from = time.monotonic() + _WHILE_SECONDS
        if not self._begin_pause():
            self._resume.release()
        return math.inf

    def close(self) -> None:
        """Receive what the engine has sent, and give up the rest: the engine is gone. Returns after `lost` was called."""
        self._link.close()
        with self._lock:
            self._closed = True
        self.flush()
        self._receiver.join()

    def _end_pause(self) -> bool:
        """Return whether no thread received; then the calling thread must, or resume the receiving thread."""
        with self._lock:
            paused, self._paused = self._paused, False
            return paused

    def _begin_pause(self) -> bool:
        """Stop receiving if no request is in flight; return whether. For the thread that receives."""
        if time.monotonic() < self._pause_from:
            return False
        with self._lock:
            self._paused = not (self._link.in_flight or self._closed)
            return self._paused

    def _receive(self) -> None:
        broken = False
        try:
            self._complete_responses()
        except LinkBroken as error:
            _log.error(
                "the engine breaks the rules of the link, which is a bug; its requests are lost: %s", error
            )
            self._link.close()
            broken = True
        waiting: list[HeldRequest] = []
        begun: list[HeldRequest] = []
        for ticket, call in self._link.outstanding():
            request = HeldRequest(call, *self._link.message_of(ticket))
            (begun if broken or self._link.begun(ticket) else waiting).append(request)
        self._link.release()
        self._lost(waiting, begun)

    def _complete_responses(self) -> None:
        self._resume.acquire()
        while responses := self._link.receive():
            self._complete(responses)
            if self._begin_pause():
                self._resume.acquire()

    def _complete(self, responses: Sequence[Response]) -> None:
        self._response_hook.begin(len(responses))
        try:
            for _, code, payload, call in responses:
                try:
                    call.complete(reply_of(code, payload))
                except Exception:
                    # The other responses must still be sent.
                    _log.exception("a response could not be passed on; this is a bug in tensorferry.server")
        finally:
            self._response_hook.end()


def reply_of(code: int, payload: bytes) -> InferenceReply:
    """Return a response of the engine as a reply."""
    if code == ANSWERED:
        return RemoteReply(payload)
    failed = decode_failure(payload)
    return error_reply(failed.request_id, StatusError(failed.status), failed.addressed, ())
