"""A device fails under load: no request is lost, health reports it, and the model recovers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from e2e.fixtures import Serve
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from polling import until
from support.processes import faulty
from support.processes.metrics import scrape_until
from support.processes.probe import inputs
from support.processes.server import SERVER_PROCESSES, ServerProcess
from support.server.rig import request as as_request

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# A passing test never waits it out.
PATIENCE = 60.0
CLIENTS = 12
PROCESSES = int(SERVER_PROCESSES or 1)


def dial(server: ServerProcess) -> grpc.Channel:
    # Health as the server reports it.
    return grpc.insecure_channel(server.address, [("grpc.enable_retries", 0)])


def message(mark: float, rows: int = 1, work: int = 0) -> pb.ModelInferRequest:
    return as_request(inputs(mark, rows, work=work), model="probe")


def infer(stub: Any, mark: float, rows: int = 1, work: int = 0) -> str:
    """Return `right`, or the name of the status; raise for a wrong answer."""
    try:
        response = stub.ModelInfer(message(mark, rows, work), timeout=PATIENCE)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code.name
    y = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(rows, 4)
    np.testing.assert_array_equal(y, np.full((rows, 4), 2 * mark, np.float32))
    return "right"


def infer_when_ready(stub: Any) -> None:
    """Return once the model answers again."""
    while (what := infer(stub, 1.0)) != "right":
        assert what == "UNAVAILABLE"


class Health:
    """Changes of a model's health."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self.changes: list[int] = []
        # By `time.monotonic`.
        self.times: list[float] = []
        self._changed = threading.Condition()
        self._watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=service)
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.await_status(SERVING)

    def _read(self) -> None:
        try:
            for response in self._watch:
                with self._changed:
                    self.changes.append(response.status)
                    self.times.append(time.monotonic())
                    self._changed.notify_all()
        except grpc.RpcError:
            pass

    def await_status(self, status: int, after: int = 0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: status in self.changes[after:], PATIENCE), self.changes


def test_no_request_is_lost_while_memory_runs_out_and_the_device_breaks(serve_faulty: Serve) -> None:
    server = serve_faulty("--max-batch-size", "16", "--batching", "trust", FAULTY_ROOM="3")
    ended: Counter[str] = Counter()
    # Guards outcomes.
    lock = threading.Lock()

    def run(client: int) -> None:
        with dial(server) as channel:
            stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            for number in range(40):
                breaks = number in (10, 25) and client % 4 == 0
                mark = faulty.ONCE + 100 * client + number if breaks else float(100 * client + number)
                what = infer(stub, mark, rows=(1, 1, 2, 7)[number % 4])
                with lock:
                    ended[what] += 1

    with dial(server) as channel:
        health, whole = Health(channel, "probe"), Health(channel, "")
        with ThreadPoolExecutor(CLIENTS) as clients:
            for future in [clients.submit(run, client) for client in range(CLIENTS)]:
                future.result()
        assert ended.total() == CLIENTS * 40
        assert set(ended) <= {"right", "UNAVAILABLE"}
        assert ended["right"] > 0
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        infer_when_ready(stub)
        for watched in (health, whole):
            watched.await_status(NOT_SERVING)
            watched.await_status(SERVING, after=watched.changes.index(NOT_SERVING))
        assert stub.ModelReady(pb.ModelReadyRequest(name="probe"), timeout=PATIENCE).ready
        assert [infer(stub, 5.0, rows=16) for _ in range(3)] == ["right"] * 3
    assert server.stop() == 0
    assert any("works again, rebuilt" in line for line in server.log)
    assert any("does not fit into the memory" in line for line in server.log)


def test_a_row_that_never_fits_gets_an_error(serve_faulty: Serve) -> None:
    server = serve_faulty("--batching", "trust", FAULTY_ROOM="0")
    with dial(server) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(message(1.0), timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "a single row of the request does not fit into the device's memory" in str(caught.value.details())


def test_a_request_that_breaks_the_device_each_time_is_tried_twice(serve_faulty: Serve) -> None:
    server = serve_faulty()
    with dial(server) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(message(faulty.ALWAYS), timeout=PATIENCE)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the device failed (CUDA error 700)" in str(caught.value.details())
        status = rpc_status.from_call(caught.value)
        assert [detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details] == [True]
        infer_when_ready(stub)
    assert server.stop() == 0
    assert sum("an illegal memory access was encountered" in line for line in server.log) == 2


def test_a_run_that_takes_too_long_is_ended_and_the_model_goes_on(serve_faulty: Serve) -> None:
    """With the real ONNX Runtime, which ends a loop between two iterations."""
    server = serve_faulty("--run-timeout-seconds", "2")
    with dial(server) as channel:
        health = Health(channel, "probe")
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)

        def goes_on() -> bool:
            """Return whether the model is never not ready. A busy machine may not end the run in the second that it has."""
            infer_when_ready(stub)
            before = len(health.changes)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(message(1.0, work=100_000_000), timeout=PATIENCE)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            said = "the batch ran for longer than 2 s, which --run-timeout-seconds"
            assert said in str(caught.value.details())
            return infer(stub, 2.0) == "right" and len(health.changes) == before

        until(goes_on)


def test_a_run_that_does_not_end_turns_the_model_not_ready(serve_faulty: Serve, tmp_path: Path) -> None:
    release = tmp_path / "release"
    options = ("--run-timeout-seconds", "1", "--max-batch-size", "1", "--metrics-port", "0")
    server = serve_faulty(*options, FAULTY_RELEASE=str(release))
    with dial(server) as channel, ThreadPoolExecutor() as callers:
        health, whole = Health(channel, "probe"), Health(channel, "")
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        hangs = callers.submit(infer, stub, faulty.HANG)
        # Its time may be over before the page is read.
        scrape_until(
            server,
            lambda found: (
                found["tensorferry_running_requests"] == 1 or found["tensorferry_model_ready"] < PROCESSES
            ),
        )
        queued = [callers.submit(infer, stub, mark) for mark in (1.0, 2.0, 3.0)]
        health.await_status(NOT_SERVING)
        whole.await_status(NOT_SERVING)
        assert not stub.ModelReady(pb.ModelReadyRequest(name="probe"), timeout=PATIENCE).ready
        assert not stub.ServerReady(pb.ServerReadyRequest(), timeout=PATIENCE).ready
        assert hangs.result() == "DEADLINE_EXCEEDED"
        assert {future.result() for future in queued} == {"UNAVAILABLE"}
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(message(4.0), timeout=PATIENCE)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "is not at ready state" in str(caught.value.details())
        release.touch()
        health.await_status(SERVING, after=health.changes.index(NOT_SERVING))
        infer_when_ready(stub)


def test_a_device_that_cannot_be_brought_back_ends_the_process_where_that_is_asked(
    serve_faulty: Serve,
) -> None:
    server = serve_faulty("--exit-on-device-loss", FAULTY_VAIN="1000000")
    with dial(server) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert infer(stub, faulty.ONCE) == "UNAVAILABLE"
        if SERVER_PROCESSES:
            # The device of another process works.
            infer_when_ready(stub)
            assert server.stop() == 0
        else:
            assert server.wait() == 1
    assert any("restart the server" in line for line in server.log)
