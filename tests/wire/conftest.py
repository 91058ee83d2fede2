from __future__ import annotations

from collections.abc import Iterator

import pytest
import tritonclient.grpc as triton
from support.processes.server import ServerProcess


@pytest.fixture
def client(server: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    """tritonclient, connected to the server of the module."""
    with triton.InferenceServerClient(server.address) as client:
        yield client
