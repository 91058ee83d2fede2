"""One open ModelStreamInfer: the order of its responses, and how the threaded servicer serves it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grpc

from tensorferry.server.errors import cut
from tensorferry.server.identity import ANYONE
from tensorferry.server.inference.reply import Call, Metadata, Reply
from tensorferry.server.inference.responses import stream_error
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.security.access_control import Standing
from tensorferry.server.status import Status
from tensorferry.server.transport.unread_responses import Account, Unsent

_log = logging.getLogger("tensorferry.server")

# The name in a call's metadata by which it chooses the order of its responses.
STREAM_ORDER = "tensorferry-stream-order"
# With the value "true": the first error ends the stream with its status. The name is Triton's.
END_ON_ERROR = "triton_grpc_error"

# What a call is told amid which something unforeseen happened.
BROKEN = Status(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")

# The code of calls and streams that are one too many.
TOO_MANY = grpc.StatusCode.RESOURCE_EXHAUSTED

# What a stream is told for which the system gives no thread.
NO_THREAD = Status(
    TOO_MANY,
    "the server cannot start a thread for this stream; try again, or send unary calls, which wait for one",
)

# What a stream is told that a drain ends.
SHUTTING_DOWN = Status(grpc.StatusCode.UNAVAILABLE, "the server is shutting down; open a stream elsewhere")


class Terms(NamedTuple):
    """What a call wants of its stream: responses in request order, and the first error to be its end."""

    ordered: bool = True
    ends_on_error: bool = False


def terms_of(metadata: Metadata) -> Terms | Status:
    """What a call's metadata asks for; or the status where it is no order that there is."""
    given = dict(metadata)
    order = given.get(STREAM_ORDER, "request")
    if order in ("request", "completion"):
        return Terms(order == "request", ends_on_error=given.get(END_ON_ERROR) == "true")
    message = f"metadata {STREAM_ORDER} is {cut(str(order))!r}; it must be 'request' or 'completion'"
    return Status(grpc.StatusCode.INVALID_ARGUMENT, message)


def message_or_end(
    reply: Reply, terms: Terms, status_of: Callable[[BaseException, Reply], Status]
) -> bytes | Status:
    """The serialised ModelStreamInferResponse to send; or the status with which the stream ends."""
    try:
        return reply.stream_message()
    except BaseException as error:
        # SystemExit, too, would be lost on the way, and the response with it.
        status = status_of(error, reply)
    return status if terms.ends_on_error else stream_error(reply.request_id, reply.addressed, status)


def too_many_streams(most: int) -> Status:
    """What a stream is told that is one too many."""
    return Status(
        TOO_MANY,
        f"{most} streams are open, which is the most this server keeps; close one, or send several requests in one "
        "stream",
    )


class Slot:
    """A request's place in a stream, until its response is sent."""

    __slots__ = ("call", "reply")

    def __init__(self) -> None:
        self.call: Call | None = None
        self.reply: Reply | None = None


class Deliveries:
    """Which response of a stream may be sent next. Not thread-safe: its owner's lock guards it."""

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._slots: deque[Slot] = deque()  # in request order, those whose response is not yet taken
        self._done: deque[Slot] = deque()  # in the order of completion, likewise; only if not ordered

    def add(self) -> Slot:
        """A place for the request that was read last."""
        slot = Slot()
        self._slots.append(slot)
        return slot

    def done(self, slot: Slot, reply: Reply) -> None:
        """The request has its reply."""
        slot.reply = reply
        if not self._ordered:
            self._slots.remove(slot)
            self._done.append(slot)

    def pop(self) -> Reply | None:
        """Takes the next response that may be sent; None when there is none now."""
        if not self._ordered:
            return self._done.popleft().reply if self._done else None
        slots = self._slots
        return slots.popleft().reply if slots and slots[0].reply is not None else None

    def calls(self) -> list[Call]:
        """The calls that were not answered yet, or whose response was not taken."""
        return [slot.call for slot in (*self._slots, *self._done) if slot.call is not None]


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
        terms: Terms,
        max_in_flight: int,
        metadata: Metadata = (),
        standing: Standing | None = None,
        account: Account | None = None,
    ) -> None:
        self._account = account or Account(Unsent(), "", lambda error: None)
        self._service = service
        self._deadline = deadline
        self._terms = terms
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
        self._deliveries = Deliveries(ordered=terms.ordered)
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
                self._end = NO_THREAD
            return
        while (reply := self._next()) is not None:
            try:
                message = message_or_end(reply, self._terms, self._service.status_of)
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

    def _next(self) -> Reply | None:
        """The next response to send; None when there will be none."""
        with self._lock:
            while True:
                if self._closed:
                    return None
                if (reply := self._deliveries.pop()) is not None:
                    return reply
                if self._in_flight == 0 and (self._draining or not self._reading):
                    self._end = self._refusal or (SHUTTING_DOWN if self._reading else None)
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
                self._end = BROKEN
            self.close()
        finally:
            with self._lock:
                self._reading = False
                self._deliverable.notify()

    def _submit(self, data: bytes) -> bool:
        caller = ANYONE
        if self._standing is not None:
            try:
                caller = self._standing.renew()
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
            slot = self._deliveries.add()
        call = self._service.infer(
            data,
            self._deadline,
            lambda reply: self._complete(slot, reply),
            self._metadata,
            caller=caller,
        )
        with self._lock:
            slot.call = call
            left = self._closed
        if left:
            call.abandon()
        return True

    def _has_room_locked(self) -> bool:
        in_flight = self._in_flight
        return (
            in_flight < self._max_in_flight
            and in_flight * self._largest < self._account.unsent.most_of_stream
        )

    def _complete(self, slot: Slot, reply: Reply) -> None:
        nbytes = reply.nbytes
        error = self._account.add(nbytes)
        if error is not None:
            reply.refuse(error)
        with self._lock:
            self._largest = max(self._largest, nbytes)
            self._deliveries.done(slot, reply)
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
            calls = self._deliveries.calls()
            self._room.notify()
            self._deliverable.notify()
        self._account.close()
        for call in calls:
            call.abandon()
