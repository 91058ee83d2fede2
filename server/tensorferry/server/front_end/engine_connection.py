"""The connection of a front-end to one engine: requests in flight over one link."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tensorferry.batcher import QueueFull
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.front_end.remote_call import HeldRequest, RemoteCall
from tensorferry.server.identity import Metadata
from tensorferry.server.inference.reply import InferenceReply, error_reply
from tensorferry.server.link import FrontEndLink, LinkFull
from tensorferry.server.link_messages import ANSWERED, decode_failure
from tensorferry.server.status import Status, StatusCode, StatusError
from tensorferry.server.threads import ThreadKind, new_thread

if TYPE_CHECKING:
    from tensorferry.batcher import ResponseBurstHook

_log = logging.getLogger("tensorferry.server")

# When to retry a request for which the link has no room. The engine frees room with each batch.
_RETRY_SECONDS = 0.1

# When to retry a request that finds no engine. A new one takes longer, but clients wait longer with each attempt.
_ENGINE_SECONDS = 0.5

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

    When the engine is gone, `lost` gets the requests without a response, on that thread: those that had not begun, and
    those that had.
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
        self._receiver = new_thread("engine-responses", self._receive, ThreadKind.ESSENTIAL)
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

    def run_inline(self, max_seconds: float) -> float:
        """Wake the engine, from a thread that has submitted many requests. See `InlineRunner`."""
        self._link.flush()
        return math.inf

    def close(self) -> None:
        """Receive what the engine has sent, and give up the rest: the engine is gone. Returns after `lost` was called."""
        self._link.close()
        self._receiver.join()

    def _receive(self) -> None:
        # LinkBroken ends the process, because its clients would never reach an engine again.
        self._complete_responses()
        waiting: list[HeldRequest] = []
        begun: list[HeldRequest] = []
        for ticket, call in self._link.outstanding():
            request = HeldRequest(call, *self._link.message_of(ticket))
            (begun if self._link.begun(ticket) else waiting).append(request)
        self._link.release()
        self._lost(waiting, begun)

    def _complete_responses(self) -> None:
        hook, receive = self._response_hook, self._link.receive
        while responses := receive():
            hook.begin(len(responses))
            try:
                for _, code, payload, call in responses:
                    call.complete(reply_of(code, payload))
            finally:
                hook.end()


def reply_of(code: int, payload: bytes) -> InferenceReply:
    """Return a response of the engine as a reply."""
    if code == ANSWERED:
        return RemoteReply(payload)
    failed = decode_failure(payload)
    return error_reply(failed.request_id, StatusError(failed.status), failed.addressed, ())
