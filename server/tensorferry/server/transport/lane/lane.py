"""The completion-queue lane: the two hot methods, ModelInfer and ModelStreamInfer, on grpc's core itself.

grpcio gives every call a thread and Python state of its own, which costs several times what
HTTP/2, protobuf and the batcher do together. The lane registers the two methods with the same
core server that the public `grpc.server` holds, so that ports, TLS, health, reflection and every
other method stay grpcio's, and its calls are events on the one thread that polls for grpcio
anyway. A unary call has two operation batches: one receives the message, one sends initial
metadata, message and status. The second is started by whoever completes the request; no thread
waits for an answer.

Whether the client has left costs a third batch to learn, so it is asked only for a call that has
waited for `_WATCH_AFTER_SECONDS`, or up to twice that; one that is answered sooner would hardly have been
cancelled.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from types import MethodType
from typing import Any

import grpc

from tensorferry.batcher import Batcher, QueueFull
from tensorferry.protos import SERVICE_NAME
from tensorferry.server.identity import ClientIdentity
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.inference.stream_order import TOO_MANY
from tensorferry.server.security.access_control import AccessControl
from tensorferry.server.status import INTERNAL_ERROR, Status
from tensorferry.server.transport.call_admission import NEVER, CallAdmission, deadline_of
from tensorferry.server.transport.calls_in_progress import Until
from tensorferry.server.transport.lane import cygrpc
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher
from tensorferry.server.transport.lane.stream import StreamCall
from tensorferry.server.transport.lane.unpacking import Unpacker
from tensorferry.server.transport.lane.unread_responses import hold
from tensorferry.server.transport.unread_responses import SMALL_BYTES, ResponseAccount, UnreadResponses
from tensorferry.server.wire.compression import is_compressed

_log = logging.getLogger("tensorferry.server")

UNARY = f"/{SERVICE_NAME}/ModelInfer"
STREAM = f"/{SERVICE_NAME}/ModelStreamInfer"

# Calls that core may hand out while the thread is busy; more only cost memory.
_POSTED_UNARY_ACCEPTS = 64
_POSTED_STREAM_ACCEPTS = 8

_WATCH_AFTER_SECONDS = 0.01

# A batch that keeps the device no longer than this is run by the thread that polls: to wake a worker
# for it would take about as long, and the two would fight for the interpreter.
_INLINE_RUN_SECONDS = 200e-6

# A shorter rest would save nothing; and where batches are so short, that thread runs them.
_MIN_PAUSE_SECONDS = 200e-6

# After so many seconds it is tried again to ask for calls, should that have failed.
_REQUEST_AGAIN_SECONDS = 0.1

# Nothing that this waits for is so far away, but after the clock was put back.
_MAX_WAIT_SECONDS = 5.0


class Lane:
    """Serves the two methods of a `grpc.server`. Made before the server is started, started after it.

    At most `max_streams` streams are open at a time; of each, at most `max_in_flight` requests
    are between being read and having their response sent. At most `max_calls` unary calls are in
    progress. `unpackers` unpack what is compressed; without them the polling thread does.
    """

    def __init__(
        self,
        server: grpc.Server,
        service: InferenceService,
        *,
        max_streams: int,
        max_in_flight: int,
        max_calls: int = 1 << 62,
        response_batcher: ResponseBatcher | None = None,
        access: AccessControl | None = None,
        unread: UnreadResponses | None = None,
        unpackers: Executor | None = None,
    ) -> None:
        self._service = service
        self._unpacker = None if unpackers is None else Unpacker(service.submit, unpackers)
        self.unread = unread or UnreadResponses()
        self._admission = CallAdmission(service, access, max_calls, self._pause_after, self.unread)
        self.response_batcher = response_batcher or ResponseBatcher()
        self.max_in_flight = max_in_flight
        self._max_streams = max_streams
        # Unary calls in progress, their messages perhaps yet to come; the polling thread's own.
        self.calls = 0
        self._core = cygrpc.Server(server)
        self._core.register(UNARY)
        self._core.register(STREAM)
        self._core.queue.configure(self._on_wakeup, self._on_crash)
        # Guards _streams, and `replied` and `watching` of every unary call. Nothing is started or
        # called while it is held.
        self.lock = threading.Lock()
        self._streams: set[StreamCall] = set()
        self._until_over = Until(lambda: not (self.calls or self.open_streams))
        self.draining = False
        # Whether the response_batcher knows which thread polls.
        self._polls = False
        # Calls that had to wait for their replies, of the last `_WATCH_AFTER_SECONDS` and of those before;
        # most have theirs by now. The polling thread's own.
        self._recent_calls: list[UnaryCall] = []
        self._older_calls: list[UnaryCall] = []
        self._watch_cancel_at = math.inf
        # Likewise: batchers that were given requests since the last look, and when to look again at
        # those that wait for callers to come back (seconds since the epoch).
        self._unattended: set[Batcher] = set()
        self._next_run: dict[Batcher, float] = {}
        # For how long to rest once nothing more is there, in seconds; and for how long the calls that come may have waited
        # for a rest to end.
        self._pause = self._last_pause = 0.0
        # Calls that could not be asked for.
        self._unrequested: list[tuple[str, Callable[[Any], None]]] = []

    def start(self) -> None:
        """Asks for calls. After the server was started."""
        for _ in range(_POSTED_UNARY_ACCEPTS):
            self._core.request(UNARY, self._unary_arrived)
        for _ in range(_POSTED_STREAM_ACCEPTS):
            self._core.request(STREAM, self._stream_arrived)

    def begin_drain(self) -> None:
        """Open streams end, with UNAVAILABLE, once what they accepted is answered."""
        self.draining = True
        with self.lock:
            streams = list(self._streams)
        for stream in streams:
            stream.drain()

    def wait_until_over(self, timeout: float) -> bool:
        """Wait until no call and no stream is open, after `begin_drain`; false if some are after `timeout` seconds."""
        return self._until_over.wait(timeout)

    def over(self) -> None:
        """A call or a stream has ended, and the server drains."""
        self._until_over.changed()

    def _unary_arrived(self, event: Any) -> None:
        if event.success:
            if not self._polls:
                self.response_batcher.bind_polling_thread()
                self._polls = True
            try:
                self._core.request(UNARY, self._unary_arrived)
            except BaseException:
                self._unrequested.append((UNARY, self._unary_arrived))
                raise
            if self.response_batcher.handovers:
                # In an overload many come at once, and the device stands still until these are sent.
                self.response_batcher.flush()
            deadline = math.inf
            if event.call_details.deadline <= NEVER:
                # A call says how long it has, and core counts from when it is taken in: its client, from when it was sent.
                deadline = deadline_of(event) - self._last_pause
            caller = self._admission.admit_unary(event, deadline, self.calls)
            if isinstance(caller, cygrpc.FinalStatus):
                # The message is not even read, and core keeps nothing of ours but what keeps the call.
                self._turn_away(event.call, caller)
            else:
                UnaryCall(self, event, deadline, caller)

    def _turn_away(self, call: Any, ending: cygrpc.FinalStatus) -> None:
        operations = (
            cygrpc.SEND_INITIAL_METADATA,
            cygrpc.send_final_status(ending),
            cygrpc.IGNORE_CLOSE,
        )
        call.start_server_batch(operations, MethodType(_turned_away, call))

    def _stream_arrived(self, event: Any) -> None:
        if not event.success:
            return
        self.response_batcher.bind_polling_thread()
        try:
            self._core.request(STREAM, self._stream_arrived)
        except BaseException:
            self._unrequested.append((STREAM, self._stream_arrived))
            raise
        standing = self._admission.admit_stream(event)
        refusal = None
        if isinstance(standing, Status):
            refusal, standing = standing, None
        stream = StreamCall(self, event, deadline_of(event), self.max_in_flight, standing)
        with self.lock:
            full = len(self._streams) >= self._max_streams
            if refusal is None and not full:
                self._streams.add(stream)
        if refusal is None and full:
            self._service.count_refused(TOO_MANY)
        try:
            stream.start(refusal, self._max_streams if full else None)
        except BaseException:
            # `closed`, which forgets the stream, may never be called.
            self.forget(stream)
            raise
        if self._service.draining:
            # It came too late for `begin_drain` to find it.
            stream.drain()

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        with self.lock:
            return len(self._streams)

    def forget(self, stream: StreamCall) -> None:
        """The stream is over."""
        with self.lock:
            self._streams.discard(stream)
        if self.draining:
            self.over()

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Any,
        caller: ClientIdentity,
    ) -> InferenceCall:
        """As the service's. On the polling thread, which attends to the batcher when nothing else is there."""
        if self._unpacker is not None and is_compressed(data):
            return self._unpacker.submit(data, deadline, complete, metadata, caller)
        call = self._service.submit(data, deadline, complete, metadata, self._unattended, caller)
        if self._unattended:
            self._core.queue.next_wakeup = 0.0
        return call

    def status_of(self, error: BaseException, reply: InferenceReply | None = None) -> Status:
        """As the service's. Who is turned away in an overload may be one of many: then the thread that polls rests a while.

        But not where it has calls of several models, of which one may have no queue.
        """
        if (
            isinstance(error, QueueFull)
            and self.response_batcher.is_polling
            and self._service.early_rejection.only_batcher() is not None
        ):
            self._pause_after(error)
        return self._service.status_of(error, reply)

    def _pause_after(self, refusal: QueueFull) -> None:
        if refusal.pause_seconds >= _MIN_PAUSE_SECONDS:
            if not self._pause:
                self.response_batcher.begin_coalescing()
            self._pause = refusal.pause_seconds
            self._core.queue.next_wakeup = 0.0

    def sent(self, reply: InferenceReply | None) -> None:
        """The reply is on its way, or another end of a call. On the polling thread."""
        if self.response_batcher.handovers:
            self.response_batcher.flush()
        if reply is None:
            return
        if reply.trace is not None:
            reply.trace.sent()
        batcher = reply.needs_run
        if batcher is not None:
            self._unattended.add(batcher)
            self._core.queue.next_wakeup = 0.0

    def wait(self, call: UnaryCall) -> None:
        """The call is yet to be answered. On the polling thread."""
        self._recent_calls.append(call)
        if self._watch_cancel_at == math.inf:
            self._watch_cancel_at = time.time() + _WATCH_AFTER_SECONDS
            self._core.queue.next_wakeup = min(self._core.queue.next_wakeup, self._watch_cancel_at)

    def _on_wakeup(self, now: float) -> float:
        while self._unrequested:
            self._core.request(*self._unrequested[-1])
            self._unrequested.pop()
        for batcher, when in list(self._next_run.items()):
            if when <= now or when > now + _MAX_WAIT_SECONDS:
                del self._next_run[batcher]
                self._unattended.add(batcher)
        while self._unattended:
            batcher = self._unattended.pop()
            again = batcher.run_inline(_INLINE_RUN_SECONDS)
            if again < math.inf:
                self._next_run[batcher] = time.time() + again - time.monotonic()
        if now >= self._watch_cancel_at or now + _MAX_WAIT_SECONDS < self._watch_cancel_at < math.inf:
            for call in self._older_calls:
                # Most have been answered long since.
                if not call.replied:
                    call.watch_for_cancel()
            self._older_calls, self._recent_calls = self._recent_calls, []
            self._watch_cancel_at = now + _WATCH_AFTER_SECONDS if self._older_calls else math.inf
        if self._core.queue.idle:
            self._last_pause = 0.0
        if self._pause:
            if not self._core.queue.idle:
                return 0.0
            # All that is there has been handled. Each call that comes alone wakes the thread, which then finds the caches
            # full of the model's: several at once cost a fraction of that, and there is nothing that could leave meanwhile.
            self._last_pause, self._pause = self._pause, 0.0
            self.response_batcher.pause(self._last_pause)
            # Again as soon as what came meanwhile is handled.
            return 0.0
        return min([self._watch_cancel_at, *self._next_run.values()])

    def _on_crash(self, tag: Any) -> None:
        """An event was not handled to its end: whoever waits for that is told, and the thread goes on."""
        _log.exception("unexpected error in the lane; this is a bug in tensorferry.server")
        if self._unrequested:
            self._core.queue.next_wakeup = min(
                self._core.queue.next_wakeup, time.time() + _REQUEST_AGAIN_SECONDS
            )
        call = getattr(tag, "__self__", None)
        if isinstance(call, (UnaryCall, StreamCall)):
            try:
                call.fail()
            except BaseException:
                _log.exception("a call could not be ended; it ends when its client leaves")


def _turned_away(call: Any, event: Any) -> None:
    """The call has its status: nothing is left to do, but that it had to be kept until now."""


class UnaryCall:
    """One ModelInfer: its events come on the polling thread, its reply on any."""

    __slots__ = (
        "_account",
        "_call",
        "_caller",
        "_deadline",
        "_handle",
        "_lane",
        "_metadata",
        "_reply",
        "replied",
        "watching",
    )

    def __init__(self, lane: Lane, event: Any, deadline: float, caller: ClientIdentity) -> None:
        self._lane = lane
        self._call = event.call
        self._caller = caller
        self._deadline = deadline
        self._metadata = event.invocation_metadata
        self._handle: InferenceCall | None = None
        self._reply: InferenceReply | None = None
        self._account: ResponseAccount | None = None
        self.replied = self.watching = False
        self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self.received)
        # Last, because `ended` is called only for a call that was started.
        lane.calls += 1

    def received(self, event: Any) -> None:
        """The message is there; or there will be none."""
        data = event.batch_operations[0].message()
        if data is None:
            # The client left, or sent what core has refused already: then this reaches nobody.
            message = f"{UNARY} requires exactly one request message"
            status = Status(grpc.StatusCode.UNIMPLEMENTED, message)
            self._send((cygrpc.SEND_INITIAL_METADATA, cygrpc.send_status(status)))
            return
        self._handle = self._lane.submit(data, self._deadline, self.reply, self._metadata, self._caller)
        if not self.replied:
            self._lane.wait(self)

    def reply(self, reply: InferenceReply) -> None:
        """Sends the response or the status, or has them sent. Called once, on any thread."""
        self._reply = reply
        self._lane.response_batcher.send(self.deliver)

    def deliver(self) -> None:
        """Sends what became of the request. Called once, on any thread."""
        reply = self._reply
        assert reply is not None
        try:
            data = reply.message()
            if len(data) > SMALL_BYTES:
                self._account = hold(self._lane.unread, self._call, reply, len(data))
        except BaseException as error:
            self._send((cygrpc.SEND_INITIAL_METADATA, cygrpc.send_status(self._lane.status_of(error, reply))))
        else:
            message = cygrpc.SendMessageOperation(data, 0)
            self._send((cygrpc.SEND_INITIAL_METADATA, message, cygrpc.SEND_OK))
            self._lane.response_batcher.sent(len(data))

    def _send(self, operations: tuple[Any, ...]) -> None:
        with self._lane.lock:
            self.replied = True
            watching = self.watching
        if not watching:
            # Somebody has to ask for the close once, or core takes the call for abandoned.
            operations = (*operations, cygrpc.IGNORE_CLOSE)
        self._call.start_server_batch(operations, self.ended)

    def fail(self) -> None:
        """An event of the call was not handled to its end: nobody else may ever tell its client."""
        if self._call is not None and self._handle is None and not self.replied:
            self._send((cygrpc.SEND_INITIAL_METADATA, cygrpc.send_status(INTERNAL_ERROR)))

    def ended(self, event: Any) -> None:
        """The response is on its way, or the client is not there any more."""
        # This object is kept until it is seen not to wait, but nothing that it holds: above all not
        # core's call, whose memory is best used again while it is in the cache.
        reply, self._reply, self._handle = self._reply, None, None
        self._call = self._metadata = None
        if self._account is not None:
            self._account.close()
        self._lane.calls -= 1
        if self._lane.draining:
            self._lane.over()
        self._lane.sent(reply)

    def watch_for_cancel(self) -> None:
        """From now on the call hears of it when its client leaves, or has left."""
        with self._lane.lock:
            if self.replied:
                return
            self.watching = True
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self.closed)

    def closed(self, event: Any) -> None:
        """The call is over; if the client has left, its request is withdrawn."""
        if event.batch_operations[0].cancelled() and self._handle is not None:
            self._handle.cancel()
