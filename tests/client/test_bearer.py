"""The client's bearer token: when it is sent, and when it is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client.command_line import Output, refusal
from client.scripted import ScriptedServer

from tensorferry.client import InferenceClient
from tensorferry.client.cli import commands
from tensorferry.client.connection.bearer import bearer


def sent(server: ScriptedServer) -> list[Any]:
    """Return the authorization values, in the order of the calls."""
    return [call.get("authorization") for call in server.servicer.call_metadata]


LOCAL = [
    "127.0.0.1:8001", "127.9.9.9:1", "localhost:8001", "localhost", "[::1]:8001", "::1", "dns:///localhost:8001",
    "dns:localhost:8001", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:8001", "unix:///run/a", "unix:relative",
    "unix-abstract:name",
]  # fmt: skip
OTHERS = [
    "10.0.0.7:8001", "server:8001", "localhost.example:8001", "127.0.0.1.example:8001", "0.0.0.0:8001",
    "[2001:db8::1]:8001", "dns://8.8.8.8/server:8001", "ipv4:127.0.0.1:1,10.0.0.7:1", "xds:///localhost",
]  # fmt: skip


@pytest.mark.parametrize("target", LOCAL)
def test_a_local_target_may_be_plain_text(target: str) -> None:
    assert bearer("t", [target], secure=False, over_plaintext=False) == (("authorization", "Bearer t"),)


@pytest.mark.parametrize("target", OTHERS)
def test_other_targets_need_tls_or_consent(target: str) -> None:
    with pytest.raises(ValueError, match="in plain text") as caught:
        InferenceClient(target, token="my-secret")
    assert "my-secret" not in str(caught.value)
    assert bearer("t", [target], secure=True, over_plaintext=False)
    assert bearer("t", [target], secure=False, over_plaintext=True)


@pytest.mark.parametrize("token", ["", "two words", "a\n", "schlüssel"])
def test_a_malformed_token_is_not_quoted(token: str) -> None:
    with pytest.raises(ValueError, match=f"got {len(token)} characters") as caught:
        bearer(token, ["localhost"], secure=True, over_plaintext=False)
    assert not token or token not in str(caught.value)


def test_the_token_is_sent_with_every_call(server: ScriptedServer) -> None:
    image = {"image": np.zeros((1, 8, 8), np.uint8)}
    with InferenceClient(server.target, token="one") as client:
        client.is_live()
        client.infer("digits", image)
        client.submit("digits", image).result()
        list(client.stream("digits", [image]))
    assert set(sent(server)) == {"Bearer one"}
    assert {"ModelInfer", "ModelStreamInfer", "ModelMetadata", "ServerLive"} == set(server.servicer.calls)


def test_from_a_file_from_stdin_or_the_environment(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text("of-file\n")
    arguments = ["--target", server.target]
    assert commands.models([*arguments, "--token-file", str(path)]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("of-stdin\n"))
    assert commands.models([*arguments, "--token-file", "-"]) == 0
    monkeypatch.setenv("TENSORFERRY_TOKEN", "of-environment")
    assert commands.models(arguments) == 0
    monkeypatch.setenv("TENSORFERRY_TOKEN", "")
    assert commands.models(arguments) == 0
    assert sent(server) == ["Bearer of-file", "Bearer of-stdin", "Bearer of-environment", None]


def test_the_token_is_not_sent_to_other_hosts(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TENSORFERRY_TOKEN", "my-secret")
    told = refusal(capsys, commands.models, ["--target", "10.0.0.7:8001"])
    assert "--token-over-plaintext" in told
    assert "my-secret" not in told


def test_a_file_that_is_missing(capsys: Output) -> None:
    told = refusal(capsys, commands.models, ["--token-file", "/nowhere"])
    assert "argument --token-file: '/nowhere' cannot be read" in told
