"""Request traces: times and outcome of a request, recorded once for all trace sources."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tensorferry.batcher import BatchInfo, StageOutcome
from tensorferry.server.identity import ANONYMOUS, ClientIdentity
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.observability.logs.trace_context import TraceContext
from tensorferry.server.status import Status

_log = logging.getLogger("tensorferry.server")


class TraceSink(Protocol):
    """Receiver of one request's trace. Each method is called once, in this order, perhaps on different threads.

    Methods must not block, because the responses of the whole batch wait for them.
    """

    @property
    def context(self) -> TraceContext | None:
        """Span that the sink creates for the request, if any."""

    def completed(self, trace: RequestTrace) -> None:
        """Receive the outcome, before the client gets it."""

    def ended(self, trace: RequestTrace) -> None:
        """Receive the end: the transport has accepted the response, or the client no longer waits for it."""


class TraceSource(Protocol):
    """Source of sinks, which decides the requests to trace. Thread-safe.

    `traces_calls` says whether it also traces requests that models' functions make, not only those of clients.
    """

    traces_calls: bool

    def sample(self, model: Model | None, parent: TraceContext | None) -> TraceSink | None:
        """Return a sink for a request, or None if it is not traced. `model` is None if it is unknown."""


@dataclass(slots=True, eq=False, repr=False)
class RequestTrace:
    """Trace of a request. Times are seconds of `time.monotonic`, or NaN for steps that did not happen.

    `started`: the message has arrived. `queued`: the batcher has received the request. `completed_at`: there is an
    outcome. `sent_at`: the transport has accepted the response. `batch`, `queue_delay` and `stages` belong to the outcome.
    `accepted`: the batcher has accepted the request. `streamed`: it came in a stream. `addressed`: name and version of
    its model, as far as known. `called_by` is the model whose function made the request, "" if a client did. `status` is None
    for a successful response.
    """

    sinks: Sequence[TraceSink]
    request_id: str
    started: float
    # The request's span, or else the caller's.
    context: TraceContext | None = None
    caller: ClientIdentity = ANONYMOUS
    streamed: bool = False
    called_by: str = ""
    addressed: tuple[str, str] = ("", "")
    accepted: bool = False
    rows: int = 0
    queued: float = math.nan
    completed_at: float = math.nan
    sent_at: float = math.nan
    queue_delay: float = 0.0
    batch: BatchInfo | None = None
    # Those that a pipeline's request has been in; empty for other models.
    stages: Sequence[StageOutcome] = ()
    error: type[BaseException] | None = None
    status: Status | None = None
    # Guards the fields below. Nothing is called while it is held.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _done: bool = False
    _abandoned: bool = False
    _ended: bool = False

    def enqueued(self, model: Model) -> None:
        """Record that a batcher receives the request. Called again if the model was replaced meanwhile."""
        self.addressed = model.name, model.version
        self.queued = time.monotonic()

    def completed(
        self,
        batch: BatchInfo | None,
        queue_delay: float,
        error: BaseException | None,
        status: Status | None,
        rows: int | None = None,
        stages: Sequence[StageOutcome] = (),
    ) -> None:
        """Record the outcome. Call this once, before the completion; `rows` if the batcher accepted the request."""
        if rows is not None:
            self.accepted, self.rows = True, rows
        self.completed_at = time.monotonic()
        self.batch = batch
        self.queue_delay = queue_delay
        self.stages = stages
        # Only the type, because the exception may reference the request.
        self.error = None if error is None else type(error)
        self.status = status
        for sink in self.sinks:
            self._notify(sink.completed)
        with self._lock:
            self._done = True
            abandoned = self._abandoned
        if abandoned:
            self._end(math.nan)

    def set_model(self, addressed: tuple[str, str]) -> None:
        """Record the name and version of the model, unless a model got the request already."""
        if not self.addressed[1]:
            self.addressed = addressed

    def sent(self) -> None:
        """Record that the transport has accepted the response. Only the first of several calls has an effect."""
        self._end(time.monotonic())

    def abandoned(self) -> None:
        """Record that the stream has ended without sending the response. The trace ends once it is completed."""
        self.streamed = True
        with self._lock:
            self._abandoned = True
            done = self._done
        if done:
            self._end(math.nan)

    def _end(self, sent_at: float) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self.sent_at = sent_at
        for sink in self.sinks:
            self._notify(sink.ended)

    def _notify(self, method: Callable[[RequestTrace], None]) -> None:
        try:
            method(self)
        except Exception:
            # The requests of the batch still need their responses.
            _log.exception("a request could not be traced; this is a bug in tensorferry.server")


class Tracer:
    """Factory of request traces for its sources. Thread-safe."""

    def __init__(self, sources: Sequence[TraceSource] = ()) -> None:
        # Without any, a request pays only for reading this attribute.
        self.sources: Sequence[TraceSource] = tuple(sources)

    def add(self, source: TraceSource) -> None:
        """Let a further source trace requests. Call this before requests arrive."""
        self.sources = (*self.sources, source)

    def begin(
        self,
        model: Model | None,
        request_id: str,
        started: float,
        parent: TraceContext | None,
        caller: ClientIdentity,
        *,
        streamed: bool = False,
        called_by: str = "",
    ) -> RequestTrace | None:
        """Return the trace of a request that arrived at `started`; None if no source traces it.

        `parent` is the caller's span, and `caller` the client. `streamed` says that it came in a stream. `called_by` is the
        model whose function makes the request; `parent` is then the span of the request for which the function runs.
        """
        sinks = [
            sink
            for source in self.sources
            if (source.traces_calls or not called_by) and (sink := source.sample(model, parent)) is not None
        ]
        if not sinks:
            return None
        own = next((sink.context for sink in sinks if sink.context is not None), parent)
        return RequestTrace(sinks, request_id, started, own, caller, streamed, called_by)
