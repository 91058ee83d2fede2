"""Answers of web servers that are not the file: each is described, with what to change."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.remote.web_server import Response, WebServer, web_server

from tensorferry.server.remote.failures import ChangedError, RemoteError, UnreachableError
from tensorferry.server.remote.https import HttpsStore
from tensorferry.server.remote.stores import RemoteFile
from tensorferry.server.remote.url import parse_file


@contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
    """Send an answer to one connection, which stays open. Yield the server's address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
                done.wait()

        done = threading.Event()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (
            401,
            RemoteError,
            "permission denied; the credentials may not read it, or there are none: use an address",
        ),
        (403, RemoteError, "permission denied"),
        (404, RemoteError, "there is no such file or directory; check the address"),
        (410, RemoteError, "there is no such file"),
        (418, RemoteError, "the host answered with HTTP status 418"),
        (429, UnreachableError, "the host answered with HTTP status 429; try again later"),
        (503, UnreachableError, "the host answered with HTTP status 503; try again later"),
    ],
)
def test_a_status_is_described(web: WebServer, status: int, kind: type[RemoteError], said: str) -> None:
    web.respond = lambda request: Response(status=status)
    with pytest.raises(RemoteError) as caught:
        HttpsStore().describe(parse_file(f"{web.url}/m.onnx"))
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{web.url}/m.onnx: {said}")


def test_a_certificate_of_an_unknown_authority_is_refused(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    with pytest.raises(RemoteError, match=r"certificate is not trusted .*SSL_CERT_FILE") as caught:
        HttpsStore().describe(parse_file(f"{web.url}/m.onnx"))
    assert not isinstance(caught.value, UnreachableError)
    assert not web.requests


def test_a_name_without_an_address_is_a_failure_of_dns() -> None:
    with pytest.raises(UnreachableError, match=r"cannot be resolved \(DNS\)"):
        HttpsStore().describe(parse_file("https://no-such-host.invalid/m.onnx"))


def test_a_closed_port_is_unreachable(web: WebServer) -> None:
    web.close()
    with pytest.raises(UnreachableError, match=r"cannot be reached \(Connection refused\)"):
        HttpsStore().describe(parse_file(f"{web.url}/m.onnx"))


def test_a_server_that_says_nothing_is_unreachable() -> None:
    # The system accepts the connection, but nothing is read from it.
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(UnreachableError, match=r"cannot be reached"),
    ):
        HttpsStore(timeout=0.01).describe(parse_file(f"https://127.0.0.1:{silent.getsockname()[1]}/m.onnx"))


def test_redirects_are_followed_without_credentials(web: WebServer) -> None:
    web.files["/there.onnx"] = b"content"
    serve = web.respond
    web.respond = lambda request: (
        Response(status=302, headers={"Location": f"{web.url}/there.onnx"})
        if request.path == "/here.onnx"
        else serve(request)
    )
    address = f"{web.url}/here.onnx".replace("://", "://user:secret@")
    described = HttpsStore().describe(parse_file(address))
    assert described.size == 7
    first, second = web.requests
    assert first.headers["Authorization"] == "Basic dXNlcjpzZWNyZXQ="
    assert "Authorization" not in second.headers


def test_a_redirect_to_plain_http_is_refused(web: WebServer) -> None:
    with web_server(None) as plain:
        plain.files["/m.onnx"] = b"content"
        web.respond = lambda request: Response(status=302, headers={"Location": f"{plain.url}/m.onnx"})
        with pytest.raises(RemoteError, match=r"redirects to an address that is not https://"):
            HttpsStore().describe(parse_file(f"{web.url}/m.onnx"))
        assert not plain.requests


def test_a_file_that_is_not_as_described_has_changed(web: WebServer) -> None:
    web.files["/m.onnx"] = b"content"
    file = RemoteFile(parse_file(f"{web.url}/m.onnx"), '"older"', 7)
    for offset in (0, 3):
        with pytest.raises(ChangedError):
            HttpsStore().read(file, offset)


def test_the_body_of_a_redirect_is_not_read(plain_web: WebServer) -> None:
    plain_web.files["/m.onnx"] = b"content"
    with raw_server(
        b"HTTP/1.1 302 Found\r\nContent-Length: 1000000000000\r\n"
        b"Location: " + plain_web.url.encode() + b"/m.onnx\r\n\r\n"
    ) as address:
        assert HttpsStore(timeout=1.0).describe(parse_file(f"{address}/here.onnx")).size == 7


def test_what_has_arrived_is_returned_before_a_slow_host_sends_more() -> None:
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nten bytes.") as address:
        file = RemoteFile(parse_file(f"{address}/m.onnx"), None, 1_000_000)
        _, chunks = HttpsStore(timeout=1.0).read(file, 0)
        assert next(chunks) == b"ten bytes."


def test_bytes_from_another_place_are_refused(web: WebServer) -> None:
    place = {"Content-Range": "bytes 9000000000-9000000001/9000000002"}
    web.respond = lambda request: Response(b"ab", status=206, headers=place)
    file = RemoteFile(parse_file(f"{web.url}/m.onnx"), None, 9_000_000_002)
    for offset in (0, 5):
        with pytest.raises(RemoteError, match=rf"sent the bytes from 9000000000 on instead .* {offset} on"):
            HttpsStore().read(file, offset)


def test_a_length_that_no_file_has_is_no_length(plain_web: WebServer) -> None:
    length = {"Content-Range": f"bytes 0-0/{'9' * 5000}"}
    plain_web.respond = lambda request: Response(b"a", status=206, headers=length)
    assert HttpsStore().describe(parse_file(f"{plain_web.url}/m.onnx")).size is None


def test_a_path_is_encoded_once(web: WebServer) -> None:
    web.files["/a b/ü.onnx"] = b"content"
    for path in ("a%20b/%C3%BC.onnx", "a%20b/ü.onnx"):
        assert HttpsStore().describe(parse_file(f"{web.url}/{path}")).size == 7


def test_web_servers_cannot_list(web: WebServer) -> None:
    with pytest.raises(RemoteError, match=r"cannot list files"):
        HttpsStore().list(parse_file(f"{web.url}/m.onnx"))
