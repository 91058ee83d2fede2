"""An exception escapes from a thread: the thread is restarted, or its process ends and says why."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e.failures.test_device_failure import SERVING, message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from polling import PATIENCE, until
from support.processes import observed, thrower
from support.processes.server import ServerProcess

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

# Threads whose end ends the process of a server: the one that polls for grpcio, and the main one.
_ESSENTIAL = ("(_serve)", "MainThread")
_FUNCTION = """
from tensorferry.serving import FP32, model

@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, processes=1)
def plus_one(x):
    return x + 1
"""


class Rig:
    """Servers into whose threads exceptions are thrown, one after the other."""

    def __init__(self, folder: Path, transport: str, *arguments: str | Path) -> None:
        self._folder = folder
        self._transport = transport
        (folder / "repository").mkdir()
        self._arguments = (
            *arguments,
            *(
                "--metrics-port",
                "0",
                "--run-timeout-seconds",
                "10",
                "--access-log",
                "100",
                "--batching",
                "trust",
            ),
            *("--model-repository", folder / "repository", "--model-control", "explicit"),
        )
        self.server = self._started()

    def _started(self) -> ServerProcess:
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH")]))
        return ServerProcess.start(
            *self._arguments, transport=self._transport, variables=thrower.variables(self._folder, path)
        )

    def start_again(self) -> None:
        """Start another server if the last one has ended."""
        if self.server.process.poll() is not None:
            self.server.wait()
            self.server = self._started()

    def use_every_thread(self) -> None:
        """Let the server do what its threads are for. Calls may fail."""
        uses: list[Callable[[grpc.Channel], object]] = [
            self._infer,
            lambda channel: _stub(channel).ModelInfer(_plus_one(), timeout=PATIENCE),
            self._expire,
            self._ask_for_health,
            lambda channel: _stub(channel).ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE),
            lambda channel: _stub(channel).RepositoryModelLoad(
                pb.RepositoryModelLoadRequest(model_name="absent"), timeout=1
            ),
            lambda channel: self.server.page(),
        ]
        with grpc.insecure_channel(self.server.address, [("grpc.enable_retries", 0)]) as channel:
            for use in uses:
                with suppress(grpc.RpcError, OSError):
                    use(channel)

    def _infer(self, channel: grpc.Channel) -> None:
        stub = _stub(channel)
        # The message is long enough to be compressed, and so heavy that a worker runs it.
        stub.ModelInfer(message(1.0, rows=8, work=200), timeout=PATIENCE, compression=grpc.Compression.Gzip)

    def _ask_for_health(self, channel: grpc.Channel) -> None:
        health = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        next(health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE))

    def _expire(self, channel: grpc.Channel) -> None:
        busy = _stub(channel).ModelInfer.future(message(1.0, work=500), timeout=PATIENCE)
        # Queued, because its time suffices on a slow machine; the thread that would end it looks at it.
        queued = _stub(channel).ModelInfer.future(message(1.0), timeout=5)
        queued.exception()
        busy.exception()

    def threads(self, process: int | None = None) -> Mapping[str, int]:
        """Return the threads of the server, or of a process of it, with the exceptions that were raised there."""
        return thrower.threads(self._folder, process or self.server.process.pid)

    def full_name(self, last: str, process: int | None = None) -> str:
        """Return the name of the thread that ends with this word, once it has begun. grpcio's has a number before it."""

        def found() -> list[str]:
            # The process may be starting.
            with suppress(OSError):
                return [each for each in self.threads(process) if each.rpartition(" ")[2] == last]
            return []

        (name,) = until(found)
        return name

    def throw(self, name: str, process: int | None = None) -> None:
        """Throw an exception into a thread. It is raised when the thread runs next."""
        assert thrower.throw(self._folder, process or self.server.process.pid, name)

    def raised(self, name: str, process: int | None = None) -> bool:
        """Use every thread; return whether the exception was raised in this one, which may have ended the process."""
        self.use_every_thread()
        try:
            return self.threads(process).get(name, 1) > 0
        except OSError:
            return True

    def ended_by_sigterm(self) -> bool:
        """Send SIGTERM; return whether the server has ended."""
        self.server.signal()
        return self.server.process.poll() is not None

    def answers(self, model: str) -> None:
        """Return once requests to a model are answered, and its health is SERVING."""
        with grpc.insecure_channel(self.server.address, [("grpc.enable_retries", 0)]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = message(1.0) if model == "probe" else _plus_one()
            until(lambda: _status(channel, request), "OK".__eq__)
            check = health_pb2.HealthCheckRequest(service=model)
            until(lambda: health.Check(check, timeout=PATIENCE).status, SERVING.__eq__)


@pytest.fixture
def folder() -> Iterator[Path]:
    # The path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="thrown-") as folder:
        yield Path(folder)


@pytest.fixture
def app(folder: Path) -> Path:
    app = folder / "app.py"
    app.write_text(_FUNCTION)
    return app


def _stub(channel: grpc.Channel) -> Any:
    return inference_pb2_grpc.GRPCInferenceServiceStub(channel)


def _status(channel: grpc.Channel, request: pb.ModelInferRequest) -> str:
    """Return `OK` for an answer. UNAVAILABLE is the only other status that a restart explains."""
    try:
        _stub(channel).ModelInfer(request, timeout=PATIENCE)
    except grpc.RpcError as error:
        known: Any = error
        assert known.code() is grpc.StatusCode.UNAVAILABLE, known.details()
        return str(known.details())
    return "OK"


def _plus_one() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="plus_one", raw_input_contents=[bytes(4)])
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    return request


@contextmanager
def _rig(*arguments: Any) -> Iterator[Rig]:
    rig = Rig(*arguments)
    try:
        yield rig
    finally:
        rig.server.process.kill()
        rig.server.wait()
        # Shown if the test fails.
        print(*rig.server.log, sep="\n")


def test_each_thread_is_restarted_or_ends_its_process(
    transport: str, folder: Path, probe_model: Path
) -> None:
    with _rig(folder, transport, probe_model) as rig:
        # The thread that started the server ends after the ready line.
        names = until(rig.threads, lambda names: "start" not in names).keys()
        assert {
            "log-writer",
            "watchdog",
            "metrics",
            "model-control",
            "probe-worker-0",
            "probe-expiry",
        } <= names
        for name in sorted(names):
            rig.start_again()
            name = rig.full_name(name.rpartition(" ")[2])
            rig.throw(name)
            if name == "signals":
                # The first one may be lost with the exception.
                until(rig.ended_by_sigterm)
                assert rig.server.wait() in (0, 128 + signal.SIGTERM)
            elif name.endswith(_ESSENTIAL):
                if name == "MainThread":
                    rig.server.signal(signal.SIGTERM)
                until(lambda: rig.raised(name))  # noqa: B023
                assert rig.server.wait() == 1, rig.server.log
                last = json.loads(rig.server.log[-1])["message"]
                assert "the process exits with status 1" in last
                assert f"{name}, which ended by ThrownError: thrown by a test" in last
            else:
                until(lambda: rig.raised(name))  # noqa: B023
                rig.answers("probe")
                assert rig.server.process.poll() is None, rig.server.log


def test_a_process_of_a_function_is_started_again(transport: str, folder: Path, app: Path) -> None:
    with _rig(folder, transport, app) as rig:
        (process,) = observed.of_module(
            rig.server.process.pid, "tensorferry.server.processes.functions.in_child"
        )
        rig.throw("MainThread", process)
        until(lambda: rig.raised("MainThread", process))
        rig.answers("plus_one")


def test_each_thread_of_a_server_process_is_restarted_or_ends_the_process(
    transport: str, folder: Path, probe_model: Path
) -> None:
    with _rig(folder, transport, probe_model, "--processes", "2") as rig:
        for name in ("control", "peers", "(_serve)", "probe-worker-0"):
            rig.answers("probe")
            process, _ = until(
                lambda: observed.of_module(rig.server.process.pid, "tensorferry.server.processes"),
                lambda found: len(found) == 2,
            )
            name = rig.full_name(name, process)
            rig.throw(name, process)
            until(lambda: rig.raised(name, process))  # noqa: B023
            rig.answers("probe")
