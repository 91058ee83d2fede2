"""One open ModelStreamInfer of the threaded servicer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial

import grpc

from tensorferry.server.identity import ANONYMOUS, Metadata
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.responses.stream_responses import encode_or_status
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.security.access_control import StreamAuthorization
from tensorferry.server.status import INTERNAL_ERROR, Status, StatusCode
from tensorferry.server.system.threads import ThreadKind, new_thread
from tensorferry.server.transport.call_admission import StreamAdmission
from tensorferry.server.transport.stream_state import StreamEntry, StreamState
from tensorferry.server.transport.unread_responses import ResponseAccount, UnreadResponses

_log = logging.getLogger("tensorferry.server")


class ResponseStream:
    """Reads requests on a thread of its own and yields the responses on the handler's thread. Thread-safe."""

    def __init__(
        self,
        service: InferenceService,
        deadline: float,
        *,
        admission: StreamAdmission,
        max_in_flight: int,
        metadata: Metadata = (),
        unread: UnreadResponses | None = None,
        account: ResponseAccount | None = None,
    ) -> None:
        self._unread = unread or UnreadResponses()
        self._account = account or ResponseAccount("", lambda error: None)
        self._service = service
        self._deadline = deadline
        self._options = admission.options
        self._metadata = metadata
        # What sequences of this stream refer to, also after its end.
        self._token = object()
        # Belongs to the reader.
        self._authorization: StreamAuthorization | None = admission.authorization
        # Guards every field below. While it is held no request is submitted or cancelled and no message is read,
        # built or sent.
        self._lock = threading.Lock()
        # The reader waits until the next request may be read; notified by every sent response and by `close`.
        self._may_read = threading.Condition(self._lock)
        # The handler waits until a response may be sent, or the stream ends.
        self._may_send = threading.Condition(self._lock)
        self._state = StreamState(admission.options, max_in_flight, self._unread.stream_limit)
        self._reading = True
        self._closed = False
        self._end: Status | None = None

    @property
    def end(self) -> Status | None:
        """The status with which the server ended the stream; None if the client ended it."""
        with self._lock:
            return self._end

    def responses(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the serialised responses until the client has finished or left, or the server ends the stream."""
        reader = new_thread("stream-reader", partial(self._read, messages), ThreadKind.EXPENDABLE)
        try:
            reader.start()
        except RuntimeError as error:
            _log.error("no thread for a stream: %s", error)
            with self._lock:
                self._end = Status(
                    StatusCode.RESOURCE_EXHAUSTED,
                    "the server cannot start a thread for this stream; try again, or send unary calls, which wait for one",
                )
            return
        while True:
            with self._lock:
                while (content := self._state.next_send()) is None and not self._state.ended:
                    self._may_send.wait()
                if not isinstance(content, StreamEntry):
                    if content is not None:
                        self._end = content.status
                    reader_ends_with_call = self._reading
                    break
            reply = content.reply
            assert reply is not None
            try:
                message = encode_or_status(reply, self._options, self._service.status_of)
                if isinstance(message, Status):
                    with self._lock:
                        self._end = message
                    # `close` withdraws what is in flight, and the reader ends with the call.
                    return
                yield message
            finally:
                self._unread.remove(self._account, content.unread_bytes)
                reply.sent()
            with self._lock:
                self._state.sent()
                self._may_read.notify()
            # They may be large, and the next response may be long in coming.
            del content, reply, message
        if not reader_ends_with_call:
            reader.join()

    def _read(self, messages: Iterator[bytes]) -> None:
        try:
            while True:
                with self._lock:
                    while not (self._state.may_read or self._state.ended):
                        self._may_read.wait()
                    if self._state.ended:
                        return
                data = next(messages, None)
                if data is None or not self._submit(data):
                    return
                # It may be large, and the next request may be long in coming.
                del data
        except grpc.RpcError as left:
            # The client has left, or its deadline has passed: `close` is called as well. grpcio keeps the exception with the
            # call, which the exception's frames refer to.
            left.__traceback__ = None
        except BaseException:
            # The last request may never be answered, so the handler must not wait for its response.
            _log.exception("a stream could not be read; this is a bug in tensorferry.server")
            with self._lock:
                self._end = INTERNAL_ERROR
            self.close()
        finally:
            with self._lock:
                self._reading = False
                self._state.half_close()
                self._may_send.notify()

    def _submit(self, data: bytes) -> bool:
        """Submit a request; return false if no more are to be read."""
        caller = ANONYMOUS
        if self._authorization is not None:
            try:
                caller = self._authorization.refresh()
            except Exception as error:
                refusal = self._service.status_of(error)
                with self._lock:
                    self._state.half_close(refusal)
                return False
        with self._lock:
            if self._state.ended:
                return False
            entry = self._state.request_read(len(data))
        complete = partial(self._complete, entry)
        call = self._service.submit(
            data,
            self._deadline,
            complete,
            self._metadata,
            caller=caller,
            stream=self._token,
            answers=partial(self._answer, entry),
        )
        with self._lock:
            entry.call = call
            closed = self._closed
        if closed:
            call.abandon()
        return True

    def _answer(self, entry: StreamEntry, reply: InferenceReply) -> Exception | None:
        nbytes = reply.output_bytes
        error = self._unread.add(self._account, nbytes)
        if error is not None:
            return error
        with self._lock:
            wanted = self._state.answered(entry, reply, nbytes)
            self._may_send.notify()
        if not wanted:
            self._unread.remove(self._account, nbytes)
        return None

    def _complete(self, entry: StreamEntry, reply: InferenceReply) -> None:
        nbytes = reply.output_bytes
        error = self._unread.add(self._account, nbytes)
        if error is None:
            entry.unread_bytes = nbytes
        else:
            reply.replace_with_error(error)
        with self._lock:
            self._state.completed(entry, reply, nbytes)
            self._may_send.notify()
            if reply.silent:
                self._may_read.notify()
        if reply.silent:
            reply.sent()

    def drain(self) -> None:
        """End the stream with UNAVAILABLE once every request that was read is answered."""
        with self._lock:
            self._state.drain()
            self._may_send.notify()

    def close(self) -> None:
        """Withdraw what is in flight and end reader and handler. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            calls = self._state.end()
            self._may_read.notify()
            self._may_send.notify()
        self._unread.close(self._account)
        self._service.end_stream(self._token)
        for call in calls:
            call.abandon()
