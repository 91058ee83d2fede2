"""OpenTelemetry spans of requests and batches.

A request has a span of kind server, with a child for each stage: decode, queue, batch and respond. In a pipeline, each
of its stages has a child with a queue and a batch of its own. The steps of a batch are children of `batch`. A request
that a model's function makes has a span of kind internal, below that of the request for which the function runs.

A batch has a span in a trace of its own, because it has several parents. It links to the spans of its requests, as in
OpenTelemetry's messaging conventions for batches, and the span `batch` of each request links back.

Spans are created when a request ends, from the times in its trace, so an unsampled request costs nothing.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

from tensorferry.batcher import BatchInfo, ResponseBurstHook, StageOutcome
from tensorferry.protos import SERVICE_NAME
from tensorferry.server.identity import ANONYMOUS
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.observability.logs.trace_context import TraceContext
from tensorferry.server.observability.tracing.trace import RequestTrace

_log = logging.getLogger("tensorferry.server")

# Function from the caller's span to the trace id of a sampled request; None if it is not sampled.
Sampler: TypeAlias = Callable[[TraceContext | None], int | None]

_FLAGS = TraceFlags(TraceFlags.SAMPLED)

# Codes that the conventions for RPC count as errors of the server. Others are errors of clients, or none.
_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})

# Limit for text of clients in a span.
_MAX_QUOTED = 128

# Number of batches whose span ids are kept, for requests that were split over several batches.
_MAX_BATCHES = 256


@dataclass(slots=True)
class _BatchSpan:
    """Span of a batch: its context, and links to its requests' spans (the latest, up to the SDK's limit).

    `stage` is the stage of a pipeline that it ran in; empty for other models.
    """

    info: BatchInfo
    model: tuple[str, str]
    stage: str
    context: SpanContext
    links: BoundedList[Link] = field(repr=False)


class _Answered(threading.local):
    """The batches whose responses a thread sends, for each `begin` without an `end`."""

    def __init__(self) -> None:
        self.batches: list[list[_BatchSpan]] = []


class OpenTelemetrySource:
    """Sampling of requests, and export of their spans to a processor. Implements `TraceSource` and `ResponseBurstHook`. Thread-safe.

    It wraps the transport's `ResponseBurstHook`: a batch's span is complete once all its responses have been sent.
    """

    traces_calls = True

    def __init__(
        self,
        processor: SpanProcessor,
        sampler: Sampler,
        resource: Resource,
        limits: SpanLimits,
        version: str,
        response_hook: ResponseBurstHook,
    ) -> None:
        self._processor = processor
        self._sampler = sampler
        self._resource = resource
        self._scope = InstrumentationScope("tensorferry", version)
        self._max_links = limits.max_links
        self._response_hook = response_hook
        self._new_id = random.Random(random.SystemRandom().getrandbits(64)).getrandbits
        # Guards _batches and the links of each. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._batches: OrderedDict[int, _BatchSpan] = OrderedDict()
        self._answered = _Answered()

    def sample(self, model: Model | None, parent: TraceContext | None) -> RequestSpans | None:
        """See `TraceSource.sample`."""
        trace_id = self._sampler(parent)
        return None if trace_id is None else RequestSpans(self, trace_id, self.new_span_id(), parent)

    def begin(self, count: int) -> None:
        """See `ResponseBurstHook.begin`."""
        self._answered.batches.append([])
        self._response_hook.begin(count)

    def end(self) -> None:
        """See `ResponseBurstHook.end`."""
        self._response_hook.end()
        for batch in self._answered.batches.pop():
            self._emit_batch(batch)

    def new_span_id(self) -> int:
        """Return a random span id. 0 is invalid."""
        return self._new_id(64) or 1

    def add_to_batch(
        self, info: BatchInfo, trace: RequestTrace, span: SpanContext, stage: str = ""
    ) -> SpanContext:
        """Link a request's span to its batch's span, and return the latter. Called by the thread that sends the response."""
        with self._lock:
            batch = self._batches.get(id(info))
            first = batch is None
            if batch is None:
                context = SpanContext(self._new_id(128) or 1, self.new_span_id(), False, _FLAGS)
                # The entry keeps `info` alive, so that its id stays unique.
                batch = _BatchSpan(info, trace.addressed, stage, context, BoundedList(self._max_links))
                self._batches[id(info)] = batch
                if len(self._batches) > _MAX_BATCHES:
                    self._batches.popitem(last=False)
            batch.links.append(Link(span))
        if first:
            answered = self._answered.batches
            if answered:
                answered[-1].append(batch)
            else:
                # This is not part of a burst of responses.
                self._emit_batch(batch)
        return batch.context

    def emit(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start: float,
        end: float,
        attributes: Mapping[str, str | int | float] | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        status: Status | None = None,
    ) -> None:
        """Pass a span to the processor. Times are of `time.monotonic`."""
        since_epoch = time.time() - time.monotonic()
        self._processor.on_end(
            ReadableSpan(
                name,
                context,
                parent,
                self._resource,
                attributes,
                links=links,
                kind=kind,
                status=_UNSET if status is None else status,
                start_time=round((since_epoch + start) * 1e9),
                end_time=round((since_epoch + max(start, end)) * 1e9),
                instrumentation_scope=self._scope,
            )
        )

    def _emit_batch(self, batch: _BatchSpan) -> None:
        info = batch.info
        attributes: dict[str, str | int | float] = {
            "tensorferry.model.name": batch.model[0],
            "tensorferry.model.version": batch.model[1],
            "tensorferry.batch.number": info.number,
            "tensorferry.batch.requests": info.requests,
            "tensorferry.batch.rows": info.rows,
            "tensorferry.batch.input_seconds": info.input_time,
            "tensorferry.batch.compute_seconds": info.compute_time,
            "tensorferry.batch.output_seconds": info.output_time,
            "tensorferry.batch.predicted_seconds": info.predicted,
        }
        if batch.stage:
            attributes["tensorferry.stage.name"] = batch.stage
        if info.reason is not None:
            attributes["tensorferry.batch.close_reason"] = info.reason.value
        if info.padded_length is not None:
            attributes["tensorferry.batch.padded_length"] = info.padded_length
        began = info.ended - info.compute_time - info.input_time
        self.emit(
            "batch", batch.context, None, began, info.ended + info.output_time, attributes, links=batch.links
        )


_UNSET = Status(StatusCode.UNSET)


class RequestSpans:
    """Spans of one request. Implements `TraceSink`."""

    __slots__ = ("_batches", "_context", "_owner", "_parent", "context")

    def __init__(
        self, owner: OpenTelemetrySource, trace_id: int, span_id: int, parent: TraceContext | None
    ) -> None:
        self._owner = owner
        state = TraceState.from_header([parent.state]) if parent is not None and parent.state else None
        self._parent: SpanContext | None = None
        if parent is not None:
            flags = _FLAGS if parent.sampled else TraceFlags()
            self._parent = SpanContext(trace_id, int(parent.span_id, 16), True, flags, state)
        self._context = SpanContext(trace_id, span_id, False, _FLAGS, state)
        # The span of each batch that the request was in, by the id of its record, which the trace keeps.
        self._batches: dict[int, SpanContext] = {}
        self.context: TraceContext | None = TraceContext(
            f"{trace_id:032x}", f"{span_id:016x}", True, parent.state if parent else ""
        )

    def completed(self, trace: RequestTrace) -> None:
        """Link the request to the spans of its batches."""
        if trace.stages:
            for stage in _of_batchers(trace.stages):
                self._add_batch(stage.batch, trace, stage.stage)
        else:
            self._add_batch(trace.batch, trace)

    def ended(self, trace: RequestTrace) -> None:
        """Emit the spans of the request and its stages."""
        done = trace.completed_at
        admitted = trace.queued if trace.queued == trace.queued else done
        own = self._context
        self._emit_child("decode", own, trace.started, admitted)
        for stage in trace.stages:
            self._emit_stage(own, stage, done)
        if not trace.stages and trace.queued == trace.queued:
            ran = trace.batch is not None or trace.queue_delay > 0
            dequeued = min(trace.queued + trace.queue_delay, done) if ran else done
            self._emit_child("queue", own, admitted, dequeued)
            if ran:
                self._emit_batch(own, trace.batch, dequeued, done)
        end = done
        if trace.sent_at == trace.sent_at:
            end = trace.sent_at
            self._emit_child("respond", own, done, end)
        method = "ModelStreamInfer" if trace.streamed else "ModelInfer"
        name, kind = f"{SERVICE_NAME}/{method}", SpanKind.SERVER
        if trace.called_by:
            name, kind = f"call {trace.addressed[0][:_MAX_QUOTED]}", SpanKind.INTERNAL
        status: Status | None = None
        if trace.status is not None and trace.status.code.name in _ERRORS:
            status = Status(StatusCode.ERROR, trace.status.message)
        self._owner.emit(
            name,
            self._context,
            self._parent,
            trace.started,
            end,
            _attributes(trace, method),
            kind=kind,
            status=status,
        )

    def _add_batch(self, batch: BatchInfo | None, trace: RequestTrace, stage: str = "") -> None:
        if batch is not None:
            self._batches[id(batch)] = self._owner.add_to_batch(batch, trace, self._context, stage)

    def _emit_stage(self, parent: SpanContext, stage: StageOutcome, done: float) -> None:
        """Emit the spans of a stage of a pipeline. The one that failed ends with the request."""
        arrival, batch = stage.arrival, stage.batch
        if arrival != arrival:
            # The request never got into its queue.
            return
        end = done if batch is None else batch.ended + batch.output_time
        whole = self._emit_child(f"stage {stage.stage}", parent, arrival, end)
        if stage.stages:
            for part in stage.stages:
                self._emit_stage(whole, part, end)
            return
        ran = batch is not None or stage.queue_delay > 0
        dequeued = min(arrival + stage.queue_delay, end) if ran else end
        self._emit_child("queue", whole, arrival, dequeued)
        if ran:
            self._emit_batch(whole, batch, dequeued, end, stage.stage)

    def _emit_batch(
        self, parent: SpanContext, batch: BatchInfo | None, start: float, end: float, step: str = ""
    ) -> None:
        """Emit the spans of a batch and of its steps. `step` is its only step if the function does not name them."""
        span = self._emit_child("batch", parent, start, end, self._batches.get(id(batch)))
        if batch is None:
            return
        start = batch.ended - batch.compute_time
        for name, ended in batch.step_ends or ([(step, batch.ended)] if step else ()):
            self._emit_child(f"step {name}", span, start, ended)
            start = ended

    def _emit_child(
        self, name: str, parent: SpanContext, start: float, end: float, link: SpanContext | None = None
    ) -> SpanContext:
        own = self._context
        context = SpanContext(own.trace_id, self._owner.new_span_id(), False, _FLAGS, own.trace_state)
        self._owner.emit(name, context, parent, start, end, links=() if link is None else (Link(link),))
        return context


def _of_batchers(stages: Sequence[StageOutcome]) -> Iterator[StageOutcome]:
    """Yield the stages that batchers have run, also those of pipelines that are stages."""
    for stage in stages:
        if stage.stages:
            yield from _of_batchers(stage.stages)
        else:
            yield stage


def _attributes(trace: RequestTrace, method: str) -> dict[str, str | int | float]:
    """Return the attributes, named by the conventions for RPC or with the prefix `tensorferry`."""
    name, version = trace.addressed
    attributes: dict[str, str | int | float] = {
        "tensorferry.model.name": name[:_MAX_QUOTED],
        "tensorferry.model.version": version[:_MAX_QUOTED],
    }
    if trace.called_by:
        attributes["tensorferry.call.model"] = trace.called_by[:_MAX_QUOTED]
    else:
        attributes["rpc.system"] = "grpc"
        attributes["rpc.service"] = SERVICE_NAME
        attributes["rpc.method"] = method
        attributes["rpc.grpc.status_code"] = 0 if trace.status is None else trace.status.code.value[0]
    if trace.request_id:
        attributes["tensorferry.request.id"] = trace.request_id[:_MAX_QUOTED]
    if trace.rows:
        attributes["tensorferry.request.rows"] = trace.rows
    if trace.caller is not ANONYMOUS:
        attributes["enduser.id"] = trace.caller.name
    if trace.status is not None:
        attributes["error.type"] = trace.status.code.name
    if trace.error is not None:
        attributes["tensorferry.error"] = trace.error.__name__
    if (batch := trace.batch) is not None:
        attributes["tensorferry.queue.delay_seconds"] = trace.queue_delay
        attributes["tensorferry.batch.number"] = batch.number
        attributes["tensorferry.batch.requests"] = batch.requests
        attributes["tensorferry.batch.rows"] = batch.rows
        if batch.reason is not None:
            attributes["tensorferry.batch.close_reason"] = batch.reason.value
    return attributes
