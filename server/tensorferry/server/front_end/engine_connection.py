"""The connection of a front-end to one engine: requests in flight over one link."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

from tensorferry.batcher import QueueFull, ResponseBurstHook
from tensorferry.server.errors import InvalidRequestError, NotReadyError
from tensorferry.server.identity import Metadata
from tensorferry.server.inference.reply import InferenceCall, InferenceReply, error_reply
from tensorferry.server.link import FrontEndLink, LinkBroken, LinkClosed, LinkFull
from tensorferry.server.link_messages import ANSWERED, decode_failure
from tensorferry.server.status import StatusError
from tensorferry.server.wire.structure import peek_request_id

_log = logging.getLogger("tensorferry.server")

# When to retry a request for which the link has no room. The engine frees room with each batch.
_RETRY_SECONDS = 0.1

NO_ENGINE = "the server's engine is not ready: it is loading its models; retry"
LOST = "the server's engine ended before it answered; the request may have run; retry if that does no harm"


class RemoteCall(InferenceCall):
    """A request that the engine has."""

    __slots__ = ("_link", "_ticket", "complete")

    def __init__(self, link: FrontEndLink, complete: Callable[[InferenceReply], None]) -> None:
        self._link = link
        self._ticket = 0
        # Called once with the reply.
        self.complete = complete

    def submit(self, message: bytes, deadline: float, extra: bytes) -> None:
        """Send the request; the link's `flush` wakes the engine for it. LinkFull or LinkClosed if it was not sent."""
        self._ticket = self._link.submit(message, deadline, extra, self)

    def cancel(self) -> None:
        """See `InferenceCall`."""
        if self._link.cancel(self._ticket):
            self._link.flush()


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
    """Requests in flight to one engine. Thread-safe; a thread of its own receives the responses."""

    def __init__(self, link: FrontEndLink, response_hook: ResponseBurstHook) -> None:
        self._link = link
        self._response_hook = response_hook
        self._receiver = threading.Thread(target=self._receive, name="engine-responses", daemon=True)
        self._receiver.start()

    def submit(
        self, message: bytes, deadline: float, extra: bytes, complete: Callable[[InferenceReply], None]
    ) -> RemoteCall:
        """Send a request; `flush` wakes the engine for it. `complete` gets the reply on any thread.

        QueueFull if the link has no room, InvalidRequestError if it never has, NotReadyError if the engine is gone.
        """
        call = RemoteCall(self._link, complete)
        try:
            call.submit(message, deadline, extra)
        except LinkFull as error:
            if error.what == "size":
                raise InvalidRequestError(str(error)) from None
            raise QueueFull(f"{error}; retry in {_RETRY_SECONDS} s", _RETRY_SECONDS) from None
        except LinkClosed:
            raise NotReadyError(NO_ENGINE) from None
        return call

    def flush(self) -> None:
        """Wake the engine if there are new requests."""
        self._link.flush()

    def run_inline(self, max_seconds: float) -> float:
        """Wake the engine, from a thread that has submitted many requests. See `InlineRunner`."""
        self._link.flush()
        return math.inf

    def close(self) -> None:
        """End every request that has no response: the engine is gone. Returns once all are ended."""
        self._link.close()
        self._receiver.join()

    def _receive(self) -> None:
        try:
            self._complete_responses()
        except LinkBroken as error:
            _log.error(
                "the engine breaks the rules of the link, which is a bug; its requests fail: %s", error
            )
            self._link.close()
        for ticket, call in self._link.outstanding():
            message, _, _ = self._link.message_of(ticket)
            call.complete(error_reply(peek_request_id(message), NotReadyError(LOST), ("", ""), ()))
        self._link.release()

    def _complete_responses(self) -> None:
        hook, receive = self._response_hook, self._link.receive
        while responses := receive():
            hook.begin(len(responses))
            try:
                for _, code, payload, call in responses:
                    call.complete(_reply(code, payload))
            finally:
                hook.end()


def _reply(code: int, payload: bytes) -> InferenceReply:
    if code == ANSWERED:
        return RemoteReply(payload)
    failed = decode_failure(payload)
    return error_reply(failed.request_id, StatusError(failed.status), failed.addressed, ())
