from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes import faulty, models
from support.processes.server import ServerProcess

Serve = Callable[..., ServerProcess]


# `make compat` tests one transport only.
TRANSPORTS = os.environ.get("TRANSPORTS", "threaded lane").split()


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport of ModelInfer and ModelStreamInfer."""
    return str(request.param)


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
