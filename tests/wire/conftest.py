from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import tritonclient.grpc as triton
from support.processes.server import ServerProcess, running
from support.server.certificates import Issued
from support.server.tokens import line


@pytest.fixture
def client(server: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    """tritonclient, connected to the server of the module."""
    with triton.InferenceServerClient(server.address) as client:
        yield client


class Secured(NamedTuple):
    """A server with TLS, client certificates and tokens, and the files of a client that it accepts."""

    server: ServerProcess
    files: Issued


@pytest.fixture(scope="module")
def secured(transport: str, echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """The tokens are `the-token-to-infer` and `the-token-to-control`."""
    folder = tmp_path_factory.mktemp("secured")
    files, tokens = Issued.in_folder(folder), folder / "tokens"
    tokens.write_text("".join(line(role, role, f"the-token-to-{role}") for role in ("infer", "control")))
    options = (*files.flags, "--auth-tokens", tokens, "--http-port", "0")
    with running(echo_model, *options, transport=transport) as server:
        yield Secured(server, files)
