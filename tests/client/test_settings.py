"""Settings of a client and of its calls: TLS, limits, tokens, metadata, compression, pickles."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from client.calls import Output, both_clients, call, either, refusal
from client.scripted import ScriptedServer
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider
from support.server.certificates import Issued

from tensorferry import client as tf
from tensorferry.client import InferenceClient, Retry, StreamRequest, Tls, aio
from tensorferry.client.cli import commands
from tensorferry.client.connection.bearer import bearer
from tensorferry.client.connection.channel import channel_options, stream_options
from tensorferry.client.connection.context import with_context

ROW = {"x": [1]}
# Each method of the client that makes a call, with its arguments.
METHODS: list[tuple[str, tuple[Any, ...]]] = [
    ("infer", ("row", ROW)), ("submit", ("row", ROW)), ("stream", ("row", [ROW])), ("metadata", ("row",)),
    ("server_metadata", ()), ("models", ()), ("is_live", ()), ("is_ready", ()), ("is_model_ready", ("row",)),
    ("wait_ready", ()), ("load_model", ("row",)), ("unload_model", ("row",)), ("model_config", ("row",)),
    ("statistics", ()), ("trace_settings", ()), ("update_trace_settings", ({"trace_rate": 1},)), ("log_settings", ()),
    ("update_log_settings", ({"log_info": True},)),
]  # fmt: skip


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    """A certificate authority, a server certificate for 127.0.0.1, and a client certificate."""
    return Issued.in_folder(tmp_path_factory.mktemp("issued"))


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_with_files(issued: Issued, mutual: bool) -> None:
    certificate, key = (path.read_bytes() for path in issued.server)
    clients = issued.ca.read_bytes() if mutual else None
    scripted = ScriptedServer.make(grpc.ssl_server_credentials([(key, certificate)], clients, mutual))
    scripted.server.start()
    target, tls = scripted.target, Tls(issued.ca, *map(str, issued.client)) if mutual else Tls(issued.ca)
    with InferenceClient(target, tls=tls) as client:
        assert client.server_metadata().name == "scripted"
    async with aio.InferenceClient(target, credentials=tls.credentials()) as aclient:
        assert await aclient.is_live()
    arguments = ["--target", target, "--ca-file", str(tls.ca_file)]
    if mutual:
        arguments += ["--cert-file", str(tls.cert_file), "--key-file", str(tls.key_file)]
    assert commands.models(arguments) == 0
    # The system's authorities do not trust it.
    assert commands.models(["--target", target, "--tls"]) == 1
    with InferenceClient(target, tls=True) as client:
        assert not client.is_live()
        with pytest.raises(tf.Unavailable):
            client.server_metadata()
    scripted.server.stop(None).wait()


def test_options_of_the_caller_win_except_retries_of_streams() -> None:
    """Core must not repeat calls that a server may have run."""
    options = channel_options(7, [("grpc.enable_retries", 1), ("grpc.other", "x")])
    found = dict(options)
    assert (found["grpc.enable_retries"], found["grpc.other"]) == (1, "x")
    assert found["grpc.max_receive_message_length"] == 7
    assert "grpc.service_config" not in found
    assert dict(stream_options(options))["grpc.enable_retries"] == 0


def test_metadata_of_a_call_is_added_to_the_clients(server: ScriptedServer) -> None:
    """It replaces metadata of the same name, and the model's metadata is fetched with it, too. So is the token."""
    sent = server.servicer.call_metadata
    of_client = [("x-user", "all"), ("x-other", "all")]
    for method, arguments in METHODS:
        sent.clear()
        with InferenceClient(server.target, metadata=of_client, token="t") as client:
            call(client, method, *arguments, metadata=[("X-User", "one"), ("x-bin", b"\0")])
            assert sent
            for one in sent:
                assert (one["x-user"], one["x-other"], one["x-bin"]) == ("one", "all", b"\0"), method
                assert one["authorization"] == "Bearer t"
            sent.clear()
            call(client, method, *arguments)
            assert not any(one["x-user"] == "one" for one in sent), method


@contextlib.asynccontextmanager
async def counting(target: str, counts: list[int]) -> AsyncIterator[str]:
    """Yield the address of a proxy, which adds up the bytes that clients send."""
    host, _, port = target.rpartition(":")

    async def copy_to(source: asyncio.StreamReader, sink: asyncio.StreamWriter, counted: bool) -> None:
        # Either end may reset its connection.
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                counts[0] += len(data) * counted
                sink.write(data)
            sink.close()
            await sink.wait_closed()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        answers, requests = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy_to(reader, requests, True), copy_to(answers, writer, False))

    connections: list[Any] = []
    async with await asyncio.start_server(connected, "127.0.0.1", 0) as listening:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        await asyncio.gather(*connections)


@pytest.mark.parametrize("method", ["infer", "stream"])
@pytest.mark.parametrize(
    ("of_client", "of_call"), [("none", None), ("gzip", None), ("gzip", "none"), ("none", "deflate")]
)
async def test_messages_are_compressed(
    server: ScriptedServer, method: str, of_client: Any, of_call: str | None
) -> None:
    images = {"image": np.zeros((2000, 8, 8), np.uint8)}
    sent: Any = [StreamRequest(images)] if method == "stream" else images
    counts = [0]
    async with (
        counting(server.target, counts) as target,
        aio.InferenceClient(target, compression=of_client) as client,
    ):
        await either(client, method, "digits", sent, compression=of_call)
    assert (counts[0] < 20_000) == ((of_call or of_client) != "none"), counts


# Bearer tokens


def test_a_token_needs_a_local_target_or_tls_or_consent() -> None:
    for target in (
        "127.9.9.9:1",
        "localhost",
        "[::1]:8001",
        "dns:///localhost:1",
        "ipv4:127.0.0.1:1",
        "unix:a",
    ):
        assert bearer("t", [target], secure=False, over_plaintext=False) == (("authorization", "Bearer t"),)
    for target in (
        "10.0.0.7:1",
        "localhost.example:1",
        "0.0.0.0:1",
        "ipv4:127.0.0.1:1,10.0.0.7:1",
        "dns://10.0.0.7/localhost:1",
        "xds:///localhost",
    ):
        with pytest.raises(ValueError, match="in plain text") as caught:
            InferenceClient(target, token="my-secret")
        assert "my-secret" not in str(caught.value)
        assert bearer("t", [target], secure=True, over_plaintext=False)
        assert bearer("t", [target], secure=False, over_plaintext=True)
    for token in ("", "two words", "a\n", "schlüssel"):
        with pytest.raises(ValueError, match=f"got {len(token)} characters") as caught:
            bearer(token, ["localhost"], secure=True, over_plaintext=False)
        assert not token or token not in str(caught.value)


def test_from_a_file_from_stdin_or_the_environment(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    path = tmp_path / "token"
    path.write_text("of-file\n")
    arguments = ["--target", server.target]
    assert commands.models([*arguments, "--token-file", str(path)]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("of-stdin\n"))
    assert commands.models([*arguments, "--token-file", "-"]) == 0
    for token in ("of-environment", ""):
        monkeypatch.setenv("TENSORFERRY_TOKEN", token)
        assert commands.models(arguments) == 0
    sent = [one.get("authorization") for one in server.servicer.call_metadata]
    assert sent == ["Bearer of-file", "Bearer of-stdin", "Bearer of-environment", None]
    monkeypatch.setenv("TENSORFERRY_TOKEN", "my-secret")
    told = refusal(capsys, commands.models, ["--target", "10.0.0.7:8001"])
    assert "--token-over-plaintext" in told
    assert "my-secret" not in told
    told = refusal(capsys, commands.models, ["--token-file", "/nowhere"])
    assert "argument --token-file: '/nowhere' cannot be read" in told


# OpenTelemetry's context


@pytest.fixture
def span() -> Iterator[trace.Span]:
    with TracerProvider().get_tracer("test").start_as_current_span("caller") as span:
        yield span


def test_every_kind_of_call_carries_the_current_span(
    server: ScriptedServer, client: InferenceClient, span: trace.Span
) -> None:
    ids = span.get_span_context()
    for method, arguments in METHODS[:3]:
        call(client, method, *arguments)
    for metadata in server.servicer.call_metadata:
        assert str(metadata["traceparent"]).startswith(f"00-{ids.trace_id:032x}-{ids.span_id:016x}-")
    own = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    client.infer("row", ROW, metadata=[("Traceparent", own)])
    assert server.servicer.call_metadata[-1]["traceparent"] == own


def test_tracestate_of_another_trace_is_dropped() -> None:
    ids = trace.SpanContext(1, 2, False, trace.TraceFlags(1), trace.TraceState([("vendor", "x")]))
    with trace.use_span(trace.NonRecordingSpan(ids)):
        assert dict(with_context(()))["tracestate"] == "vendor=x"
        assert dict(with_context((("traceparent", "mine"),))) == {"traceparent": "mine"}


def test_baggage_is_sent_without_a_span() -> None:
    token = context.attach(baggage.set_baggage("tenant", "a b"))
    try:
        assert with_context((("x", "y"),)) == (("x", "y"), ("baggage", "tenant=a+b"))
    finally:
        context.detach(token)
    given = (("a", "b"),)
    assert with_context(given) is given


def test_the_client_does_not_import_opentelemetry() -> None:
    program = (
        "import sys; from tensorferry.client.connection.context import with_context; "
        "assert with_context((('a', 'b'),)) == (('a', 'b'),); "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# Pickles


@both_clients
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
        await either(other, "close")
    await either(client, "close")
    with pytest.raises(tf.ClientClosed):
        pickle.dumps(client)
    files = kind("a:1", credentials=grpc.ssl_channel_credentials())
    with pytest.raises(TypeError, match=r"cannot be pickled.*give the files with tls=Tls\(...\)"):
        pickle.dumps(files)
    await either(files, "close")


def test_a_copy_keeps_the_targets_of_the_environment(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORFERRY_TARGET", server.target)
    with InferenceClient() as client:
        data = pickle.dumps(client)
    monkeypatch.setenv("TENSORFERRY_TARGET", "127.0.0.1:1")
    with pickle.loads(data) as other:
        assert other.is_live()
