from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support.processes import faulty, models
from support.processes.server import ServerProcess

from tensorferry.protos.tensors import DATATYPES

Serve = Callable[..., ServerProcess]


# `make compat` tests one transport only.
TRANSPORTS = os.environ.get("TRANSPORTS", "threaded lane").split()


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport of ModelInfer and ModelStreamInfer."""
    return str(request.param)


class SharedServers:
    """Servers of one test process: one for each list of options, from the first test that needs it to the last test."""

    def __init__(self) -> None:
        self._started: dict[tuple[str, ...], ServerProcess] = {}

    def get(self, *arguments: str | Path, transport: str) -> ServerProcess:
        key = (transport, *map(str, arguments))
        if key not in self._started:
            self._started[key] = ServerProcess.start(*arguments, transport=transport)
        server = self._started[key]
        assert server.process.poll() is None, server.log
        return server

    def stop(self) -> None:
        codes = [server.stop() for server in self._started.values()]
        for code, server in zip(codes, self._started.values(), strict=True):
            assert code == 0, server.log
            assert not server.errors()


@pytest.fixture(scope="session")
def shared_servers() -> Iterator[SharedServers]:
    servers = SharedServers()
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def share(shared_servers: SharedServers, transport: str) -> Serve:
    """Return the server with these options, which other tests use, too: a test must leave it as it was."""
    return partial(shared_servers.get, transport=transport)


@pytest.fixture(scope="module")
def plain(share: Serve, digits_model: Path, probe_model: Path, echo_model: Path) -> ServerProcess:
    """A shared server with the models digits, probe and echo."""
    return share(f"digits={digits_model}", probe_model, echo_model, "--priority-weights", "8,1")


@pytest.fixture(scope="module")
def echoes(share: Serve, model_dir: Path, probe_model: Path) -> ServerProcess:
    """A shared server with an echo model of each datatype, some of other shapes, and probe."""
    served = models.echoes(model_dir, *DATATYPES)
    served += models.echoes(model_dir, "FP32", "BYTES", "FP16", prefix="long", dims=("batch", 3, 50))
    # Without a dynamic first axis there is no batching.
    served += models.echoes(model_dir, "FP32", "BYTES", prefix="scalar", dims=())
    served += models.echoes(model_dir, "FP32", prefix="fixed", dims=(3,))
    return share(probe_model, *served, "--max-message-bytes", "32MiB")


@pytest.fixture
def serve(transport: str) -> Iterator[Serve]:
    """Start servers; at the end each must stop on SIGTERM with code 0 and without an error in its log."""
    started: list[ServerProcess] = []

    def start(*arguments: str | Path) -> ServerProcess:
        server = ServerProcess.start(*arguments, transport=transport)
        started.append(server)
        return server

    yield start
    for server in started:
        stopped_before = server.process.poll() is not None
        code = server.stop()
        assert stopped_before or code == 0, server.log
        assert not server.errors()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def probe_model(model_dir: Path) -> Path:
    return models.probe(model_dir / "probe.onnx")


@pytest.fixture(scope="session")
def mixing_model(model_dir: Path) -> Path:
    return models.mixing(model_dir / "mixing.onnx")


@pytest.fixture(scope="session")
def echo_model(model_dir: Path) -> Path:
    return models.echo(model_dir / "echo.onnx")


@pytest.fixture(scope="session")
def digits_model() -> Path:
    return Path(__file__).resolve().parents[2] / "examples" / "digits" / "digits.onnx"


@pytest.fixture
def serve_faulty(transport: str, probe_model: Path) -> Iterator[Serve]:
    """Serve the probe model on a device that fails on request."""
    started: list[tuple[ServerProcess, bool]] = []

    def start(*arguments: str, expects_falls: bool = False, **variables: str) -> ServerProcess:
        program = [sys.executable, str(Path(faulty.__file__))]
        server = ServerProcess.start(
            probe_model, *arguments, transport=transport, program=program, variables=variables
        )
        started.append((server, expects_falls))
        return server

    yield start
    for server, expects_falls in started:
        if server.process.poll() is None:
            assert server.stop() == 0, server.log
        assert expects_falls or not any(
            "Traceback" in line or "this is a bug" in line for line in server.log
        ), server.log
