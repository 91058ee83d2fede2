"""One open ModelStreamInfer of the lane."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorferry.server.identity import ANONYMOUS
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.responses.stream_responses import encode_or_status
from tensorferry.server.status import INTERNAL_ERROR, Status
from tensorferry.server.transport.call_admission import StreamAdmission
from tensorferry.server.transport.lane import cygrpc
from tensorferry.server.transport.stream_state import StreamEnd, StreamEntry, StreamState

if TYPE_CHECKING:
    from tensorferry.server.transport.lane.lane import Lane


class StreamCall:
    """Reads requests and sends responses as events allow: at most one read and one send are outstanding.

    Its events come on the polling thread; replies and `drain` may come on any thread.
    """

    def __init__(
        self, owner: Lane, event: Any, deadline: float, admission: StreamAdmission, max_in_flight: int
    ) -> None:
        self._owner = owner
        self._call = event.call
        self._metadata = event.invocation_metadata
        self._deadline = deadline
        self._account = cygrpc.account_of(event.call)
        self._options = admission.options
        # What sequences of this stream refer to, also after its end.
        self.token = object()
        # The next two belong to the polling thread.
        self._authorization = admission.authorization
        self._caller = ANONYMOUS if self._authorization is None else self._authorization.client
        # Both belong to the thread that sends the next response. Initial metadata goes with the first response or status.
        self._opening: tuple[Any, ...] = (cygrpc.SEND_INITIAL_METADATA,)
        self._sending: StreamEntry | None = None
        # Guards the state and `_reading`: whether a read is outstanding, or the request it returned is not submitted yet. While
        # it is held no operation is started, no request is submitted or cancelled, and no message is built.
        self._lock = threading.Lock()
        self._reading = False
        self._state = StreamState(admission.options, max_in_flight, owner.unread.stream_limit)

    def start(self) -> None:
        """Watch for the client's cancellation and read the first request."""
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self.closed)
        self._read_on()

    def _read_on(self) -> None:
        """Read the next request, unless there is no room for it or a drain has ended the stream."""
        with self._lock:
            reads = self._reading = self._state.may_read
        if reads:
            self._read()

    def _read(self) -> None:
        self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self.received)

    def received(self, event: Any) -> None:
        """Submit the request that was read, and read on; or end the stream if there will be no more."""
        data = event.batch_operations[0].message()
        if data is None:
            self._half_close(None)
            return
        if self._authorization is not None:
            try:
                self._caller = self._authorization.refresh()
            except Exception as error:
                self._half_close(self._owner.status_of(error))
                return
        with self._lock:
            if self._state.ended:
                return
            entry = self._state.request_read(len(data))
        complete = partial(self._complete, entry)
        entry.call = self._owner.submit(
            data,
            self._deadline,
            complete,
            self._metadata,
            self._caller,
            stream=self.token,
            answers=partial(self._answer, entry),
            # Not earlier, because the next request must not overtake one that another thread unpacks.
            submitted=self._read_on,
        )

    def _half_close(self, refusal: Status | None) -> None:
        with self._lock:
            self._state.half_close(refusal)
            content = self._state.next_send()
        if content is not None:
            self._send(content)

    def _answer(self, entry: StreamEntry, reply: InferenceReply) -> Exception | None:
        nbytes = reply.output_bytes
        error = self._owner.unread.add(self._account, nbytes)
        if error is not None:
            return error
        with self._lock:
            wanted = self._state.answered(entry, reply, nbytes)
            content = self._state.next_send()
        if not wanted:
            self._owner.unread.remove(self._account, nbytes)
        if content is not None:
            self._send(content)
        return None

    def _complete(self, entry: StreamEntry, reply: InferenceReply) -> None:
        nbytes = reply.output_bytes
        error = self._owner.unread.add(self._account, nbytes)
        if error is None:
            entry.unread_bytes = nbytes
        else:
            reply.replace_with_error(error)
        with self._lock:
            self._state.completed(entry, reply, nbytes)
            content = self._state.next_send()
            reads = reply.silent and self._resumes_reading_locked()
        if reply.silent:
            reply.sent()
        if reads:
            self._read()
        if content is None:
            return
        collected = self._owner.response_batcher.this_thread.collected
        if collected is None:
            self._send(content)
        else:
            collected.append((nbytes, self._send, (content,)))

    def _send(self, content: StreamEntry | StreamEnd) -> None:
        """Send a response or the end of the stream."""
        if isinstance(content, StreamEnd):
            self._send_status(content.status)
            return
        self._sending, reply = content, content.reply
        assert reply is not None
        message = encode_or_status(reply, self._options, self._owner.status_of)
        if isinstance(message, Status):
            with self._lock:
                # `closed` follows, and withdraws what is in flight.
                self._state.end()
            self._send_status(message)
            return
        # Core writes responses that are ready together at once. Initial metadata is sent only once it is written.
        flags = cygrpc.MORE_FOLLOWS if content.followed and not self._opening else 0
        operations = (*self._opening, cygrpc.SendMessageOperation(message, flags))
        self._opening = ()
        self._call.start_server_batch(operations, self.sent)

    def sent(self, event: Any) -> None:
        """Send and read on: a response was sent. Without success the client has left, and `closed` is called too."""
        entry, self._sending = self._sending, None
        assert entry is not None
        self._owner.unread.remove(self._account, entry.unread_bytes)
        with self._lock:
            self._state.sent()
            reads = self._resumes_reading_locked()
            content = self._state.next_send() if event.success else None
        if reads:
            self._read()
        if content is not None:
            self._send(content)
        self._owner.sent(entry.reply)

    def _resumes_reading_locked(self) -> bool:
        """Return whether the caller must read on."""
        if self._reading or not self._state.may_read:
            return False
        self._reading = True
        return True

    def _send_status(self, status: Status | None) -> None:
        operations = (*self._opening, cygrpc.SEND_OK if status is None else cygrpc.send_status(status))
        self._opening = ()
        self._call.start_server_batch(operations, self.finished)

    def finished(self, event: Any) -> None:
        """Release the last reply: the status was sent. `closed` follows."""
        entry, self._sending = self._sending, None
        self._owner.sent(None if entry is None else entry.reply)

    def fail(self) -> None:
        """End the stream with INTERNAL after an unexpected exception. `closed` follows."""
        with self._lock:
            ended = self._state.ended
        if not ended:
            cygrpc.end(self._call, INTERNAL_ERROR)

    def drain(self) -> None:
        """End the stream with UNAVAILABLE once every request that was read is answered."""
        with self._lock:
            self._state.drain()
            content = self._state.next_send()
        if content is not None:
            self._send(content)

    def closed(self, event: Any) -> None:
        """Withdraw what is in flight: the call is over, or the client has left."""
        with self._lock:
            calls = self._state.end()
        self._owner.unread.close(self._account)
        self._owner.stream_ended(self)
        for call in calls:
            call.abandon()
