"""Cost of tracing per request: off, on without sampling, 1 % sampled, all sampled; and of the access
log.

    python benchmarks/tracing_cost.py

Measured without the request itself: the calls of the service to `Tracer`, and those of a trace
until its response is sent, with all five spans of a request and a batch's spans for every eighth.
The figure is processor time of the serving thread, the least of many short runs, because the
machine may have other work. The encoding is the work of the SDK's thread before it sends the spans.
"""

from __future__ import annotations

import logging
import time
import timeit
from collections.abc import Callable
from typing import Any, cast

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor

from tensorferry.batcher import BatchInfo
from tensorferry.server.models.registry import Model
from tensorferry.server.signature import Signature
from tensorferry.server.tracing.access_log import AccessLog
from tensorferry.server.tracing.otel import OpenTelemetrySource
from tensorferry.server.tracing.otel_sampling import sampler_of
from tensorferry.server.tracing.trace import Tracer
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher

BATCH = 8
REQUESTS = 25 * BATCH
RUNS = 60

USER_AGENT = ("user-agent", "grpc-python/1.85.1 grpc-c/53.0.0 (linux; chttp2)")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"
MODEL = Model("model", "1", Signature((), ()), BATCH, "", cast(Any, None))


class Kept(SpanProcessor):
    """Exporter that keeps the last spans."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """Append to a list, as the SDK's queue does."""
        self.spans.append(span)


def requests(tracing: Tracer, *metadata: tuple[str, str]) -> Callable[[], None]:
    """Call the tracing functions of the service and the transport for many requests."""

    def run() -> None:
        for number in range(REQUESTS):
            now = time.monotonic()
            if number % BATCH == 0:
                info = BatchInfo(number, BATCH, BATCH, 1e-3, ended=now)
            if not tracing.sources:
                continue
            trace = tracing.begin(MODEL, "1234", now, metadata)
            if trace is None:
                continue
            trace.enqueued(MODEL)
            trace.completed(info, 1e-4, None, None)
            trace.sent()

    return run


def microseconds(run: Callable[[], object]) -> float:
    """Return the least time per request of several runs."""
    return min(timeit.repeat(run, number=1, repeat=RUNS, timer=time.thread_time)) / REQUESTS * 1e6


def with_spans(ratio: float, processor: SpanProcessor) -> Tracer:
    """Sample this share of the requests without a caller's trace."""
    sampler = sampler_of(
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": str(ratio)}
    )
    return Tracer(
        [OpenTelemetrySource(processor, sampler, Resource({}), SpanLimits(), "0", ResponseBatcher())]
    )


def main() -> None:
    """Print the table."""
    logging.getLogger("tensorferry.access").setLevel(logging.INFO)
    kept = Kept()
    # Log lines are formatted and discarded.
    logging.getLogger("tensorferry.access").propagate = False
    logging.getLogger("tensorferry.access").addHandler(logging.NullHandler())
    log = AccessLog(100)
    log.start()
    loop = microseconds(requests(Tracer()))
    rows = {
        "on, no caller's trace, none sampled": requests(with_spans(0.0, kept), USER_AGENT),
        "on, the caller's trace is not sampled": requests(
            with_spans(1.0, kept), USER_AGENT, ("traceparent", PARENT + "0")
        ),
        "on, 1 % sampled": requests(with_spans(0.01, kept), USER_AGENT),
        "on, all sampled": requests(with_spans(1.0, kept), USER_AGENT, ("traceparent", PARENT + "1")),
        "access log, 100 lines a second": requests(Tracer([log]), USER_AGENT),
    }
    print("microseconds that a request costs more")
    for name, run in rows.items():
        print(f"{name:42}{microseconds(run) - loop:7.2f}")
    kept.spans.clear()
    rows["on, all sampled"]()
    print(
        f"{'encoding all spans, on another thread':42}{microseconds(lambda: encode_spans(kept.spans)):7.2f}"
    )
    log.stop(5.0)


if __name__ == "__main__":
    main()
