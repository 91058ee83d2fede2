from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e import models
from e2e.server import ServerProcess

Serve = Callable[..., ServerProcess]


# `make compat` runs one of them only.
TRANSPORTS = os.environ.get("TRANSPORTS", "threaded lane").split()


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each way in which the server serves ModelInfer and ModelStreamInfer."""
    return str(request.param)


@pytest.fixture
def serve(transport: str) -> Iterator[Serve]:
    """Starts servers; at the end each must stop by SIGTERM with code 0 and no error in its log."""
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
