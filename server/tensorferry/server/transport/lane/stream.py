"""One open ModelStreamInfer of the lane: one read and one write outstanding at a time, both bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias

from tensorferry.server.identity import ANONYMOUS, ClientIdentity
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.inference.stream_order import (
    STREAM_SHUTTING_DOWN,
    ResponseOrder,
    StreamEntry,
    StreamOptions,
    encode_or_status,
    parse_stream_options,
    too_many_streams,
)
from tensorferry.server.security.access_control import StreamAuthorization
from tensorferry.server.status import INTERNAL_ERROR, Status
from tensorferry.server.transport.lane import cygrpc
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher
from tensorferry.server.transport.lane.unread_responses import account_of
from tensorferry.server.transport.unread_responses import UnreadResponses

# A response (None: there are no more), whether it is the first that is sent, and with what the stream ends when it
# is the end.
_Turn: TypeAlias = tuple[InferenceReply | None, bool, Status | None]


class Owner(Protocol):
    """What a stream needs of the lane."""

    @property
    def unread(self) -> UnreadResponses:
        """The bytes of answers that clients have yet to read."""

    @property
    def response_batcher(self) -> ResponseBatcher:
        """What the answers of batches leave by."""

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Any,
        caller: ClientIdentity,
    ) -> InferenceCall:
        """As `InferenceService.submit`."""

    def status_of(self, error: BaseException, reply: InferenceReply | None = None) -> Status:
        """As `InferenceService.status_of`."""

    def sent(self, reply: InferenceReply | None) -> None:
        """The reply is on its way, or the end of the stream."""

    def forget(self, stream: StreamCall) -> None:
        """The stream is over."""


class StreamCall:
    """Reads requests and sends responses as events allow. Its events come on one polling thread.

    At most `max_in_flight` requests are between being read and having their response sent, and fewer
    of large ones; then no more is read, HTTP/2's flow control stops the client, and one that does not read its
    responses cannot make memory grow. Replies may come on any thread.
    """

    def __init__(
        self,
        owner: Owner,
        event: Any,
        deadline: float,
        max_in_flight: int,
        standing: StreamAuthorization | None,
    ) -> None:
        self._owner = owner
        self._call = event.call
        self._metadata = event.invocation_metadata
        self._deadline = deadline
        # The polling thread's own, both.
        self._caller = ANONYMOUS if standing is None else standing.client
        self._standing = standing
        self._max_in_flight = max_in_flight
        self._account = account_of(owner.unread, event.call)
        self._most_bytes = owner.unread.stream_limit
        # Guards every field below. While it is held no operation is started, no request is
        # submitted or cancelled, and no message is built.
        self._lock = threading.Lock()
        self._options = StreamOptions()
        self._responses = ResponseOrder(ordered=True)
        self._in_flight = 0
        # The bytes of the largest message or answer so far, which the next may have, too.
        self._largest = 0
        self._reading = False
        self._half_closed = False
        self._sending: InferenceReply | None = None
        self._begun = False
        self._draining = False
        # Why no more is read, though the client has more to say.
        self._refusal: Status | None = None
        # Its status is being sent, or the client is gone: nothing more is sent, or submitted.
        self._ended = False

    def start(self, refusal: Status | None, full: int | None) -> None:
        """Begins to read; or ends at once, where it is refused, asks for what cannot be, or `full` streams are open."""
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self.closed)
        options = parse_stream_options(self._metadata)
        if isinstance(options, Status):
            refusal, options = refusal or options, StreamOptions()
        if refusal is None and full is not None:
            refusal = too_many_streams(full)
        with self._lock:
            # A drain may have ended it by now.
            if self._ended:
                return
            if refusal is None:
                self._options = options
                self._responses = ResponseOrder(ordered=options.ordered)
                self._reading = True
            else:
                self._ended = True
        if refusal is None:
            self._read()
        else:
            self._send_status(refusal, first=True)

    def _read(self) -> None:
        self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self.received)

    def received(self, event: Any) -> None:
        """A message is there; or there will be no more."""
        data = event.batch_operations[0].message()
        refusal = None if data is None or self._standing is None else self._renew(self._standing)
        with self._lock:
            self._reading = False
            if data is None:
                self._half_closed = True
            elif self._ended:
                # Nobody waits for an answer any more.
                return
            elif refusal is not None:
                self._refusal = refusal
            else:
                entry = self._responses.add()
                self._in_flight += 1
                self._largest = max(self._largest, len(data))
                self._reading = self._has_room_locked()
            read_on = self._reading
            over = data is None or refusal is not None
            turn = self._next_locked() if over else None
        if over:
            self._send(turn)
            return
        if read_on:
            self._read()
        entry.call = self._owner.submit(
            data, self._deadline, partial(self._complete, entry), self._metadata, self._caller
        )

    def _renew(self, standing: StreamAuthorization) -> Status | None:
        try:
            self._caller = standing.refresh()
        except Exception as error:
            return self._owner.status_of(error)
        return None

    def _has_room_locked(self) -> bool:
        in_flight = self._in_flight
        return in_flight < self._max_in_flight and in_flight * self._largest < self._most_bytes

    def _complete(self, entry: StreamEntry, reply: InferenceReply) -> None:
        nbytes = reply.nbytes
        error = self._account.add(nbytes)
        if error is not None:
            reply.replace_with_error(error)
        with self._lock:
            self._largest = max(self._largest, nbytes)
            self._responses.done(entry, reply)
            # Under load another is being sent: then that is all.
            turn = self._next_locked() if self._sending is None else None
        if turn is not None:
            self._owner.response_batcher.send(partial(self._send, turn))

    def _next_locked(self) -> _Turn | None:
        """What may be sent now: a response, or the status after the last; None when there is nothing."""
        if self._sending is not None or self._ended:
            return None
        reply = self._sending = self._responses.pop()
        if reply is None:
            if self._in_flight > 0 or not (self._half_closed or self._draining or self._refusal):
                return None
            self._ended = True
        first, self._begun = not self._begun, True
        return reply, first, self._refusal or (None if self._half_closed else STREAM_SHUTTING_DOWN)

    def _send(self, turn: _Turn | None) -> None:
        """Sends what `_next_locked` said; or the status of an error which is the end."""
        if turn is None:
            return
        reply, first, end = turn
        if reply is None:
            self._send_status(end, first)
            return
        message = encode_or_status(reply, self._options, self._owner.status_of)
        if isinstance(message, Status):
            with self._lock:
                self._ended = True
            # `closed` follows, and withdraws what is in flight.
            self._send_status(message, first)
            return
        operation = cygrpc.SendMessageOperation(message, 0)
        operations = (cygrpc.SEND_INITIAL_METADATA, operation) if first else (operation,)
        self._call.start_server_batch(operations, self.sent)
        self._owner.response_batcher.sent(len(message))

    def sent(self, event: Any) -> None:
        """A response is on its way, or the client is gone, which `closed` tells as well."""
        with self._lock:
            reply, self._sending = self._sending, None
        if reply is not None:
            self._account.remove(reply.nbytes)
        with self._lock:
            self._in_flight -= 1
            read_on = self._has_room_locked() and not (
                self._reading or self._half_closed or self._ended or self._refusal
            )
            self._reading = self._reading or read_on
            turn = self._next_locked() if event.success else None
        if read_on:
            self._read()
        self._send(turn)
        self._owner.sent(reply)

    def _send_status(self, status: Status | None, first: bool) -> None:
        operation = cygrpc.SEND_OK if status is None else cygrpc.send_status(status)
        operations = (cygrpc.SEND_INITIAL_METADATA, operation) if first else (operation,)
        self._call.start_server_batch(operations, self.finished)

    def finished(self, event: Any) -> None:
        """The status is on its way; `closed` follows."""
        with self._lock:
            reply, self._sending = self._sending, None
        self._owner.sent(reply)

    def fail(self) -> None:
        """An event of the stream was not handled to its end: it ends, and `closed` withdraws what is in flight."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            first, self._begun = not self._begun, True
        self._send_status(INTERNAL_ERROR, first)

    def drain(self) -> None:
        """Ends the stream once every request that was read is answered."""
        with self._lock:
            self._draining = True
            turn = self._next_locked()
        self._send(turn)

    def closed(self, event: Any) -> None:
        """The call is over; if the client has left, what is in flight is withdrawn."""
        with self._lock:
            self._ended = True
            calls = self._responses.calls()
        self._account.close()
        self._owner.forget(self)
        for call in calls:
            call.abandon()
