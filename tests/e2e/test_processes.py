"""A server of several processes on one port. What one process does is tested with SERVER_PROCESSES=2.

tests/crashes has requests that end processes.
"""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from polling import PATIENCE, until
from support.models import small
from support.processes import observed
from support.processes.probe import stub_of
from support.processes.server import ServerProcess, run_command, running

from tensorferry.client import InferenceClient, Unavailable
from tensorferry.protos import inference_pb2 as pb

MODULE = "tensorferry.server.processes"
LOG_NOTHING = pb.LogSettingsRequest()
LOG_NOTHING.settings["log_info"].bool_param = False
_HANGS = """
from pathlib import Path
from threading import Event
from tensorferry.serving import FP32, model

@model(inputs={{"x": FP32[-1, 4]}}, outputs={{"y": FP32[-1, 4]}}, check=False)
def hang(x):
    Path({begun!r}).touch()
    Event().wait()
"""
X = np.arange(12, dtype=np.float32).reshape(3, 4)


def times(path: Path, factor: int) -> Path:
    nodes = [small.node("Mul", "x factor", "y")]
    return small.save(path, nodes, [small.value("x")], [small.value("y")], {"factor": np.float32(factor)})


@pytest.fixture(scope="module")
def factor_file(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a model that a test replaces, so each transport has its own."""
    return times(tmp_path_factory.mktemp("processes") / "times.onnx", 2)


@pytest.fixture(scope="module")
def server(transport: str, echo_model: Path, factor_file: Path) -> Iterator[ServerProcess]:
    """Its log may have errors, because tests kill processes. All that changes a server is allowed."""
    repository = factor_file.with_name("repository")
    repository.mkdir()
    allowed = ("--allow-shared-memory", "--allow-log-settings", "--model-control", "explicit")
    options = ("--processes", "2", "--metrics-port", "0")
    server = ServerProcess.start(
        f"echo={echo_model}",
        factor_file,
        "--model-repository",
        repository,
        *allowed,
        *options,
        transport=transport,
    )
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


def serving(server: ServerProcess) -> bool:
    return server.page("/status.json").count('"state":"serving"') == 2


def test_all_methods_are_answered_and_counted_together(server: ServerProcess) -> None:
    assert len(processes(server)) == 2
    for number in range(8):
        # A new connection each time, so that both processes get some.
        with InferenceClient(server.address) as client:
            assert echoes(client, number)
            for response in client.stream("echo", [{"x": X}, {"x": X + 1}]):
                assert response is not None
            assert client.is_ready()
            assert client.is_model_ready("echo")
            assert not client.is_model_ready("other")
            assert client.metadata("echo").properties["server_processes"] == "2"
            (found,) = client.statistics("echo")
    assert found.success.count == 24
    assert not server.errors()
    counted = [
        line
        for line in server.page().splitlines()
        if line.startswith("nv_inference_request_success{") and 'model="echo"' in line
    ]
    assert len(counted) == 2
    assert sum(float(line.rpartition(" ")[2]) for line in counted) == 24


@pytest.mark.parametrize(
    ("method", "message", "cure"),
    [
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="echo"), "send SIGHUP"),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r"), "--processes 1"),
        ("LogSettings", LOG_NOTHING, "give the settings as options"),
    ],
)
def test_changes_of_one_process_are_refused(
    method: str, message: Any, cure: str, server: ServerProcess
) -> None:
    with stub_of(server.address) as stub, pytest.raises(grpc.RpcError, match=cure) as refused:
        getattr(stub, method)(message, timeout=PATIENCE)
    code: Any = refused.value
    assert code.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_killed_process_is_replaced_and_a_client_sees_nothing(server: ServerProcess) -> None:
    ended = threading.Event()

    def call(number: int) -> None:
        with InferenceClient(server.address) as client:
            while not ended.is_set():
                assert echoes(client, number)

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(call, number) for number in range(4)]
        try:
            before = processes(server)
            os.kill(before[0], signal.SIGKILL)
            until(lambda: len({*processes(server)} - {*before}) == 1)
            until(lambda: serving(server))
            assert before[1] in processes(server)
        finally:
            ended.set()
        for each in calls:
            each.result()
    until(lambda: any("killed by SIGKILL" in line for line in server.log))


def test_sighup_replaces_the_processes_one_by_one(server: ServerProcess, factor_file: Path) -> None:
    """So a changed file is served without an outage."""
    before, errors = processes(server), len(server.errors())
    with InferenceClient(server.address) as client:
        x = np.ones((1, 3), np.float32)
        assert client.infer("times", {"x": x})["y"].tolist() == [[2, 2, 2]]
        times(factor_file, 3)
        server.signal(signal.SIGHUP)
        until(lambda: any("every process has been replaced" in line for line in server.log))
        assert client.infer("times", {"x": x})["y"].tolist() == [[3, 3, 3]]
    assert not {*before} & {*processes(server)}
    assert len(server.errors()) == errors


def test_a_long_reason_of_a_failed_start_is_printed(tmp_path: Path) -> None:
    app, reason = tmp_path / "app.py", "é" * 15_000
    app.write_text(f"raise RuntimeError({reason!r})")
    failed = run_command("serve", app, "--processes", "2")
    assert failed.returncode == 1
    assert failed.stderr.count(f"RuntimeError: {reason}") == 1
    assert "(bug)" not in failed.stderr


def test_sighup_changes_no_port_and_reports_a_bad_file(
    transport: str, echo_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("http-port = 0")
    given = (echo_model, "--config", file, "--processes", "2")
    with running(*given, transport=transport, logs_errors=True) as server:
        http = server.ready["http"]
        # Each process would fail to listen on it.
        file.write_text(f"metrics-port = {http.rpartition(':')[2]}")
        server.signal(signal.SIGHUP)
        until(lambda: any("every process has been replaced" in line for line in server.log))
        with urllib.request.urlopen(f"{http}/v2/health/ready", timeout=PATIENCE) as response:
            assert response.status == 200
        file.write_text("max-batch-sizes = 3")
        server.signal(signal.SIGHUP)
        until(lambda: any("cannot serve: " in line for line in server.log))
    reason = next(line for line in server.log if "cannot serve: " in line)
    assert "c.toml has the unknown key 'max-batch-sizes'; did you mean max-batch-size?" in reason
    assert not [line for line in server.log if "Traceback" in line]


def test_a_request_that_outlasts_the_drain_keeps_no_process(transport: str, tmp_path: Path) -> None:
    begun, app = tmp_path / "begun", tmp_path / "app.py"
    app.write_text(_HANGS.format(begun=str(begun)))
    server = ServerProcess.start(app, "--processes", "2", "--drain-seconds", "0.2", transport=transport)
    with InferenceClient(server.address) as client:
        future = client.submit("hang", {"x": X}, timeout=PATIENCE)
        until(begun.exists, bool)
        server.signal()
        with pytest.raises(Unavailable):
            future.result(PATIENCE)
    assert server.wait() == 0
    log = "".join(server.log)
    assert "requests were still running after 0.2 s: they fail now" in log
    assert "exit status 1" in log
    assert "killed" not in log
