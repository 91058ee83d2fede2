"""Debian's nginx with the project's configuration in front of two servers: stopping one fails no call."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from deploy.traffic import Traffic
from support.processes.probe import answer, output, request
from support.processes.server import STOP_SECONDS, ServerProcess
from support.wire.programs import CLIENTS

from tensorferry.protos import inference_pb2_grpc

CONFIGURATION = Path(__file__).resolve().parents[2] / "deploy" / "nginx" / "tensorferry.conf"
# The nginx of `make tools`, or of the machine.
NGINX = next(
    (str(path) for path in (CLIENTS / "nginx" / "usr" / "sbin" / "nginx",) if path.exists()),
    shutil.which("nginx") or "",
)
# Longer than nginx keeps a connection: keepalive_time and keepalive_timeout.
DELAY = ("--drain-delay-seconds", "6")
WITHOUT_RETRIES = (("grpc.enable_retries", 0),)

pytestmark = pytest.mark.skipif(
    not NGINX, reason="nginx is not installed: make tools unpacks Debian's, on Debian and its like"
)

MAIN = """
daemon off;
user {user};
worker_processes 2;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/tensorferry.conf;
}}
"""


def configured(servers: Sequence[ServerProcess], socket: Path) -> str:
    """Return the project's file with the addresses of these servers, and a private socket."""
    text = CONFIGURATION.read_text()
    addresses = {f"tensorferry-{index}:8001": server.address for index, server in enumerate(servers)}
    for written, real in {**addresses, "listen 8000 http2;": f"listen unix:{socket} http2;"}.items():
        assert text.count(f" {written}") == 1, f"{CONFIGURATION.name} has {written!r} not once"
        text = text.replace(f" {written}", f" {real}")
    return text


@pytest.fixture
def servers(transport: str, probe_model: Path) -> Iterator[list[ServerProcess]]:
    started = [ServerProcess.start(probe_model, *DELAY, transport=transport) for _ in range(2)]
    yield started
    for server in started:
        if server.process.returncode is None:
            server.process.kill()
            server.wait()
        assert not server.errors()


@pytest.fixture
def balanced(servers: list[ServerProcess], tmp_path: Path) -> Iterator[grpc.Channel]:
    """A channel to nginx, which must end with code 0 and without an error."""
    socket = tmp_path / "nginx.sock"
    (tmp_path / "tensorferry.conf").write_text(configured(servers, socket))
    main = tmp_path / "nginx.conf"
    main.write_text(MAIN.format(folder=tmp_path, user="root" if os.getuid() == 0 else "nobody"))
    with subprocess.Popen([NGINX, "-p", tmp_path, "-c", main], stderr=subprocess.PIPE, text=True) as nginx:
        try:
            with grpc.insecure_channel(f"unix:{socket}", options=WITHOUT_RETRIES) as channel:
                stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
                stub.ModelInfer(request(0), timeout=STOP_SECONDS, wait_for_ready=True)
                yield channel
        finally:
            nginx.terminate()
            _, errors = nginx.communicate(timeout=STOP_SECONDS)
            print(errors)
        assert nginx.returncode == 0, errors


def test_draining_one_of_two_servers_fails_no_call(
    servers: list[ServerProcess], balanced: grpc.Channel
) -> None:
    with Traffic(balanced) as traffic:
        traffic.await_more()
        assert servers[0].stop() == 0
        traffic.await_more()
    assert not traffic.failures
    # The stream that stays open, if it was on this server.
    assert traffic.left <= 1


def test_when_no_server_is_left_the_status_is_unavailable(
    servers: list[ServerProcess], balanced: grpc.Channel
) -> None:
    stub = inference_pb2_grpc.GRPCInferenceServiceStub(balanced)
    response = stub.ModelInfer(request(7), timeout=STOP_SECONDS)
    assert output(response).tolist() == answer(7).tolist()
    for server in servers:
        server.process.kill()
    for server in servers:
        server.wait()
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request(8), timeout=STOP_SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "no server could be reached"
