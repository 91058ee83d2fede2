from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from client.scripted import ScriptedServer, ScriptedServicer, model

from tensorferry.client import InferenceClient, aio


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A running server with the models `digits` (UINT8 images), `text` (BYTES and FP32) and `row` (INT64)."""
    image, text = {"image": "UINT8 -1 8 8"}, {"words": "BYTES -1", "weights": "FP32 -1 2"}
    with ScriptedServer.running() as scripted:
        row = scripted.servicer.models.pop("row")
        scripted.servicer.models |= {
            "digits": model("digits", image, image), "text": model("text", text, text), "row": row,
        }  # fmt: skip
        yield scripted


@pytest.fixture
def other() -> Iterator[ScriptedServer]:
    """A second server with the model `row`."""
    with ScriptedServer.running() as scripted:
        yield scripted


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
