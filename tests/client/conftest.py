from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from client.either import IDS, KINDS, Client, close
from client.scripted import ScriptedServer, ScriptedServicer, model

from tensorferry.client import InferenceClient, aio


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A running server with the models `digits` (UINT8 images) and `text` (BYTES and FP32)."""
    scripted = ScriptedServer.make()
    scripted.servicer.models = {
        "digits": model("digits", {"image": "UINT8 -1 8 8"}, {"image": "UINT8 -1 8 8"}),
        "text": model(
            "text",
            {"words": "BYTES -1", "weights": "FP32 -1 2"},
            {"words": "BYTES -1", "weights": "FP32 -1 2"},
        ),
        "row": model("row", {"x": "INT64 1"}, {"x": "INT64 1"}),
    }
    scripted.server.start()
    yield scripted
    scripted.server.stop(None).wait()


@pytest.fixture
def servicer(server: ScriptedServer) -> ScriptedServicer:
    return server.servicer


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[InferenceClient]:
    with InferenceClient(server.target) as client:
        yield client


@pytest.fixture
async def aclient(server: ScriptedServer) -> AsyncIterator[aio.InferenceClient]:
    async with aio.InferenceClient(server.target) as client:
        yield client


@pytest.fixture(params=KINDS, ids=IDS)
async def either(server: ScriptedServer, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """Each client in turn; `client.either.call` calls its methods."""
    client = request.param(server.target)
    yield client
    await close(client)
