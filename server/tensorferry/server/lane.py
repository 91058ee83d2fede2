"""The completion-queue lane: the two hot methods, ModelInfer and ModelStreamInfer, on grpc's core itself.

grpcio gives every call a thread and Python state of its own, which costs several times what
HTTP/2, protobuf and the batcher do together. The lane registers the two methods with the same
core server that the public `grpc.server` holds, so that ports, TLS, health, reflection and every
other method stay grpcio's, and its calls are events on the one thread that polls for grpcio
anyway. A unary call has two operation batches: one receives the message, one sends initial
metadata, message and status. The second is started by whoever completes the request; no thread
waits for an answer.

Whether the client has left costs a third batch to learn, so it is asked only for a call that has
waited for `_LISTEN_SECONDS`; one that is answered sooner would hardly have been cancelled.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import Any

import grpc

from tensorferry.protos import SERVICE_NAME
from tensorferry.server import grpc_core
from tensorferry.server.inference import Call, InferenceService, Reply
from tensorferry.server.lane_stream import StreamCall
from tensorferry.server.status import Status, status_of

_log = logging.getLogger("tensorferry.server")

UNARY = f"/{SERVICE_NAME}/ModelInfer"
STREAM = f"/{SERVICE_NAME}/ModelStreamInfer"

# Calls that core may hand out while the thread is busy; more only cost memory.
_STANDING_UNARY = 64
_STANDING_STREAMS = 8

_LISTEN_SECONDS = 0.02

# A deadline that is farther away than a year is none.
_LONGEST_SECONDS = 365 * 86400.0


class Lane:
    """Serves the two methods of a `grpc.server`. Made before the server is started, started after it.

    At most `max_streams` streams are open at a time; of each, at most `max_in_flight` requests
    are between being read and having their response sent.
    """

    def __init__(
        self, server: grpc.Server, service: InferenceService, *, max_streams: int, max_in_flight: int
    ) -> None:
        self.service = service
        self.max_in_flight = max_in_flight
        self._max_streams = max_streams
        self._core = grpc_core.Server(server)
        self._core.register(UNARY)
        self._core.register(STREAM)
        self._core.queue.prepare(self._listen_to_old, self._unforeseen)
        # Guards _streams, and `replied` and `listening` of every unary call. Nothing is started or
        # called while it is held.
        self.lock = threading.Lock()
        self._streams: set[StreamCall] = set()
        # The calls that wait for their replies, with the time since when, oldest first; some have
        # theirs by now. The polling thread's own.
        self._waiting: deque[tuple[float, UnaryCall]] = deque()

    def start(self) -> None:
        """Asks for calls. After the server was started."""
        for _ in range(_STANDING_UNARY):
            self._core.request(UNARY, self._unary_arrived)
        for _ in range(_STANDING_STREAMS):
            self._core.request(STREAM, self._stream_arrived)

    def begin_drain(self) -> None:
        """Open streams end, with UNAVAILABLE, once what they accepted is answered."""
        with self.lock:
            streams = list(self._streams)
        for stream in streams:
            stream.drain()

    def _unary_arrived(self, event: Any) -> None:
        if event.success:
            self._core.request(UNARY, self._unary_arrived)
            UnaryCall(self, event)

    def _stream_arrived(self, event: Any) -> None:
        if not event.success:
            return
        self._core.request(STREAM, self._stream_arrived)
        stream = StreamCall(self.service, event, deadline_of(event), self._forget, self.max_in_flight)
        with self.lock:
            full = len(self._streams) >= self._max_streams
            if not full:
                self._streams.add(stream)
        stream.start(self._max_streams if full else None)
        if self.service.draining:
            # It came too late for `begin_drain` to find it.
            stream.drain()

    def _forget(self, stream: StreamCall) -> None:
        with self.lock:
            self._streams.discard(stream)

    def wait(self, call: UnaryCall) -> None:
        """The call is yet to be answered. On the polling thread."""
        now = time.time()
        if not self._waiting:
            self._core.queue.due = now + _LISTEN_SECONDS
        self._waiting.append((now, call))

    def _listen_to_old(self, now: float) -> None:
        """Learns of the calls that have waited for long whether their clients leave."""
        waiting = self._waiting
        while waiting and (waiting[0][0] <= now - _LISTEN_SECONDS or waiting[0][1].replied):
            waiting.popleft()[1].listen()
        self._core.queue.due = waiting[0][0] + _LISTEN_SECONDS if waiting else math.inf

    @staticmethod
    def _unforeseen() -> None:
        _log.exception("unexpected error in the lane; this is a bug in tensorferry.server")


class UnaryCall:
    """One ModelInfer: its events come on the polling thread, its reply on any."""

    __slots__ = ("_call", "_deadline", "_handle", "_lane", "_metadata", "listening", "replied")

    def __init__(self, lane: Lane, event: Any) -> None:
        self._lane = lane
        self._call = event.call
        self._deadline = deadline_of(event)
        self._metadata = event.invocation_metadata
        self._handle: Call | None = None
        self.replied = self.listening = False
        self._call.start_server_batch((grpc_core.ReceiveMessageOperation(0),), self.received)

    def received(self, event: Any) -> None:
        """The message is there; or there will be none."""
        data = event.batch_operations[0].message()
        if data is None:
            # The client left, or sent what core has refused already: then this reaches nobody.
            message = f"{UNARY} requires exactly one request message"
            self._send(*_failure(Status(grpc.StatusCode.UNIMPLEMENTED, message)))
            return
        self._handle = self._lane.service.infer(data, self._deadline, self.reply, self._metadata)
        if not self.replied:
            self._lane.wait(self)

    def reply(self, reply: Reply) -> None:
        """Sends the response or the status. Called once, on any thread."""
        try:
            message = reply.message()
        except Exception as error:
            self._send(*_failure(status_of(error)))
        else:
            self._send(
                grpc_core.SEND_INITIAL_METADATA,
                grpc_core.SendMessageOperation(message, 0),
                grpc_core.SEND_OK,
            )

    def _send(self, *operations: Any) -> None:
        with self._lane.lock:
            self.replied = True
            listening = self.listening
        if not listening:
            # Somebody has to ask for the close once, or core takes the call for abandoned.
            operations = (*operations, grpc_core.ReceiveCloseOnServerOperation(0))
        self._call.start_server_batch(operations, self.ended)

    def ended(self, event: Any) -> None:
        """The response is on its way, or the client is not there any more."""

    def listen(self) -> None:
        """From now on the call hears of it when its client leaves, or has left."""
        with self._lane.lock:
            if self.replied:
                return
            self.listening = True
        self._call.start_server_batch((grpc_core.ReceiveCloseOnServerOperation(0),), self.closed)

    def closed(self, event: Any) -> None:
        """The call is over; if the client has left, its request is withdrawn."""
        if event.batch_operations[0].cancelled() and self._handle is not None:
            self._handle.cancel()


def _failure(status: Status) -> tuple[Any, ...]:
    return (grpc_core.SEND_INITIAL_METADATA, grpc_core.send_status(status))


def deadline_of(event: Any) -> float:
    """The deadline of a call that arrived, on the clock of `time.monotonic`; inf for none."""
    remaining: float = event.call_details.deadline - time.time()
    return time.monotonic() + remaining if remaining < _LONGEST_SECONDS else math.inf
