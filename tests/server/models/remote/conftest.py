from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.remote.s3_server import S3Server, s3_server
from support.remote.web_server import WebServer, web_server


@pytest.fixture
def web(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A web server with TLS, whose authority this process trusts."""
    with web_server(tmp_path_factory.mktemp("certificates")) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(server.authorities))
        yield server


@pytest.fixture
def plain_web() -> Iterator[WebServer]:
    """A web server without TLS."""
    with web_server(None) as server:
        yield server


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server of S3 that this process finds by its environment."""
    for name, value in s3_process.variables.items():
        monkeypatch.setenv(name, value)
    return s3_process


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
