"""Metrics of a real server: where they are, and that they include the answer as soon as it arrives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from e2e.fixtures import Serve
from support.processes.metrics import scrape, scrape_until
from support.processes.probe import WAIT_SECONDS, OpenStream, inputs, request, stub_of
from support.processes.server import run_command

from tensorferry.client import InferenceClient
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

CLIENTS, EACH = 4, 10


def test_counters_equal_what_clients_saw(serve: Serve, probe_model: Path, echo_model: Path) -> None:
    """Each client finds at least its own answers counted as soon as it has them; at the end the counts
    are exact.
    """
    server = serve(probe_model, echo_model, "--metrics-port", 0, "--max-batch-size", 4)

    def run(number: int) -> None:
        with InferenceClient(server.address) as client:
            for count in range(1, EACH + 1):
                client.infer("probe", inputs(0, 1 + (number + count) % 6), timeout=WAIT_SECONDS)
                if not count % 5:
                    assert scrape(server)["tensorferry_requests_total{outcome=answered}"] >= count

    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(run, range(CLIENTS)))
    found = scrape(server)
    rows = sum(1 + (number + count) % 6 for number in range(CLIENTS) for count in range(1, EACH + 1))
    assert found["tensorferry_requests_accepted_total{}"] == CLIENTS * EACH
    assert found["tensorferry_requests_total{outcome=answered}"] == CLIENTS * EACH
    # The parser appends this suffix to Triton's counters.
    assert found["nv_inference_request_success_total{}"] == CLIENTS * EACH
    assert found["nv_inference_count_total{}"] == rows == found["tensorferry_batch_rows_sum{}"]
    assert found["tensorferry_batch_rows_bucket{le=4.0}"] == found["tensorferry_batch_rows_count{}"]
    assert found["nv_inference_pending_request_count{}"] == found["tensorferry_queued_requests{}"] == 0
    assert found["tensorferry_running_requests{}"] == found["tensorferry_held_bytes{}"] == 0


def test_failures_cancels_and_refusals(serve: Serve, probe_model: Path) -> None:
    server = serve(probe_model, "--metrics-port", 0, "--max-queue-size", 3, "--max-queue-delay-ms", 600_000)
    with grpc.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        stream = OpenStream(channel, timeout=None)
        # The window is long, so these wait until they are cancelled.
        stream.send(request(1), request(2))
        found = scrape(server)
        assert found["tensorferry_queued_requests{}"] == found["nv_inference_pending_request_count{}"] == 2
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request(3, rows=2), timeout=WAIT_SECONDS)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hopeless = request(4)
        hopeless.parameters["timeout"].int64_param = 1
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(hopeless, timeout=WAIT_SECONDS)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(pb.ModelInferRequest(model_name="probe"), timeout=WAIT_SECONDS)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stream.cancel()
        # A client sees its own cancel before the server does.
        ended = scrape_until(server, lambda found: found["tensorferry_requests_total"] == 2)
    assert ended["tensorferry_requests_total{outcome=cancelled}"] == 2
    assert ended["tensorferry_requests_refused_total{reason=queue_full}"] == 1
    assert ended["tensorferry_requests_refused_total{reason=deadline}"] == 1
    assert ended["tensorferry_requests_refused_total"] == 2, "what is malformed never got there"
    assert ended["tensorferry_requests_accepted_total"] == 2
    failed = {r: ended[f"nv_inference_request_failure_total{{reason={r}}}"] for r in ("CANCELED", "REJECTED")}
    assert failed == {"CANCELED": 2, "REJECTED": 2}


def test_connections_of_http(serve: Serve, probe_model: Path) -> None:
    server = serve(probe_model, "--metrics-port", 0, "--http-port", 0)
    assert scrape(server)["tensorferry_http_connections"] == 0
    with closing(HTTPConnection(server.ready["http"].removeprefix("http://"))) as client:
        client.request("GET", "/v2/health/live")
        assert client.getresponse().read() == b'{"live":true}'
        assert scrape(server)["tensorferry_http_connections"] == 1
    scrape_until(server, lambda found: found["tensorferry_http_connections"] == 0)


def test_refusals_before_a_queue_and_open_streams(serve: Serve, probe_model: Path) -> None:
    server = serve(probe_model, "--metrics-port", 0)
    with grpc.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        malformed: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for call, message in (
            (stub.ModelInfer, request(1, model="other")),
            (stub.ModelInfer, pb.ModelInferRequest(model_name="probe", model_version="7")),
            (stub.ModelInfer, pb.ModelInferRequest(model_name="probe")),
            (malformed, b"\xff\xff"),
        ):
            with pytest.raises(grpc.RpcError):
                call(message, timeout=WAIT_SECONDS)
        stream = OpenStream(channel)
        # Its marker is a request for an unknown model.
        stream.send(request(2))
        found = scrape(server)
        assert found["tensorferry_open_streams"] == 1
        assert found["tensorferry_calls_refused_total{code=NOT_FOUND}"] == 3
        assert found["tensorferry_calls_refused_total{code=INVALID_ARGUMENT}"] == 2
        assert found["tensorferry_calls_refused_total"] == 5
        assert found["tensorferry_requests_refused_total"] == 0
        assert found["tensorferry_server_ready"] == found["tensorferry_model_ready"] == 1
        stream.cancel()
        scrape_until(server, lambda found: found["tensorferry_open_streams"] == 0)


def test_callers_that_are_not_known_are_counted(serve: Serve, probe_model: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"user infer sha256:{'0' * 64}\n")
    server = serve(probe_model, "--metrics-port", 0, "--auth-tokens", tokens)
    with stub_of(server.address) as stub:
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(request(1), timeout=WAIT_SECONDS)
        with pytest.raises(grpc.RpcError):
            list(stub.ModelStreamInfer(iter([request(1)]), timeout=WAIT_SECONDS))
    found = scrape(server)
    assert found["tensorferry_calls_refused_total{code=UNAUTHENTICATED}"] == 2
    assert found["tensorferry_calls_refused_total"] == 2


def test_a_port_in_use_ends_the_server_with_the_flags_name(
    serve: Serve, probe_model: Path, transport: str
) -> None:
    port = urlsplit(serve(probe_model, "--metrics-port", 0).ready["metrics"]).port
    ended = run_command("serve", probe_model, "--port", "0", "--metrics-port", port, "--transport", transport)
    assert ended.returncode == 1
    assert f"cannot serve metrics on 127.0.0.1 port {port}" in ended.stderr
    assert "--metrics-port" in ended.stderr
    assert "Traceback" not in ended.stderr
