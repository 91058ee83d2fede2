"""A real service behind a transport, and the spans of its requests and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind
from polling import until
from support.server.rig import PATIENCE, fp32, request, signature, spec
from support.server.scripted_service import ServedTransport

from tensorferry.batcher import Batcher, ModelFunction
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.observability.tracing.otel import OpenTelemetrySource
from tensorferry.server.observability.tracing.otel_export import sampler_of
from tensorferry.server.observability.tracing.trace import Tracer
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher

SIGNATURE = signature(spec("x", "FP32", "batch", "n"), outputs=(spec("y", "FP32", "batch", "n"),))
# The rounding of seconds since the epoch as a float.
ROUNDING_NS = 2_000
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


class Exported(InMemorySpanExporter):
    """Keeps exported spans, and the number of links each had when it was exported."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[int, int] = {}

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.links.update({span.context.span_id: len(span.links) for span in spans if span.context})
        return super().export(spans)


class TracedService:
    """A real service behind a transport, with its spans. Batches end when the test opens `runner`, unless `fn` is a `BatchAware`."""

    def __init__(
        self,
        served: ServedTransport,
        *,
        fn: ModelFunction | None = None,
        **options: Any,
    ) -> None:
        self.served = served
        self.exporter = Exported()
        response_batcher = served.lane.response_batcher if served.lane is not None else ResponseBatcher()
        self.source = OpenTelemetrySource(
            SimpleSpanProcessor(self.exporter),
            sampler_of({}),
            Resource({}),
            SpanLimits(max_links=options.pop("max_links", None)),
            "1.2.3",
            response_batcher,
        )
        scripted = fn if callable(fn) else lambda inputs: {"y": inputs["x"] * 2}
        self.runner = ScriptedRunner(scripted, gated=True)
        run = self.runner if fn is None or callable(fn) else fn
        self.batcher = Batcher(run, 4, response_hook=self.source, **options)
        served.registry.mark_ready(Model("m", "1", SIGNATURE, 4, "", self.batcher))
        served.serve_by(InferenceService(served.registry, tracing=Tracer([self.source])))

    def infer(self, request_id: str, parent: str = SAMPLED, *, rows: int = 1, **options: Any) -> Any:
        """Start a ModelInfer."""
        metadata = [("traceparent", parent)] if parent else []
        return self.served.stub.ModelInfer.future(
            request({"x": fp32(rows, 2)}, id=request_id),
            metadata=metadata,
            **{"timeout": PATIENCE, **options},
        )

    def await_queued(self, count: int) -> None:
        """Wait until `count` requests are queued."""
        until(lambda: self.batcher.statistics().sizes.queued, lambda queued: queued == count)

    def spans(self, requests: int, batches: int = 0) -> Spans:
        """Wait for the spans of exactly this number of requests and batches, and return all."""
        found = until(
            lambda: Spans(self.exporter.get_finished_spans()),
            lambda found: len(found.requests) >= requests and len(found.batches) >= batches,
        )
        assert (len(found.requests), len(found.batches)) == (requests, batches), found.all
        return found

    def close(self) -> None:
        self.runner.open()
        assert self.batcher.close()


class Spans:
    """Exported spans: of requests by id, of batches by number, of stages by name."""

    def __init__(self, spans: Sequence[ReadableSpan]) -> None:
        self.all = spans
        self.requests = {
            str(of(span).get("tensorferry.request.id", "")): span for span in spans if served(span)
        }
        self.batches = {
            of(span)["tensorferry.batch.number"]: span
            for span in spans
            if span.parent is None and not served(span)
        }

    def stages(self, request_id: str) -> dict[str, ReadableSpan]:
        """The child spans of a request, which must follow one another without a gap."""
        parent = self.requests[request_id]
        children = {span.name: span for span in self.all if span.parent == parent.context}
        at = parent.start_time or 0
        for child in children.values():
            assert child.kind is SpanKind.INTERNAL
            assert abs((child.start_time or 0) - at) < ROUNDING_NS
            at = child.end_time or 0
        assert abs((parent.end_time or 0) - at) < ROUNDING_NS
        return children


def served(span: ReadableSpan) -> bool:
    return span.kind is SpanKind.SERVER


def of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def ids_of(contexts: Sequence[SpanContext | None]) -> set[int]:
    return {context.span_id for context in contexts if context is not None}
