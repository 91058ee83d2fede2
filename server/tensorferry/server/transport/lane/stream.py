"""One open ModelStreamInfer of the lane."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple

from tensorferry.server.identity import ANONYMOUS
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.stream_order import StreamEntry, encode_or_status
from tensorferry.server.security.access_control import StreamAuthorization
from tensorferry.server.status import INTERNAL_ERROR, Status
from tensorferry.server.transport.call_admission import StreamAdmission
from tensorferry.server.transport.lane import cygrpc
from tensorferry.server.transport.lane.owner import CallOwner
from tensorferry.server.transport.lane.unread_responses import account_of
from tensorferry.server.transport.stream_state import StreamEnd, StreamState


class _NextSend(NamedTuple):
    """A response or the end of the stream; initial metadata goes with the first."""

    content: InferenceReply | StreamEnd
    first: bool


class StreamCall:
    """Reads requests and sends responses as events allow: at most one read and one send are outstanding.

    Its events come on the polling thread; replies and `drain` may come on any thread.
    """

    def __init__(
        self, owner: CallOwner, event: Any, deadline: float, admission: StreamAdmission, max_in_flight: int
    ) -> None:
        self._owner = owner
        self._call = event.call
        self._metadata = event.invocation_metadata
        self._deadline = deadline
        self._account = account_of(event.call)
        self._options = admission.options
        # Both belong to the polling thread.
        self._authorization = admission.authorization
        self._caller = ANONYMOUS if self._authorization is None else self._authorization.client
        # Guards every field below. While it is held no operation is started, no request is submitted or cancelled,
        # and no message is built.
        self._lock = threading.Lock()
        self._state = StreamState(admission.options, max_in_flight, owner.unread.stream_limit)
        self._reading = False
        self._sending: InferenceReply | None = None
        # Whether initial metadata was sent.
        self._begun = False

    def start(self) -> None:
        """Watch for the client's cancellation and read the first request."""
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self.closed)
        with self._lock:
            # False if a drain has ended the stream already.
            self._reading = may_read = self._state.may_read
        if may_read:
            self._read()

    def _read(self) -> None:
        self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self.received)

    def received(self, event: Any) -> None:
        """Submit the request that was read; or end the stream if there will be no more."""
        data = event.batch_operations[0].message()
        refusal = None if data is None else self._refresh(self._authorization)
        entry = None
        with self._lock:
            self._reading = False
            if data is None:
                self._state.half_close()
            elif self._state.ended:
                return
            elif refusal is not None:
                self._state.refuse(refusal)
            else:
                entry = self._state.request_read(len(data))
                self._reading = self._state.may_read
            read_on = self._reading
            next_send = self._next_locked() if entry is None else None
        if entry is None:
            self._send(next_send)
            return
        if read_on:
            self._read()
        complete = partial(self._complete, entry)
        entry.started(self._owner.submit(data, self._deadline, complete, self._metadata, self._caller))

    def _refresh(self, authorization: StreamAuthorization | None) -> Status | None:
        """Return why the caller may send no more requests; None if it may."""
        if authorization is None:
            return None
        try:
            self._caller = authorization.refresh()
        except Exception as error:
            return self._owner.status_of(error)
        return None

    def _complete(self, entry: StreamEntry, reply: InferenceReply) -> None:
        nbytes = reply.nbytes
        error = self._owner.unread.add(self._account, nbytes)
        if error is not None:
            reply.replace_with_error(error)
        with self._lock:
            self._state.completed(entry, reply, nbytes)
            next_send = self._next_locked()
        if next_send is not None:
            self._owner.response_batcher.send(partial(self._send, next_send))

    def _next_locked(self) -> _NextSend | None:
        content = self._state.next_send()
        if content is None:
            return None
        if isinstance(content, InferenceReply):
            self._sending = content
        first, self._begun = not self._begun, True
        return _NextSend(content, first)

    def _send(self, next_send: _NextSend | None) -> None:
        if next_send is None:
            return
        content, first = next_send
        if isinstance(content, StreamEnd):
            self._send_status(content.status, first)
            return
        message = encode_or_status(content, self._options, self._owner.status_of)
        if isinstance(message, Status):
            with self._lock:
                # `closed` follows, and withdraws what is in flight.
                self._state.end()
            self._send_status(message, first)
            return
        operation = cygrpc.SendMessageOperation(message, 0)
        operations = (cygrpc.SEND_INITIAL_METADATA, operation) if first else (operation,)
        self._call.start_server_batch(operations, self.sent)
        self._owner.response_batcher.sent(len(message))

    def sent(self, event: Any) -> None:
        """Send and read on: a response was sent. Without success the client has left, and `closed` is called too."""
        with self._lock:
            reply, self._sending = self._sending, None
        if reply is not None:
            self._owner.unread.remove(self._account, reply.nbytes)
        with self._lock:
            self._state.sent()
            read_on = not self._reading and self._state.may_read
            self._reading = self._reading or read_on
            next_send = self._next_locked() if event.success else None
        if read_on:
            self._read()
        self._send(next_send)
        self._owner.sent(reply)

    def _send_status(self, status: Status | None, first: bool) -> None:
        operation = cygrpc.SEND_OK if status is None else cygrpc.send_status(status)
        operations = (cygrpc.SEND_INITIAL_METADATA, operation) if first else (operation,)
        self._call.start_server_batch(operations, self.finished)

    def finished(self, event: Any) -> None:
        """Release the last reply: the status was sent. `closed` follows."""
        with self._lock:
            reply, self._sending = self._sending, None
        self._owner.sent(reply)

    def fail(self) -> None:
        """End the stream with INTERNAL after an unexpected exception. `closed` withdraws what is in flight."""
        with self._lock:
            if self._state.ended:
                return
            self._state.end()
            first, self._begun = not self._begun, True
        self._send_status(INTERNAL_ERROR, first)

    def drain(self) -> None:
        """End the stream with UNAVAILABLE once every request that was read is answered."""
        with self._lock:
            self._state.drain()
            next_send = self._next_locked()
        self._send(next_send)

    def closed(self, event: Any) -> None:
        """Withdraw what is in flight: the call is over, or the client has left."""
        with self._lock:
            calls = self._state.end()
        self._owner.unread.close(self._account)
        self._owner.stream_ended(self)
        for call in calls:
            call.abandon()
