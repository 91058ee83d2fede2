"""Channels: TLS, limits, options, and call metadata."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from client.scripted import ScriptedServer
from support.server.certificates import Issued

from tensorferry import client as tf
from tensorferry.client import InferenceClient, Tls, aio
from tensorferry.client.cli import commands
from tensorferry.client.connection import channel


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    """A certificate authority, a server certificate for 127.0.0.1, and a client certificate."""
    return Issued.in_folder(tmp_path_factory.mktemp("issued"))


@pytest.fixture(params=[False, True])
def secure(request: pytest.FixtureRequest, issued: Issued) -> Iterator[tuple[str, Tls]]:
    """Target of a server with TLS, mutual or not, and the client's files for it."""
    mutual: bool = request.param
    certificate, key = (path.read_bytes() for path in issued.server)
    clients = issued.ca.read_bytes() if mutual else None
    scripted = ScriptedServer.make(grpc.ssl_server_credentials([(key, certificate)], clients, mutual))
    scripted.server.start()
    yield scripted.target, Tls(issued.ca, *map(str, issued.client)) if mutual else Tls(issued.ca)
    scripted.server.stop(None).wait()


async def test_tls_with_files(secure: tuple[str, Tls]) -> None:
    target, tls = secure
    with InferenceClient(target, tls=tls) as client:
        assert client.server_metadata().name == "scripted"
    with InferenceClient(target, credentials=tls.credentials()) as client:
        assert client.is_live()
    async with aio.InferenceClient(target, tls=tls) as aclient:
        assert (await aclient.server_metadata()).name == "scripted"


def test_a_server_that_is_not_trusted_is_not_used(secure: tuple[str, Tls]) -> None:
    with InferenceClient(secure[0], tls=True) as client:
        assert not client.is_live()
        with pytest.raises(tf.Unavailable):
            client.server_metadata()


def test_the_commands_speak_tls(secure: tuple[str, Tls]) -> None:
    target, tls = secure
    arguments = ["--target", target, "--ca-file", str(tls.ca_file)]
    if tls.cert_file:
        arguments += ["--cert-file", str(tls.cert_file), "--key-file", str(tls.key_file)]
    assert commands.models(arguments) == 0
    assert commands.models(["--target", target, "--tls"]) == 1


def test_conflicting_options_are_refused() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        InferenceClient("127.0.0.1:1", tls=True, credentials=grpc.ssl_channel_credentials())
    with pytest.raises(ValueError, match="cert_file and key_file together"):
        Tls(cert_file="cert.pem")
    with pytest.raises(ValueError, match="max_message_bytes expects an int from 1 to 2147483647, got 0"):
        InferenceClient("127.0.0.1:1", max_message_bytes=0)
    with pytest.raises(ValueError, match="metadata 'x-bin' expects bytes, got str"):
        InferenceClient("127.0.0.1:1", metadata=[("x-bin", "text")])
    with pytest.raises(ValueError, match="metadata 'x' expects str, got bytes"):
        InferenceClient("127.0.0.1:1", metadata=[("x", b"bytes")])


def test_options_of_the_caller_win() -> None:
    options = dict(channel.channel_options(7, [("grpc.enable_retries", 0), ("grpc.other", "x")]))
    assert options["grpc.enable_retries"] == 0
    assert options["grpc.other"] == "x"
    assert options["grpc.max_receive_message_length"] == 7
    assert "grpc.service_config" not in options, "core must not repeat calls that a server may have run"


def test_max_message_bytes_bounds_a_message(server: ScriptedServer) -> None:
    images = np.zeros((100, 8, 8), np.uint8)
    with InferenceClient(server.target, max_message_bytes=4096) as client:
        client.infer("digits", {"image": images[:10]})
        with pytest.raises(tf.ResourceExhausted, match="larger than max"):
            client.infer("digits", {"image": images})
