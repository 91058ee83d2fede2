"""A request that is traced: its times, taken once for all who want them, and who these are."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tensorferry.batcher import BatchInfo
from tensorferry.server.identity import ANONYMOUS, ClientIdentity
from tensorferry.server.models.registry import Model
from tensorferry.server.status import Status
from tensorferry.server.telemetry.trace_context import TraceContext, parse_trace_context

_log = logging.getLogger("tensorferry.server")

_NAN = math.nan


class TraceSink(Protocol):
    """What a source makes of one request. Each method is called once, in this order, perhaps on two threads.

    Neither may block: the request's answer, and those of its neighbours, wait for it.
    """

    @property
    def context(self) -> TraceContext | None:
        """The span that the sink makes of the request, if it makes one."""

    def completed(self, trace: RequestTrace) -> None:
        """There is an answer, or an error, of which nobody has heard yet."""

    def ended(self, trace: RequestTrace) -> None:
        """The transport has taken the response; or nobody waits for it any more."""


class TraceSource(Protocol):
    """Something that wants requests traced. Thread-safe."""

    def sample(self, model: Model | None, parent: TraceContext | None) -> TraceSink | None:
        """Whether a request, of this model as far as it is known, is one to trace: then its sink."""


class RequestTrace:
    """A request on its way, in seconds on the clock of `time.monotonic`; NaN for what did not come about.

    `started` is when its message was there, `queued` when its batcher got it, `completed_at` when there was an
    outcome, `sent_at` when the transport had taken the response. `batch` and `queue_delay` are those of its outcome.
    `accepted` says that its batcher took it, `streamed` that it came in a stream, and
    `addressed` is the name and the version of its model, as far as they are known; `status` is None for an answer.
    """

    __slots__ = (
        "_abandoned",
        "_done",
        "_ended",
        "_lock",
        "_sinks",
        "accepted",
        "addressed",
        "batch",
        "caller",
        "completed_at",
        "context",
        "error",
        "queue_delay",
        "queued",
        "request_id",
        "rows",
        "sent_at",
        "started",
        "status",
        "streamed",
    )

    def __init__(
        self,
        sinks: Sequence[TraceSink],
        request_id: str,
        started: float,
        context: TraceContext | None = None,
        caller: ClientIdentity = ANONYMOUS,
    ) -> None:
        self._sinks = sinks
        self.request_id = request_id
        self.started = started
        # Of the span that stands for the request; else of its caller's.
        self.context = context
        self.caller = caller
        self.addressed = ("", "")
        self.accepted = self.streamed = False
        self.rows = 0
        self.queued = self.completed_at = self.sent_at = _NAN
        self.queue_delay = 0.0
        self.batch: BatchInfo | None = None
        self.error: type[BaseException] | None = None
        self.status: Status | None = None
        # Guards the three below. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._done = self._abandoned = self._ended = False

    def enqueued(self, model: Model) -> None:
        """Its batcher gets it now; or another's, where that was replaced."""
        self.addressed = model.name, model.version
        self.queued = time.monotonic()

    def completed(
        self,
        batch: BatchInfo | None,
        queue_delay: float,
        error: BaseException | None,
        status: Status | None,
        rows: int | None = None,
    ) -> None:
        """Record the outcome. Call this once, before the completion; `rows` if the batcher accepted the request."""
        if rows is not None:
            self.accepted, self.rows = True, rows
        self.completed_at = time.monotonic()
        self.batch = batch
        self.queue_delay = queue_delay
        # Not itself: it may hold the request.
        self.error = None if error is None else type(error)
        self.status = status
        for sink in self._sinks:
            self._told(sink.completed)
        with self._lock:
            self._done = True
            abandoned = self._abandoned
        if abandoned:
            self._end(_NAN)

    def set_model(self, addressed: tuple[str, str]) -> None:
        """Record the name and version of the model, unless a model got the request already."""
        if not self.addressed[1]:
            self.addressed = addressed

    def mark_streamed(self) -> None:
        """Record that the request came in a stream."""
        self.streamed = True

    def sent(self) -> None:
        """The transport has taken the response. Any number of calls, on any thread; the first counts."""
        self._end(time.monotonic())

    def abandoned(self) -> None:
        """Its stream is over, and does not send the response: once there is one, that is the end. As `sent`."""
        self.streamed = True
        with self._lock:
            self._abandoned = True
            done = self._done
        if done:
            self._end(_NAN)

    def _end(self, sent_at: float) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self.sent_at = sent_at
        for sink in self._sinks:
            self._told(sink.ended)

    def _told(self, tell: Callable[[RequestTrace], None]) -> None:
        try:
            tell(self)
        except Exception:
            # The request, and its neighbours, still wait for their answers.
            _log.exception("a request could not be traced; this is a bug in tensorferry.server")


class Tracer:
    """Who wants requests traced. Thread-safe."""

    def __init__(self, sources: Sequence[TraceSource] = ()) -> None:
        # Those who may want one now. All that a request pays for while there is none is a look at it.
        self.sources: Sequence[TraceSource] = tuple(sources)
        # Held while `sources` is replaced. Nothing is called meanwhile.
        self._lock = threading.Lock()

    def switch(self, source: TraceSource, *, on: bool) -> None:
        """From now on the source is asked, or is not."""
        with self._lock:
            others = tuple(other for other in self.sources if other is not source)
            self.sources = (*others, source) if on else others

    def begin(
        self,
        model: Model | None,
        request_id: str,
        started: float,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        caller: ClientIdentity = ANONYMOUS,
    ) -> RequestTrace | None:
        """The trace of a request that arrived at `started`; None if nobody wants one."""
        parent = parse_trace_context(metadata)
        sinks: list[TraceSink] | None = None
        for source in self.sources:
            sink = source.sample(model, parent)
            if sink is not None:
                sinks = [sink] if sinks is None else [*sinks, sink]
        if sinks is None:
            return None
        own = next((sink.context for sink in sinks if sink.context is not None), parent)
        return RequestTrace(sinks, request_id, started, own, caller)
