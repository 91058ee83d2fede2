"""A server of several processes: front-ends and an engine. What one process does is tested with FRONT_ENDS=2."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from polling import PATIENCE, until
from support.processes.server import ServerProcess, running

from tensorferry.client import InferenceClient, Unavailable
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def echo(transport: str, echo_model: Path) -> Iterator[ServerProcess]:
    """Its log may have errors, because tests kill processes."""
    server = ServerProcess.start(
        f"echo={echo_model}", "--front-ends", "2", "--metrics-port", "0", transport=transport
    )
    yield server
    assert server.stop() == 0, server.log
    assert not [line for line in server.log if "Traceback" in line or "this is a bug" in line]


def processes(server: ServerProcess, module: str) -> list[int]:
    """The ids of a server's processes of this module."""
    parent = server.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = []
    for child in children:
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            # It has just ended.
            continue
        if f"tensorferry.server.{module}".encode() in words:
            found.append(int(child))
    return found


def echoes(client: InferenceClient, number: float = 0) -> bool:
    """Whether the model answers with its own input."""
    (found,) = client.infer("echo", {"x": X + number}).values()
    np.testing.assert_array_equal(found, X + number)
    return True


def answers(client: InferenceClient) -> bool:
    """Whether the server answers again; while it restarts a process, it says UNAVAILABLE."""
    try:
        return echoes(client)
    except Unavailable:
        return False


def test_log_settings_hold_in_every_process_and_in_those_that_replace_it(
    transport: str, echo_model: Path
) -> None:
    def verbose_level(server: ServerProcess, *change: int) -> int:
        asked = pb.LogSettingsRequest()
        for level in change:
            asked.settings["log_verbose_level"].uint32_param = level
        with grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                return int(stub.LogSettings(asked, timeout=30).settings["log_verbose_level"].uint32_param)
            except grpc.RpcError:
                return -1

    def front_end_writes_debug_lines() -> bool:
        before = len(server.log)
        # Front-ends answer health, and log errors at the debug level.
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(server.address, options) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)(b"malformed", timeout=30)
        return any("answering with INVALID_ARGUMENT" in line for line in server.log[before:])

    arguments = (f"echo={echo_model}", "--front-ends", "2", "--allow-log-settings")
    with running(*arguments, transport=transport, logs_errors=True) as server:
        assert not front_end_writes_debug_lines()
        assert verbose_level(server, 1) == 1
        assert until(front_end_writes_debug_lines)
        for module in ("front_end", "engine"):
            ended = processes(server, module)
            for process in ended:
                os.kill(process, signal.SIGKILL)
            until(lambda: len({*processes(server, module)} - {*ended}) == len(ended))  # noqa: B023
            assert until(lambda: verbose_level(server) == 1)
            assert until(front_end_writes_debug_lines)


def health(server: ServerProcess) -> object:
    with grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        asked = health_pb2.HealthCheckRequest(service="echo")
        try:
            return health_pb2_grpc.HealthStub(channel).Check(asked, timeout=30).status
        except grpc.RpcError:
            # The connection went to a process that has just ended.
            return health_pb2.HealthCheckResponse.UNKNOWN


def test_front_ends_answer_all_methods_and_are_counted_together(echo: ServerProcess) -> None:
    assert len(processes(echo, "engine")) == 1
    assert len(processes(echo, "front_end")) == 2
    for number in range(8):
        # A new connection each time, so that both front-ends get some.
        with InferenceClient(echo.address) as client:
            assert echoes(client, number)
            for response in client.stream("echo", [{"x": X}, {"x": X + 1}]):
                assert response is not None
            assert client.is_ready()
            assert client.is_model_ready("echo")
            assert not client.is_model_ready("other")
    with grpc.insecure_channel(echo.address) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.TraceSetting(pb.TraceSettingRequest()).settings
    assert not echo.errors()
    assert not any("TraceSetting is called by" in line for line in echo.log), "only named clients are logged"
    page = urllib.request.urlopen(echo.ready["metrics"]).read().decode()
    assert 'nv_inference_request_success{model="echo",version="1"} 24' in page


def test_a_front_end_that_is_killed_is_replaced_and_the_others_serve_on(echo: ServerProcess) -> None:
    first, second = processes(echo, "front_end")
    os.kill(first, signal.SIGKILL)
    until(lambda: len({*processes(echo, "front_end")} - {first, second}) == 1)
    assert second in processes(echo, "front_end")
    with InferenceClient(echo.address) as client:
        assert until(lambda: answers(client))


def metrics(server: ServerProcess) -> str:
    """The page of the metrics. It waits while the engine restarts; a request that the old engine had accepted fails."""
    try:
        with urllib.request.urlopen(server.ready["metrics"], timeout=PATIENCE) as response:
            return str(response.read().decode())
    except OSError:
        return ""


def test_an_engine_that_is_killed_is_replaced_and_connections_live_on(echo: ServerProcess) -> None:
    front_ends = processes(echo, "front_end")
    (engine,) = processes(echo, "engine")
    with InferenceClient(echo.address) as client:
        assert echoes(client)
        os.kill(engine, signal.SIGKILL)
        restarts = 'tensorferry_process_restarts_total{process="engine"} 1.0'
        assert until(lambda: restarts in metrics(echo))
        assert processes(echo, "engine") not in ([], [engine])
        assert until(lambda: answers(client))
    assert processes(echo, "front_end") == front_ends
    until(lambda: health(echo) == health_pb2.HealthCheckResponse.SERVING)
    assert any("killed by SIGKILL" in line for line in echo.log)
