"""The completion-queue lane: ModelInfer and ModelStreamInfer on grpc's core itself.

grpcio gives every call a thread and Python objects of its own, which cost several times what HTTP/2, protobuf and the
batcher cost together. The lane registers the two methods with the core server of the public `grpc.server`. So ports,
TLS, health, reflection and all other methods stay grpcio's. The lane's calls are events on grpcio's one polling
thread, and no thread waits for a reply.

Watching for a client's cancellation costs a third batch of operations. So it is started only for a call that has
waited for `_WATCH_AFTER_SECONDS`, or up to twice as long; a faster call is rarely cancelled.
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

from tensorferry.batcher import Cancelled, QueueFull
from tensorferry.protos import SERVICE_NAME
from tensorferry.server.identity import ClientIdentity, Metadata
from tensorferry.server.inference.reply import (
    MAX_INLINE_SECONDS,
    InferenceCall,
    InferenceReply,
    InlineRunner,
    LaterCall,
    TakeAnswer,
    error_reply,
)
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.status import Status
from tensorferry.server.transport.call_admission import CallAdmission, Refusal, deadline_after
from tensorferry.server.transport.inline_schedule import InlineSchedule
from tensorferry.server.transport.lane import cygrpc
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher
from tensorferry.server.transport.lane.stream import StreamCall
from tensorferry.server.transport.lane.unary import UNARY, UnaryCall
from tensorferry.server.transport.stream_registry import StreamRegistry
from tensorferry.server.transport.transport_state import TransportState
from tensorferry.server.wire.receiving import is_compressed

_log = logging.getLogger("tensorferry.server")

STREAM = f"/{SERVICE_NAME}/ModelStreamInfer"

# Calls that core may accept while the polling thread is busy. More would only use memory.
_POSTED_UNARY_ACCEPTS = 64
_POSTED_STREAM_ACCEPTS = 8

_WATCH_AFTER_SECONDS = 0.01

# A shorter pause saves nothing, because the polling thread itself runs batches that short.
_MIN_PAUSE_SECONDS = MAX_INLINE_SECONDS

# Delay before requesting calls again after core has failed to take the request.
_RETRY_ACCEPT_SECONDS = 0.1

# Every wake-up is due sooner, unless the system clock was set back.
_MAX_WAIT_SECONDS = 5.0


class Lane:
    """Serves ModelInfer and ModelStreamInfer of a `grpc.server`. Construct it before the server starts, then `start` it.

    `shared` is that of all transports. At most `max_streams` streams are open, with at most `max_in_flight` requests per
    stream. `unpackers` decompress messages; without them the polling thread does. `streams` may be used on any thread, the
    rest on the polling thread.
    """

    def __init__(
        self,
        server: grpc.Server,
        service: InferenceService,
        shared: TransportState,
        *,
        max_streams: int,
        max_in_flight: int,
        response_batcher: ResponseBatcher | None = None,
        unpackers: Executor | None = None,
    ) -> None:
        self._service = service
        self._unpackers = unpackers
        self.unread = shared.unread
        self.admission: CallAdmission[Any] = CallAdmission(
            service, shared, peer_of=cygrpc.peer_of, certificate_of=cygrpc.certificate_of
        )
        self.response_batcher = response_batcher or ResponseBatcher()
        self._max_in_flight = max_in_flight
        self.streams = StreamRegistry(max_streams, service.count_refused)
        self._core = cygrpc.Server(server)
        self._core.register(UNARY)
        self._core.register(STREAM)
        self._core.queue.configure(self._on_first_wakeup, self._on_crash)
        self._core.queue.next_wakeup = 0.0
        # Guards `replied` and `watches_cancel` of every unary call. Nothing is started or called while it is held.
        self.lock = threading.Lock()
        # All fields below belong to the polling thread.
        # Calls to request in place of those that arrived. The wake-up that follows requests them, after its batches.
        self._unrequested: list[tuple[str, Callable[[Any], None]]] = []
        self._inline = InlineSchedule()
        # The last refusal as core takes it; in an overload most are the same.
        self._refusal: Refusal | None = None
        self._final_status: cygrpc.FinalStatus | None = None
        # Calls that arrived in the last `_WATCH_AFTER_SECONDS`, and those before. Most have a reply by now.
        self._recent_calls: list[UnaryCall] = []
        self._older_calls: list[UnaryCall] = []
        self._watch_cancel_at = math.inf
        # In seconds: the pause to make once no event is left, and the last pause, which arriving calls may have waited.
        self._pause = self._last_pause = 0.0

    def start(self) -> None:
        """Accept calls. The server must have been started."""
        self._core.request([(UNARY, self._unary_arrived)] * _POSTED_UNARY_ACCEPTS)
        self._core.request([(STREAM, self._stream_arrived)] * _POSTED_STREAM_ACCEPTS)

    def _unary_arrived(self, event: Any) -> None:
        if not event.success:
            return
        self._unrequested.append((UNARY, self._unary_arrived))
        self._core.queue.next_wakeup = 0.0
        if self.response_batcher.handovers:
            # In an overload many calls arrive at once, and the device is idle until these responses are sent.
            self.response_batcher.flush()
        # A call states how much time it has left. Core counts from its arrival, the client from when it was sent.
        now = time.time()
        remaining = event.call_details.deadline - now - self._last_pause
        admitted, deadline = self.admission.admit_unary(event.call, event.invocation_metadata, remaining)
        if isinstance(admitted, Refusal):
            if admitted.queue_full is not None:
                self._pause_after(admitted.queue_full)
            self._refuse(event.call, admitted)
            return
        try:
            call = UnaryCall(self, event, deadline, admitted)
        except BaseException:
            self.admission.calls.end_unary()
            raise
        self._recent_calls.append(call)

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata,
        caller: ClientIdentity,
        *,
        stream: object = None,
        answers: TakeAnswer | None = None,
        submitted: Callable[[], None] = lambda: None,
    ) -> InferenceCall:
        """See `InferenceService.submit`. Short batches run on the polling thread when no event is left.

        `submitted` is called once the service has the request. For a compressed one this is later, on another thread, which
        does not unpack it if it is withdrawn before.
        """
        if self._unpackers is None or not is_compressed(data):
            call = self._service.submit(
                data,
                deadline,
                complete,
                metadata,
                caller,
                stream=stream,
                answers=answers,
                run_soon=self._run_soon,
            )
            submitted()
            return call
        pending = LaterCall()

        def unpack() -> None:
            try:
                if pending.withdrawn:
                    left = Cancelled("the caller left before its message was unpacked")
                    complete(error_reply("", left, ("", ""), metadata))
                    return
                call = self._service.submit(
                    data, deadline, complete, metadata, caller, stream=stream, answers=answers
                )
                pending.submitted(call)
            except Exception as error:
                _log.exception(
                    "a compressed request could not be served; this is a bug in tensorferry.server"
                )
                complete(error_reply("", error, ("", ""), metadata))
            finally:
                submitted()

        try:
            # Decompressing and checking take up to 30 ms, which would delay every other call.
            self._unpackers.submit(unpack)
        except RuntimeError:
            # The threads are shut down.
            unpack()
        return pending

    def _run_soon(self, batcher: InlineRunner) -> None:
        """Run the batcher's next batch once the waiting events are handled."""
        self._inline.run_soon(batcher)
        self._core.queue.next_wakeup = 0.0

    def _stream_arrived(self, event: Any) -> None:
        if not event.success:
            return
        self._unrequested.append((STREAM, self._stream_arrived))
        self._core.queue.next_wakeup = 0.0
        admitted = self.admission.admit_stream(event.call, event.invocation_metadata)
        if isinstance(admitted, Refusal):
            self._refuse(event.call, admitted)
            return
        deadline = deadline_after(event.call_details.deadline - time.time())
        stream = StreamCall(self, event, deadline, admitted, self._max_in_flight)
        self.admission.calls.begin_stream()
        refusal = self.streams.register(stream)
        if refusal is not None:
            self.admission.calls.end_stream()
            self._refuse(event.call, Refusal(refusal))
            return
        try:
            stream.start()
        except BaseException:
            # `closed`, which would end the count, may never be called.
            self.stream_ended(stream)
            raise

    def _refuse(self, call: Any, refusal: Refusal) -> None:
        """End a call without reading its message. Core keeps nothing of ours but the reference that keeps the call."""
        if refusal is not self._refusal or self._final_status is None:
            self._refusal, self._final_status = refusal, cygrpc.final_status(refusal.status)
        send_status = cygrpc.send_final_status(self._final_status)
        operations = (cygrpc.SEND_INITIAL_METADATA, send_status, cygrpc.IGNORE_CLOSE)
        call.start_server_batch(operations, MethodType(_refused, call))

    def stream_ended(self, stream: StreamCall) -> None:
        """Stop counting a stream, and end its sequences. Idempotent."""
        if self.streams.unregister(stream):
            self.admission.calls.end_stream()
            self._service.end_stream(stream.token)

    def status_of(self, error: BaseException, reply: InferenceReply | None = None) -> Status:
        """See `InferenceService.status_of`. If the queue of the only model is full, the polling thread pauses.

        With several models it does not pause, because another model may have no queue.
        """
        if (
            isinstance(error, QueueFull)
            and self.response_batcher.this_thread.polls
            and self._service.one_model
        ):
            self._pause_after(error)
        return self._service.status_of(error, reply)

    def _pause_after(self, queue_full: QueueFull) -> None:
        if queue_full.pause_seconds >= _MIN_PAUSE_SECONDS:
            if not self._pause:
                self.response_batcher.begin_coalescing()
            self._pause = queue_full.pause_seconds
            self._core.queue.next_wakeup = 0.0

    def sent(self, reply: InferenceReply | None) -> None:
        """Record that a reply, or another end of a call, was sent."""
        if self.response_batcher.handovers:
            self.response_batcher.flush()
        if reply is not None:
            reply.sent()

    def _on_first_wakeup(self, now: float) -> float:
        self.response_batcher.bind_polling_thread()
        self._core.queue.configure(self._on_wakeup, self._on_crash)
        return self._on_wakeup(now)

    def _on_wakeup(self, now: float) -> float:
        """Do what is due; return when to call this again. Both times are seconds since the epoch."""
        run_again_at = self._inline.run_due() + time.time()
        if self._unrequested:
            self._core.request(self._unrequested)
        if now >= self._watch_cancel_at or now + _MAX_WAIT_SECONDS < self._watch_cancel_at < math.inf:
            for call in self._older_calls:
                if not call.replied:
                    call.watch_for_cancel()
            self._older_calls, self._recent_calls = self._recent_calls, []
            self._watch_cancel_at = now + _WATCH_AFTER_SECONDS if self._older_calls else math.inf
        elif self._recent_calls:
            self._watch_cancel_at = min(self._watch_cancel_at, now + _WATCH_AFTER_SECONDS)
        if self._core.queue.idle:
            self._last_pause = 0.0
        if not self._pause:
            return min(self._watch_cancel_at, run_again_at)
        if self._core.queue.idle:
            # Each call that arrives alone wakes this thread, which finds the caches full of the model's data. Several
            # calls at once cost a fraction of that, and no response is ready before the pause ends.
            self._last_pause, self._pause = self._pause, 0.0
            self.response_batcher.pause(self._last_pause)
        # Call again as soon as the events that are there are handled.
        return 0.0

    def _on_crash(self, tag: Any) -> None:
        """Log an unexpected exception of an event and end its call."""
        _log.exception("unexpected error in the lane; this is a bug in tensorferry.server")
        if self._unrequested:
            self._core.queue.next_wakeup = min(
                self._core.queue.next_wakeup, time.time() + _RETRY_ACCEPT_SECONDS
            )
        call = getattr(tag, "__self__", None)
        if isinstance(call, (UnaryCall, StreamCall)):
            try:
                call.fail()
            except BaseException:
                _log.exception("a call could not be ended; it ends when its client leaves")


def _refused(call: Any, event: Any) -> None:
    """Do nothing: this tag has kept the call until its status was sent."""
