"""Pickles of clients, for other processes."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import grpc
import pytest
from client import spawned
from client.either import KINDS, call
from client.scripted import ScriptedServer

from tensorferry.client import ClientClosed, InferenceClient, Retry, Tls, aio


def test_a_spawned_process_uses_a_client(server: ScriptedServer) -> None:
    context = multiprocessing.get_context("spawn")
    with InferenceClient(server.target, metadata=[("x-user", "me")]) as client:
        assert client.infer("row", {"x": [1]})["x"] == [1]
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            assert pool.submit(spawned.infer, client, 5).result(60) == [5]
            other = aio.InferenceClient(server.target, metadata=[("x-user", "me")])
            assert pool.submit(spawned.infer_async, other, 6).result(60) == [6]
        assert client.infer("row", {"x": [2]})["x"] == [2]
    assert all(metadata["x-user"] == "me" for metadata in server.servicer.call_metadata)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pickle_has_every_argument(kind: type[Any]) -> None:
    arguments: dict[str, Any] = {
        "tls": Tls(), "metadata": [("a", "b")], "compression": "gzip", "max_message_bytes": 1 << 20, "check": False,
        "options": [("grpc.keepalive_time_ms", 30000)], "retry": Retry(attempts=2), "token": "secret", "connections": 2,
    }  # fmt: skip
    client = kind(["a:1", "b:1"], **arguments)
    for other in (pickle.loads(pickle.dumps(client)), copy.copy(client)):
        assert type(other) is kind
        assert other is not client
        defaults = {"credentials": None, "token_over_plaintext": False}
        assert other._arguments == {"target": ("a:1", "b:1"), **defaults, **arguments}
        await call(other, "close")
    await call(client, "close")


async def test_a_copy_keeps_the_targets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFERRY_TARGET", "a:1")
    with InferenceClient() as client:
        data = pickle.dumps(client)
    monkeypatch.setenv("TENSORFERRY_TARGET", "b:1")
    with pickle.loads(data) as other:
        assert other._arguments["target"] == ("a:1",)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_cannot_be_pickled_is_refused(kind: type[Any]) -> None:
    client = kind("a:1", credentials=grpc.ssl_channel_credentials())
    with pytest.raises(TypeError, match=r"cannot be pickled.*give the files with tls=Tls\(...\)"):
        pickle.dumps(client)
    await call(client, "close")
    closed = kind("a:1")
    await call(closed, "close")
    with pytest.raises(ClientClosed):
        pickle.dumps(closed)
