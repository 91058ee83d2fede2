"""One open ModelStreamInfer of the threaded servicer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import grpc

from tensorferry.server.identity import ANONYMOUS, Metadata
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.inference.stream_order import (
    NO_THREAD_FOR_STREAM,
    STREAM_SHUTTING_DOWN,
    ResponseOrder,
    StreamEntry,
    StreamOptions,
    encode_or_status,
)
from tensorferry.server.security.access_control import StreamAuthorization
from tensorferry.server.status import INTERNAL_ERROR, Status
from tensorferry.server.transport.unread_responses import ResponseAccount, UnreadResponses

_log = logging.getLogger("tensorferry.server")


class ResponseStream:
    """Reads requests on a thread of its own and gives the responses to the handler's.

    At most `max_in_flight` requests are between being read and having their response sent, and fewer of
    large ones; then no more is read, HTTP/2's flow control stops the client, and one that does not read
    its responses cannot make memory grow. Thread-safe.
    """

    def __init__(
        self,
        service: InferenceService,
        deadline: float,
        *,
        options: StreamOptions,
        max_in_flight: int,
        metadata: Metadata = (),
        standing: StreamAuthorization | None = None,
        account: ResponseAccount | None = None,
    ) -> None:
        self._account = account or ResponseAccount(UnreadResponses(), "", lambda error: None)
        self._service = service
        self._deadline = deadline
        self._options = options
        self._metadata = metadata
        # The reader's own.
        self._standing = standing
        self._max_in_flight = max_in_flight
        # Guards every field below. While it is held no request is submitted or cancelled and
        # no message is read, built or sent.
        self._lock = threading.Lock()
        # Waited for by the reader; notified when a response has been sent, and by close.
        self._room = threading.Condition(self._lock)
        # Waited for by the handler: a response may be sent, or none will come any more.
        self._deliverable = threading.Condition(self._lock)
        self._responses = ResponseOrder(ordered=options.ordered)
        self._in_flight = 0
        # The bytes of the largest message or answer so far, which the next may have, too.
        self._largest = 0
        self._reading = True
        self._closed = False
        self._draining = False
        # Why no more is read, though the client has more to say.
        self._refusal: Status | None = None
        self._end: Status | None = None

    @property
    def end(self) -> Status | None:
        """The status with which the server ended the stream before the client had finished it."""
        with self._lock:
            return self._end

    def responses(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """The responses, serialised, until the client has finished or left, or the server ends the stream."""
        reader = threading.Thread(target=self._read, args=(messages,), name="stream-reader", daemon=True)
        try:
            reader.start()
        except RuntimeError as error:
            _log.error("no thread for a stream: %s", error)
            with self._lock:
                self._end = NO_THREAD_FOR_STREAM
            return
        while (reply := self._next()) is not None:
            try:
                message = encode_or_status(reply, self._options, self._service.status_of)
                if isinstance(message, Status):
                    with self._lock:
                        self._end = message
                    # Whoever closes the stream then withdraws what is in flight; the reader ends with the call.
                    return
                yield message
            finally:
                self._account.remove(reply.nbytes)
                if reply.trace is not None:
                    reply.trace.sent()
            with self._lock:
                self._in_flight -= 1
                self._room.notify()
        with self._lock:
            reader_ends_alone = self._reading
        if not reader_ends_alone:
            reader.join()

    def _next(self) -> InferenceReply | None:
        """The next response to send; None when there will be none."""
        with self._lock:
            while True:
                if self._closed:
                    return None
                if (reply := self._responses.pop()) is not None:
                    return reply
                if self._in_flight == 0 and (self._draining or not self._reading):
                    self._end = self._refusal or (STREAM_SHUTTING_DOWN if self._reading else None)
                    return None
                self._deliverable.wait()

    def _read(self, messages: Iterator[bytes]) -> None:
        try:
            for data in messages:
                if not self._submit(data):
                    break
        except grpc.RpcError:
            # The client left, or its deadline passed: `close` is called as well.
            pass
        except BaseException:
            # Its request may never be answered: nobody must wait for that.
            _log.exception("a stream could not be read; this is a bug in tensorferry.server")
            with self._lock:
                self._end = INTERNAL_ERROR
            self.close()
        finally:
            with self._lock:
                self._reading = False
                self._deliverable.notify()

    def _submit(self, data: bytes) -> bool:
        caller = ANONYMOUS
        if self._standing is not None:
            try:
                caller = self._standing.refresh()
            except Exception as error:
                refusal = self._service.status_of(error)
                with self._lock:
                    self._refusal = refusal
                return False
        with self._lock:
            self._largest = max(self._largest, len(data))
            while not (self._closed or self._has_room_locked()):
                self._room.wait()
            if self._closed:
                return False
            self._in_flight += 1
            entry = self._responses.add()
        call = self._service.submit(
            data,
            self._deadline,
            lambda reply: self._complete(entry, reply),
            self._metadata,
            caller=caller,
        )
        with self._lock:
            entry.call = call
            left = self._closed
        if left:
            call.abandon()
        return True

    def _has_room_locked(self) -> bool:
        in_flight = self._in_flight
        return (
            in_flight < self._max_in_flight and in_flight * self._largest < self._account.unread.stream_limit
        )

    def _complete(self, entry: StreamEntry, reply: InferenceReply) -> None:
        nbytes = reply.nbytes
        error = self._account.add(nbytes)
        if error is not None:
            reply.replace_with_error(error)
        with self._lock:
            self._largest = max(self._largest, nbytes)
            self._responses.done(entry, reply)
            self._deliverable.notify()

    def drain(self) -> None:
        """Ends the stream once every request that was read is answered."""
        with self._lock:
            self._draining = True
            self._deliverable.notify()

    def close(self) -> None:
        """Withdraws what is in flight and ends reader and handler. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            calls = self._responses.calls()
            self._room.notify()
            self._deliverable.notify()
        self._account.close()
        for call in calls:
            call.abandon()
