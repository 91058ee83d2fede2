"""A stand-in for an OpenTelemetry collector: OTLP over gRPC, kept in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collected
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_SECONDS = 60


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it receives; if it `hangs`, it answers nothing until it is stopped. Thread-safe."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.address = ""
        self.resources: list[dict[str, str]] = []
        self.hung = threading.Event()
        self._hangs = hangs
        self._stopped = threading.Event()
        # Guards what is kept, and is notified of additions.
        self._changed = threading.Condition()
        self._spans: list[Span] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self._hangs:
            self.hung.set()
            self._stopped.wait(WAIT_SECONDS)
        with self._changed:
            for resource in request.resource_spans:
                self.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
                for scope in resource.scope_spans:
                    self._spans += scope.spans
            self._changed.notify_all()
        return collected.ExportTraceServiceResponse()

    def spans(self, count: int) -> list[Span]:
        """Return all spans, once there are at least `count`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._spans) >= count, WAIT_SECONDS), self._spans
            return list(self._spans)

    def stop(self) -> None:
        """Release all waiting calls."""
        self._stopped.set()


@contextmanager
def collecting(*, hangs: bool = False) -> Iterator[Collector]:
    """Run a collector that listens at its `address`."""
    collector = Collector(hangs=hangs)
    server = grpc.server(
        ThreadPoolExecutor(4, thread_name_prefix="collector"), options=[("grpc.so_reuseport", 0)]
    )
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        collector.stop()
        server.stop(None).wait()


def attributes(span: Span) -> dict[str, Any]:
    """Return a span's attributes by name."""
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}
