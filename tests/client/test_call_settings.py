"""Metadata and compression, of a client and of one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from client import either
from client.byte_counter import ByteCounter
from client.calls import call
from client.either import IDS, KINDS, close
from client.scripted import ScriptedServer

from tensorferry.client import InferenceClient, InvalidInput, StreamRequest

ROW = {"x": [1]}
INFERENCE: list[tuple[str, tuple[Any, ...]]] = [
    ("infer", ("row", ROW)), ("submit", ("row", ROW)), ("stream", ("row", [ROW])),
]  # fmt: skip
OTHERS: list[tuple[str, tuple[Any, ...]]] = [
    ("metadata", ("row",)), ("server_metadata", ()), ("models", ()), ("is_live", ()), ("is_ready", ()),
    ("is_model_ready", ("row",)), ("wait_ready", ()), ("load_model", ("row",)), ("unload_model", ("row",)),
    ("model_config", ("row",)), ("statistics", ()), ("trace_settings", ()),
    ("update_trace_settings", ({"trace_rate": 1},)), ("log_settings", ()),
    ("update_log_settings", ({"log_info": True},)),
]  # fmt: skip


@pytest.mark.parametrize(("method", "arguments"), [*INFERENCE, *OTHERS])
def test_metadata_of_a_call_is_added_to_the_clients(
    server: ScriptedServer, client: InferenceClient, method: str, arguments: tuple[Any, ...]
) -> None:
    """The model's metadata is fetched with it, too."""
    call(client, method, *arguments, metadata=[("X-Call", "here"), ("x-bin", b"\0")])
    assert server.servicer.call_metadata
    for sent in server.servicer.call_metadata:
        assert (sent["x-call"], sent["x-bin"]) == ("here", b"\0")
    server.servicer.call_metadata.clear()
    call(client, method, *arguments)
    assert not any("x-call" in sent for sent in server.servicer.call_metadata)


def test_metadata_of_a_call_replaces_the_clients_of_the_same_name(server: ScriptedServer) -> None:
    with InferenceClient(server.target, metadata=[("x-user", "all"), ("x-other", "all")]) as client:
        client.infer("row", ROW, metadata=[("X-User", "one"), ("x-user", "two")])
    for sent in server.servicer.call_metadata:
        assert (sent["x-user"], sent["x-other"]) == ("two", "all")


@pytest.mark.parametrize(("method", "arguments"), INFERENCE)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"compression": "zip"}, "compression expects 'none', 'gzip' or 'deflate', got 'zip'"),
        ({"compression": 1}, "compression expects"),
        ({"metadata": [("a b", "c")]}, "each key of metadata"),
        ({"metadata": {"a": "b"}}, "metadata expects a list of pairs"),
        ({"metadata": [("grpc-timeout", "1S")]}, "the name of a header"),
        ({"metadata": [("a", "\n")]}, "printable ASCII"),
        ({"metadata": None}, "metadata expects a list of pairs"),
    ],
)
def test_wrong_settings_of_a_call_are_refused(
    server: ScriptedServer,
    client: InferenceClient,
    method: str,
    arguments: Any,
    wrong: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(InvalidInput, match=message):
        call(client, method, *arguments, **wrong)
    assert "ModelInfer" not in server.servicer.calls


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("method", ["infer", "submit", "stream"])
@pytest.mark.parametrize(
    ("of_client", "of_call"), [("none", None), ("gzip", None), ("gzip", "none"), ("none", "deflate")]
)
async def test_messages_are_compressed(
    server: ScriptedServer, kind: type[Any], method: str, of_client: str, of_call: str | None
) -> None:
    images = {"image": np.zeros((2000, 8, 8), np.uint8)}
    sent: Any = [StreamRequest(images)] if method == "stream" else images
    with ByteCounter.to(server.target) as counter:
        client = kind(counter.target, compression=of_client)
        result = await either.call(client, method, "digits", sent, compression=of_call)
        await close(client)
        answer = result[0] if method == "stream" else result
        assert answer["image"].shape == (2000, 8, 8)
    compressed = (of_call or of_client) != "none"
    assert (counter.sent < 20_000) == compressed, counter.sent
    assert compressed or counter.sent > 128_000
