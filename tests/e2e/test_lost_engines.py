"""An engine that requests end, and one that is killed: each request gets its own answer, or the blame."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from polling import until
from support.models.recurrent import ABORTS, aborting
from support.processes.server import ServerProcess
from support.server.rig import request

from tensorferry.client import InferenceClient, InferenceError
from tensorferry.protos import inference_pb2_grpc

COUNT = 8
KILLER = 5


FUNCTION = f"""
import os

from tensorferry.serving import FP32, model


@model(inputs={{"x": FP32[-1, 4]}}, outputs={{"y": FP32[-1, 4]}})
def m(x):
    if (x[:, 3] == {ABORTS}).any():
        os.abort()
    return 3 * x + 1
"""
CALL = """
from tensorferry.serving import FP32, infer, model, onnx

aborting = onnx("aborting.onnx")


@model(inputs={"x": FP32[-1, 4]}, outputs={"y": FP32[-1, 4]})
def m(x):
    return infer("aborting", x=x)["y"]
"""


@pytest.fixture(params=["onnx"])
def server(request: pytest.FixtureRequest, transport: str, tmp_path: Path) -> Iterator[ServerProcess]:
    """Its log may have errors, because its engine is ended. Requests share batches."""
    model = f"m={aborting(tmp_path / 'aborting.onnx')}"
    if request.param != "onnx":
        app = tmp_path / "app.py"
        app.write_text({"function": FUNCTION, "call": CALL}[request.param])
        model = str(app)
    server = ServerProcess.start(
        model,
        "--front-ends",
        "2",
        "--batching",
        "trust",
        "--max-queue-delay-ms",
        "50",
        transport=transport,
    )
    yield server
    assert server.stop() == 0, server.log
    assert not [line for line in server.log if "Traceback" in line or "this is a bug" in line]


def rows(number: int, *, aborts: bool) -> np.ndarray:
    return np.array([[number, 1, 2, ABORTS if aborts else 0]], dtype=np.float32)


def outcome(server: ServerProcess, number: int, killer: int) -> str:
    """Send one request over a connection of its own; return the code of its error, or OK."""
    x = rows(number, aborts=number == killer)
    with InferenceClient(server.address) as client:
        try:
            (found,) = client.infer("m", {"x": x}).values()
        except InferenceError as error:
            return error.code.name
        np.testing.assert_array_equal(found, 3 * x + 1)
    return "OK"


@pytest.mark.parametrize("server", ["onnx", "function", "call"], indirect=True)
def test_the_request_that_aborts_the_engine_gets_the_blame_and_the_others_get_answers(
    server: ServerProcess,
) -> None:
    with ThreadPoolExecutor(COUNT) as pool:
        outcomes = list(pool.map(lambda number: outcome(server, number, KILLER), range(COUNT)))
    assert outcomes[KILLER] == "INTERNAL", server.log
    # A request that came after the engine's end was told that there is none, and the client's retries may be used up.
    assert {*outcomes[:KILLER], *outcomes[KILLER + 1 :]} <= {"OK", "UNAVAILABLE"}
    assert "OK" in outcomes
    # On every front-end.
    assert until(lambda: outcome(server, 0, -1) == "OK")
    assert {outcome(server, KILLER, KILLER) for _ in range(8)} == {"INTERNAL"}
    ends = [line for line in server.log if "the engine (process" in line and "killed by SIGABRT" in line]
    assert len(ends) == 1, server.log
    # The engine for trials ended once by the request, and once because it was done.
    ends = [line for line in server.log if "engine for trials (process" in line and "ended" in line]
    assert "killed by SIGABRT" in ends[0]
    assert [line for line in ends[1:] if "exit status 0" not in line] == []


def test_requests_of_a_killed_engine_are_answered_by_the_next(server: ServerProcess) -> None:
    _, *children = server.processes()
    engine = next(pid for pid in children if b"server.engine" in Path(f"/proc/{pid}/cmdline").read_bytes())
    with grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        # So that it has begun with none.
        os.kill(engine, signal.SIGSTOP)
        infer = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        xs = [rows(number, aborts=False) for number in range(COUNT)]
        futures = [infer.future(request({"x": x}), timeout=60) for x in xs]
        # The front-end answers this itself, on the same connection: it has got the requests.
        asked = health_pb2.HealthCheckRequest(service="m")
        assert health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60).status
        os.kill(engine, signal.SIGKILL)
        for x, future in zip(xs, futures, strict=True):
            found = np.frombuffer(future.result().raw_output_contents[0], np.float32)
            np.testing.assert_array_equal(found, (3 * x + 1).ravel())
