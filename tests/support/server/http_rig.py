"""HTTP servers over a scripted or a real service, and a client that sends exactly the given bytes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from support.server.rig import PATIENCE
from support.server.scripted_service import ScriptedService

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.methods.core import CoreMethods
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.system.addresses import listen_for_http
from tensorferry.server.transport.http.application import InferenceApplication
from tensorferry.server.transport.http.server import ConnectionLimits, HttpServer
from tensorferry.server.transport.transport_state import TransportState


@dataclass(frozen=True)
class Answer:
    """A response as it came."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error"])


class RawClient:
    """One connection."""

    def __init__(self, port: int, wrap: Callable[[socket.socket], socket.socket] = lambda bare: bare) -> None:
        self.socket = wrap(socket.create_connection(("127.0.0.1", port), PATIENCE))
        self._reader = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, method: str = "GET") -> Answer:
        """Read one response, to a request with this method."""
        line = self._reader.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        headers: dict[str, str] = {}
        while (field := self._reader.readline()) != b"\r\n":
            name, _, value = field.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length", 0))
        status = int(line.split()[1])
        body = self._reader.read(length) if method != "HEAD" and status != 100 else b""
        assert len(body) == length or method == "HEAD"
        return Answer(status, headers, body)

    def ended(self) -> bool:
        """Wait until the server has closed the connection; whether it sent nothing more."""
        try:
            return self._reader.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._reader.close()
        self.socket.close()


@dataclass
class ServedHttp:
    """A server with its service."""

    server: HttpServer
    service: Any
    port: int

    def __post_init__(self) -> None:
        self._clients: list[RawClient] = []

    def client(self) -> RawClient:
        self._clients.append(RawClient(self.port))
        return self._clients[-1]

    def ask(self, data: bytes, method: str = "GET") -> Answer:
        """The answer to a request on a connection of its own."""
        client = self.client()
        client.send(data)
        return client.read(method)

    def infer(self, body: Any, *, path: str = "/v2/models/m/infer", **headers: str) -> Answer:
        """The answer to an inference whose JSON, or whose bytes, are `body`."""
        return self.ask(post(path, body, **headers))

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close(0.0)


def post(path: str, body: Any = b"", **headers: str) -> bytes:
    """A POST request. Underscores in the names of headers stand for hyphens."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if "Transfer_Encoding" not in headers:
        lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode() + data


def get(path: str, **headers: str) -> bytes:
    """A GET request."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


@contextmanager
def served_http(
    registry: ModelRegistry | None = None, service: InferenceService | None = None, **options: Any
) -> Iterator[ServedHttp]:
    """Yield a server over this service, or over a scripted one."""
    registry = registry or ModelRegistry()
    service = service or ScriptedService(registry)
    config = ServerConfig(models=(), **options)
    shared = TransportState(config)
    shared.open()
    listening = listen_for_http("127.0.0.1", 0)
    extensions: Sequence[Any] = [CoreMethods(service, registry, version="1.2.3")]
    server = HttpServer(
        listening,
        partial(InferenceApplication, service, extensions, shared, listening),
        unread=shared.unread,
        tls=shared.tls,
        limits=ConnectionLimits(config.max_connections),
        grpc_address=lambda: "127.0.0.1:8001",
    )
    server.start()
    served = ServedHttp(server, service, listening.getsockname()[1])
    try:
        yield served
    finally:
        served.close()
