"""A server of several processes on one port. What one process does is tested with SERVER_PROCESSES=2."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from polling import PATIENCE, until
from support.models import small
from support.models.recurrent import ABORTS, aborting
from support.processes import observed
from support.processes.server import ServerProcess
from support.server.rig import request

from tensorferry.client import InferenceClient
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

MODULE = "tensorferry.server.processes"
LOG_NOTHING = pb.LogSettingsRequest()
LOG_NOTHING.settings["log_info"].bool_param = False
X = np.arange(12, dtype=np.float32).reshape(3, 4)


def started(*arguments: str | Path, transport: str) -> ServerProcess:
    return ServerProcess.start(*arguments, "--processes", "2", "--metrics-port", "0", transport=transport)


@pytest.fixture
def echo(transport: str, echo_model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """Its log may have errors, because tests kill processes. All that changes a server is allowed."""
    allowed = ("--allow-shared-memory", "--allow-log-settings", "--model-control", "explicit")
    server = started(f"echo={echo_model}", "--model-repository", tmp_path, *allowed, transport=transport)
    yield server
    assert server.stop() == 0, server.log
    assert not [line for line in server.log if "Traceback" in line or "(bug)" in line]


def processes(server: ServerProcess) -> list[int]:
    return observed.of_module(server.process.pid, MODULE)


def echoes(client: InferenceClient, number: float = 0) -> bool:
    """Whether the model answers with its own input."""
    (found,) = client.infer("echo", {"x": X + number}).values()
    np.testing.assert_array_equal(found, X + number)
    return True


def page(server: ServerProcess, path: str = "") -> str:
    url = server.ready["metrics"] if not path else server.ready["metrics"].removesuffix("/metrics") + path
    with urllib.request.urlopen(url, timeout=PATIENCE) as response:
        return str(response.read().decode())


def serving(server: ServerProcess) -> bool:
    return page(server, "/status.json").count('"state":"serving"') == 2


def test_all_methods_are_answered_and_counted_together(echo: ServerProcess) -> None:
    assert len(processes(echo)) == 2
    for number in range(8):
        # A new connection each time, so that both processes get some.
        with InferenceClient(echo.address) as client:
            assert echoes(client, number)
            for response in client.stream("echo", [{"x": X}, {"x": X + 1}]):
                assert response is not None
            assert client.is_ready()
            assert client.is_model_ready("echo")
            assert not client.is_model_ready("other")
            assert client.metadata("echo").properties["server_processes"] == "2"
            (found,) = client.statistics("echo")
    assert found.success.count == 24
    assert not echo.errors()
    counted = [line for line in page(echo).splitlines() if line.startswith("nv_inference_request_success{")]
    assert len(counted) == 2
    assert sum(float(line.rpartition(" ")[2]) for line in counted) == 24


@pytest.mark.parametrize(
    ("method", "message", "cure"),
    [
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="echo"), "send SIGHUP"),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r"), "--processes 1"),
        (
            "LogSettings",
            LOG_NOTHING,
            "give the settings as options",
        ),
    ],
)
def test_changes_of_one_process_are_refused(
    method: str, message: Any, cure: str, echo: ServerProcess
) -> None:
    with grpc.insecure_channel(echo.address) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError, match=cure) as refused:
            getattr(stub, method)(message, timeout=PATIENCE)
    code: Any = refused.value
    assert code.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_killed_process_is_replaced_and_a_client_sees_nothing(echo: ServerProcess) -> None:
    ended, failed = threading.Event(), []

    def call(number: int) -> None:
        with InferenceClient(echo.address) as client:
            while not ended.is_set():
                try:
                    assert echoes(client, number)
                except Exception as error:
                    failed.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            before = processes(echo)
            os.kill(before[0], signal.SIGKILL)
            until(lambda: len({*processes(echo)} - {*before}) == 1)  # noqa: B023
            until(lambda: serving(echo))
            assert before[1] in processes(echo)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert failed == []
    assert any("killed by SIGKILL" in line for line in echo.log)


def test_sighup_replaces_the_processes_one_by_one(transport: str, tmp_path: Path) -> None:
    """So a changed file is served without an outage."""

    def times(factor: int) -> Path:
        nodes = [small.node("Mul", "x factor", "y")]
        return small.save(
            tmp_path / "m.onnx", nodes, [small.value("x")], [small.value("y")], {"factor": np.float32(factor)}
        )

    path = times(2)
    server = started(f"m={path}", transport=transport)
    before = processes(server)
    with InferenceClient(server.address) as client:
        x = np.ones((1, 3), np.float32)
        assert client.infer("m", {"x": x})["y"].tolist() == [[2, 2, 2]]
        times(3)
        server.signal(signal.SIGHUP)
        until(lambda: any("every process has been replaced" in line for line in server.log))
        assert client.infer("m", {"x": x})["y"].tolist() == [[3, 3, 3]]
    assert not {*before} & {*processes(server)}
    assert server.stop() == 0, server.log
    assert not server.errors()


def rows(number: int, *, aborts: bool) -> np.ndarray:
    return np.array([[number, 1, 2, ABORTS if aborts else 0]], dtype=np.float32)


def outcome(server: ServerProcess, x: np.ndarray, request_id: str = "") -> str:
    """Send a request over a connection of its own; return the code of its error, or OK."""
    with grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        infer: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        try:
            answer = infer(request({"x": x}, id=request_id), timeout=PATIENCE)
        except grpc.RpcError as error:
            code: Any = error
            return str(code.code().name)
        found = np.frombuffer(answer.raw_output_contents[0], np.float32)
        np.testing.assert_array_equal(found, (3 * x + 1).ravel())
        return "OK"


def test_a_request_that_ends_processes_is_found_and_refused_and_others_are_answered(
    transport: str, tmp_path: Path
) -> None:
    model = aborting(tmp_path / "aborting.onnx")
    server = started(f"m={model}", "--batching", "trust", transport=transport)
    poison = rows(5, aborts=True)
    ended, failed = threading.Event(), []

    def call() -> None:
        with InferenceClient(server.address) as client:
            for number in itertools.count():
                if ended.is_set():
                    return
                x = rows(number, aborts=False)
                try:
                    np.testing.assert_array_equal(client.infer("m", {"x": x})["y"], 3 * x + 1)
                except Exception as error:
                    failed.append(error)

    good = threading.Thread(target=call)
    good.start()
    try:
        assert outcome(server, poison) == "UNAVAILABLE"
        until(lambda: any("serves again" in line for line in server.log))
        # The second process that it ends runs it alone, once all serve.
        until(lambda: outcome(server, poison), lambda found: found == "INTERNAL")
    finally:
        ended.set()
        good.join()
    assert failed == []
    # By each process, and by whatever id.
    assert {outcome(server, poison, str(number)) for number in range(8)} == {"INTERNAL"}
    ends = [line for line in server.log if "killed by SIGABRT" in line]
    assert len(ends) == 2, server.log
    assert any("ended while it tried one request alone" in line for line in server.log)
    assert server.stop() == 0, server.log
