"""Web server of the tests, with ranges and ETags, and with the faults that a test asks for."""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from support.server.certificates import LOCAL, authority, issue


@dataclass(frozen=True)
class Request:
    """A request as it was received."""

    method: str
    path: str
    query: str
    # By their names with capitals, as in Content-Length.
    headers: Mapping[str, str]


@dataclass
class Response:
    """A response. `body` is cut as Range asks."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


Respond = Callable[[Request], Response]


def etag_of(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


class WebServer:
    """Files by their path, with ETags. `respond` can be replaced; by default it serves `files`.

    `cut_after` limits the bytes of the bodies of the next responses, one each, and closes the connection once `hold` is set.
    """

    def __init__(self, folder: Path | None) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.cut_after: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        self.etags = True
        self.respond: Respond = self._file
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                server._answer(self)

            do_GET = do_HEAD = do_POST = handle_any  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = _Quiet(("127.0.0.1", 0), Handler)
        self._scheme = "http"
        if folder is not None:
            signer = authority()
            certificate, key = issue(signer, "localhost", LOCAL).write(folder, "web")
            self.authorities = folder / "web-ca.crt"
            self.authorities.write_bytes(signer.pem)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._scheme = "https"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def paths(self, method: str = "GET") -> list[str]:
        return [request.path for request in self.requests if request.method == method]

    def _file(self, request: Request) -> Response:
        body = self.files.get(request.path)
        if body is None:
            return Response(status=404)
        headers = {"ETag": etag_of(body)} if self.etags else {}
        return Response(body, headers=headers)

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        length = int(handler.headers.get("Content-Length", 0))
        handler.rfile.read(length)
        request = Request(
            str(handler.command),
            unquote(parts.path),
            parts.query,
            {name.title(): value for name, value in handler.headers.items()},
        )
        self.requests.append(request)
        response = _ranged(request, self.respond(request))
        handler.send_response(response.status)
        for name, value in {"Content-Length": str(len(response.body)), **response.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if request.method == "HEAD":
            return
        if self.cut_after and len(response.body) > self.cut_after[0]:
            handler.wfile.write(response.body[: self.cut_after.pop(0)])
            self.hold.wait()
            handler.close_connection = True
        else:
            handler.wfile.write(response.body)


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients close connections whose body they do not need, and refuse certificates."""


def _ranged(request: Request, response: Response) -> Response:
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if match is None or response.status != 200 or not response.body:
        return response
    start, last = int(match[1]), int(match[2] or len(response.body) - 1)
    last = min(last, len(response.body) - 1)
    headers = {**response.headers, "Content-Range": f"bytes {start}-{last}/{len(response.body)}"}
    return Response(response.body[start : last + 1], 206, headers)


@contextmanager
def web_server(folder: Path | None) -> Iterator[WebServer]:
    """Run a server: with TLS if there is a folder for its certificate."""
    server = WebServer(folder)
    try:
        yield server
    finally:
        server.close()
