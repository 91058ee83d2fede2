"""Spans and log lines of a real server: what a collector gets over OTLP, and the cost without a
collector.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from opentelemetry.sdk.trace import TracerProvider
from support.processes.collector import Collector, attributes, collecting
from support.processes.probe import inputs, request, stub_of
from support.processes.server import STOP_SECONDS, ServerProcess

from tensorferry.client import InferenceClient

Start = Callable[..., ServerProcess]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVED = 2  # opentelemetry.proto.trace.v1.Span.SPAN_KIND_SERVER
STAGES = ["decode", "queue", "batch", "respond"]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def start(transport: str) -> Iterator[Start]:
    """Start servers with their own environment variables; the test ends those that are left."""
    started: list[ServerProcess] = []

    def make(*arguments: str | Path, **variables: str) -> ServerProcess:
        quick = {"OTEL_BSP_SCHEDULE_DELAY": "50", **variables}
        started.append(ServerProcess.start(*arguments, transport=transport, variables=quick))
        return started[-1]

    yield make
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.wait()


def test_our_clients_trace_goes_on_in_the_server_and_reaches_the_collector(
    start: Start, collector: Collector, probe_model: Path
) -> None:
    endpoint = f"http://{collector.address}"
    server = start(probe_model, "--otel", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_SERVICE_NAME="shop")
    tracer = TracerProvider().get_tracer("test")
    with InferenceClient(server.address) as client, tracer.start_as_current_span("caller") as caller:
        client.infer("probe", inputs(0), request_id="unary")
        for _ in client.stream("probe", [inputs(0)]):
            pass
    ids = caller.get_span_context()
    spans = collector.spans(2 * 6)
    # They are exported as they end, each on its own thread.
    served = sorted(
        (span for span in spans if span.kind == SERVED), key=lambda span: span.start_time_unix_nano
    )
    assert [span.name.rpartition("/")[2] for span in served] == ["ModelInfer", "ModelStreamInfer"]
    for span in served:
        assert int.from_bytes(span.trace_id, "big") == ids.trace_id
        assert int.from_bytes(span.parent_span_id, "big") == ids.span_id
        children = [child for child in spans if child.parent_span_id == span.span_id]
        assert [child.name for child in children] == STAGES
        (link,) = children[2].links
        (batch,) = [other for other in spans if other.span_id == link.span_id]
        assert [back.span_id for back in batch.links] == [span.span_id]
        assert span.start_time_unix_nano <= batch.start_time_unix_nano < batch.end_time_unix_nano
        assert abs(time.time() - span.end_time_unix_nano / 1e9) < STOP_SECONDS
    assert attributes(served[0])["tensorferry.request.id"] == "unary"
    assert collector.resources[0]["service.name"] == "shop"
    assert collector.resources[0]["service.version"]
    assert server.stop() == 0
    assert not server.errors()


def test_headers_of_foreign_clients_and_unsampled_requests(
    start: Start, collector: Collector, probe_model: Path
) -> None:
    server = start(
        *(probe_model, "--otel"),
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{collector.address}",
        OTEL_TRACES_SAMPLER="parentbased_always_off",
    )
    tensors = []
    for name, array, datatype in (
        ("work", np.zeros(1), "INT64"),
        ("x", np.zeros((1, 4)), "FP32"),
        ("index", np.zeros(1), "INT64"),
    ):
        tensors.append(triton.InferInput(name, list(array.shape), datatype))
        tensors[-1].set_data_from_numpy(array.astype(np.float32 if datatype == "FP32" else np.int64))
    with triton.InferenceServerClient(server.address) as client:
        client.infer("probe", tensors)
        client.infer("probe", tensors, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
        client.infer("probe", tensors, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"}, request_id="traced")
    # Stopping the server sends the remaining spans.
    assert server.stop() == 0
    spans = collector.spans(6)
    (served,) = [span for span in spans if span.kind == SERVED]
    assert (served.trace_id.hex(), served.parent_span_id.hex()) == (TRACE, SPAN)
    assert attributes(served)["tensorferry.request.id"] == "traced"
    assert attributes(served)["rpc.grpc.status_code"] == 0
    assert len(spans) == 6
    assert collector.resources[0]["service.name"] == "tensorferry"


def test_a_collector_that_hangs_delays_no_request_and_the_stop_for_a_bounded_time(
    start: Start, probe_model: Path
) -> None:
    with collecting(hangs=True) as collector:
        server = start(
            *(probe_model, "--otel"),
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{collector.address}",
            OTEL_BSP_MAX_QUEUE_SIZE="64",
            OTEL_BSP_MAX_EXPORT_BATCH_SIZE="16",
            OTEL_EXPORTER_OTLP_TIMEOUT="3600",
        )
        with InferenceClient(server.address) as client, ThreadPoolExecutor(8) as threads:
            client.infer("probe", inputs(0))
            assert collector.hung.wait(STOP_SECONDS)
            # Many times the size of the queue: the oldest spans are dropped, and no request is.
            results = list(threads.map(lambda tag: client.infer("probe", inputs(tag)), range(100)))
        assert [result["y"][0, 0] for result in results] == [2 * tag for tag in range(100)]
        assert server.stop() == 0
        assert any("the last spans are lost" in line for line in server.log)
        assert all("opentelemetry.exporter" in line for line in server.errors())


def test_log_lines_have_request_ids_and_clients_cannot_break_them(start: Start, probe_model: Path) -> None:
    server = start(probe_model, "--access-log", "1000")
    name = 'seven"\n{"level": "forged'
    with stub_of(server.address) as stub:
        good, bad = request(1), request(2, index=99)
        good.id, bad.id = name, name
        header = [("traceparent", f"00-{TRACE}-{SPAN}-01")]
        stub.ModelInfer(good, metadata=header)
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(bad, metadata=header)
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.log]
    (warning,) = [line for line in lines if " failed on " in line["message"]]
    ids = {"request_id": name, "model": "probe", "trace_id": TRACE, "span_id": SPAN}
    assert ids.items() <= warning.items()
    assert "\\n" in warning["message"]
    assert "\n" not in warning["message"].partition(":")[0]
    access = [line for line in lines if line["logger"] == "tensorferry.access"]
    assert [(line["outcome"], line["code"]) for line in access] == [
        ("answered", "OK"),
        ("failed", "INTERNAL"),
    ]
    for line in access:
        assert ids.items() <= line.items()
        assert line["duration_seconds"] > 0
    assert {"rows": 1, "batch_requests": 1, "method": "ModelInfer"}.items() <= access[0].items()
