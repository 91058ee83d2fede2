"""OpenTelemetry: requests and batches as spans.

A request has a span of kind server, with children for its stages: decode, queue, batch and respond. A batch has a
span of its own, in a trace of its own, since it is nobody's child; it links to the spans of those of its requests that
have one, as OpenTelemetry's messaging conventions have it for what is processed in batches, and the stage `batch` of
each links back to it.

All of it is made at the end, from the times that the trace took: no span is alive while its request is, and a
request without spans has nothing at all.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

from tensorferry.batcher import BatchInfo, ResponseBurstHook
from tensorferry.protos import SERVICE_NAME
from tensorferry.server.identity import ANONYMOUS
from tensorferry.server.models.registry import Model
from tensorferry.server.telemetry.trace_context import TraceContext
from tensorferry.server.tracing.otel_sampling import Sampler
from tensorferry.server.tracing.trace import RequestTrace

_log = logging.getLogger("tensorferry.server")

_FLAGS = TraceFlags(TraceFlags.SAMPLED)

# The codes that the conventions for RPC count as a server's errors; others are its callers', or no error at all.
_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})

# As much as a span quotes of a client's own words.
_MOST_QUOTED = 128

# Batches whose span's id is still known, to a request that was cut up and rode in several of them.
_BATCHES_KNOWN = 256


@dataclass(slots=True)
class _BatchSpan:
    """A batch with a span: its ids, and the links to its requests' spans, the last of them where there are too many."""

    info: BatchInfo
    model: tuple[str, str]
    context: SpanContext
    links: BoundedList[Link] = field(repr=False)


class OpenTelemetrySource:
    """Samples requests, and gives their spans to a processor. Implements `Source` and `ResponseBurstHook`. Thread-safe.

    As `ResponseBurstHook` it stands in front of the transport's: that tells when all of a batch have had their answers, and
    its span is complete.
    """

    def __init__(
        self,
        processor: SpanProcessor,
        sampler: Sampler,
        resource: Resource,
        limits: SpanLimits,
        version: str,
        together: ResponseBurstHook,
    ) -> None:
        self._processor = processor
        self._sampler = sampler
        self._resource = resource
        self._scope = InstrumentationScope("tensorferry", version)
        self._most_links = limits.max_links
        self._together = together
        self._new_id = random.Random(random.SystemRandom().getrandbits(64)).getrandbits
        # Guards _batches and the links of each. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._batches: OrderedDict[int, _BatchSpan] = OrderedDict()
        # Of each thread, the batches whose answers it gives; only between `begin` and `end`.
        self._local = threading.local()

    def sample(self, model: Model | None, parent: TraceContext | None) -> RequestSpans | None:
        """As `Source.sample`."""
        trace_id = self._sampler(parent)
        return None if trace_id is None else RequestSpans(self, trace_id, self.new_span_id(), parent)

    def begin(self, count: int) -> None:
        """As `ResponseBurstHook.begin`."""
        self._local.answered = []
        self._together.begin(count)

    def end(self) -> None:
        """As `ResponseBurstHook.end`."""
        self._together.end()
        answered: list[_BatchSpan] = self._local.answered
        self._local.answered = None
        for batch in answered:
            self._tell_batch(batch)

    def new_span_id(self) -> int:
        """An id that is not 0, which is none."""
        return self._new_id(64) or 1

    def joined(self, info: BatchInfo, trace: RequestTrace, span: SpanContext) -> SpanContext:
        """A request with this span was answered from a batch, on this thread; the batch's span."""
        with self._lock:
            batch = self._batches.get(id(info))
            first = batch is None
            if batch is None:
                context = SpanContext(self._new_id(128) or 1, self.new_span_id(), False, _FLAGS)
                # It has `info`, so that no other can have its id meanwhile.
                batch = _BatchSpan(info, trace.addressed, context, BoundedList(self._most_links))
                self._batches[id(info)] = batch
                if len(self._batches) > _BATCHES_KNOWN:
                    self._batches.popitem(last=False)
            batch.links.append(Link(span))
        if first:
            answered: list[_BatchSpan] | None = getattr(self._local, "answered", None)
            if answered is None:
                # It answers this one alone.
                self._tell_batch(batch)
            else:
                answered.append(batch)
        return batch.context

    def tell(
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
        """Hands a span to the processor; its times are on the clock of `time.monotonic`."""
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

    def _tell_batch(self, batch: _BatchSpan) -> None:
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
        if info.reason is not None:
            attributes["tensorferry.batch.close_reason"] = info.reason.value
        if info.padded_length is not None:
            attributes["tensorferry.batch.padded_length"] = info.padded_length
        began = info.ended - info.compute_time - info.input_time
        self.tell(
            "batch", batch.context, None, began, info.ended + info.output_time, attributes, links=batch.links
        )


_UNSET = Status(StatusCode.UNSET)


class RequestSpans:
    """The spans of one request. Implements `Sink`."""

    __slots__ = ("_batch", "_context", "_owner", "_parent", "context")

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
        self._batch: SpanContext | None = None
        self.context: TraceContext | None = TraceContext(f"{trace_id:032x}", f"{span_id:016x}", True)

    def completed(self, trace: RequestTrace) -> None:
        """Joins its batch's span."""
        if trace.batch is not None:
            self._batch = self._owner.joined(trace.batch, trace, self._context)

    def ended(self, trace: RequestTrace) -> None:
        """Tells the request's span and those of its stages."""
        done = trace.completed_at
        admitted = trace.queued if trace.queued == trace.queued else done
        self._tell_stage("decode", trace.started, admitted)
        if trace.queued == trace.queued:
            ran = trace.batch is not None or trace.queue_delay > 0
            left = min(trace.queued + trace.queue_delay, done) if ran else done
            self._tell_stage("queue", admitted, left)
            if ran:
                self._tell_stage("batch", left, done, () if self._batch is None else (Link(self._batch),))
        end = done
        if trace.sent_at == trace.sent_at:
            end = trace.sent_at
            self._tell_stage("respond", done, end)
        method = "ModelStreamInfer" if trace.streamed else "ModelInfer"
        status: Status | None = None
        if trace.status is not None and trace.status.code.name in _ERRORS:
            status = Status(StatusCode.ERROR, trace.status.message)
        self._owner.tell(
            f"{SERVICE_NAME}/{method}",
            self._context,
            self._parent,
            trace.started,
            end,
            _attributes(trace, method),
            kind=SpanKind.SERVER,
            status=status,
        )

    def _tell_stage(self, name: str, start: float, end: float, links: tuple[Link, ...] = ()) -> None:
        own = self._context
        context = SpanContext(own.trace_id, self._owner.new_span_id(), False, _FLAGS, own.trace_state)
        self._owner.tell(name, context, own, start, end, links=links)


def _attributes(trace: RequestTrace, method: str) -> dict[str, str | int | float]:
    """By the conventions for RPC where these have a name; others are the server's own."""
    name, version = trace.addressed
    attributes: dict[str, str | int | float] = {
        "rpc.system": "grpc",
        "rpc.service": SERVICE_NAME,
        "rpc.method": method,
        "rpc.grpc.status_code": 0 if trace.status is None else trace.status.code.value[0],
        "tensorferry.model.name": name[:_MOST_QUOTED],
        "tensorferry.model.version": version[:_MOST_QUOTED],
    }
    if trace.request_id:
        attributes["tensorferry.request.id"] = trace.request_id[:_MOST_QUOTED]
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
