"""Answers of web servers that are not the file: each is described, with what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.remote.web_server import Response, WebServer

from tensorferry.server.models.remote.download import LIMITS, Limits
from tensorferry.server.models.remote.failures import RemoteError, UnreachableError
from tensorferry.server.models.remote.model_files import ModelFiles
from tensorferry.server.models.remote.stores import stores
from tensorferry.server.models.remote.url import parse_file


def fetched(cache: Path, address: str, limits: Limits = LIMITS) -> bytes:
    files = ModelFiles(cache, stores(allow_http=True), lambda path: (), limits)
    return files.fetch(parse_file(address)).path.read_bytes()


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (401, RemoteError, "permission denied; the credentials may not read it, or there are none: use an address"),
        (503, UnreachableError, "the host answered with HTTP status 503; try again later"),
    ],
)  # fmt: skip
def test_a_status_is_described(
    web: WebServer, cache: Path, status: int, kind: type[RemoteError], said: str
) -> None:
    web.respond = lambda request: Response(status=status)
    with pytest.raises(RemoteError) as caught:
        fetched(cache, f"{web.url}/m.onnx")
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{web.url}/m.onnx: {said}")


def test_a_certificate_of_an_unknown_authority_is_refused(
    web: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    with pytest.raises(RemoteError, match=r"certificate is not trusted .*SSL_CERT_FILE") as caught:
        fetched(cache, f"{web.url}/m.onnx")
    assert not isinstance(caught.value, UnreachableError)
    assert not web.requests


def test_a_name_without_an_address_is_a_failure_of_dns(cache: Path) -> None:
    with pytest.raises(UnreachableError, match=r"cannot be resolved \(DNS\)"):
        fetched(cache, "https://no-such-host.invalid/m.onnx")


def test_redirects_are_followed_without_credentials(web: WebServer, cache: Path) -> None:
    web.files["/there.onnx"] = b"content"
    serve = web.respond
    web.respond = lambda request: (
        Response(status=302, headers={"Location": f"{web.url}/there.onnx"})
        if request.path == "/here.onnx"
        else serve(request)
    )
    assert fetched(cache, f"{web.url}/here.onnx".replace("://", "://user:secret@")) == b"content"
    first, second, *_ = web.requests
    assert first.headers["Authorization"] == "Basic dXNlcjpzZWNyZXQ="
    assert "Authorization" not in second.headers


def test_a_redirect_to_plain_http_is_refused(web: WebServer, plain_web: WebServer, cache: Path) -> None:
    plain_web.files["/m.onnx"] = b"content"
    web.respond = lambda request: Response(status=302, headers={"Location": f"{plain_web.url}/m.onnx"})
    with pytest.raises(RemoteError, match=r"redirects to an address that is not https://"):
        fetched(cache, f"{web.url}/m.onnx")
    assert not plain_web.requests


def test_the_body_of_a_redirect_is_not_read(plain_web: WebServer, cache: Path) -> None:
    endless = {"Content-Length": "1000000000000", "Location": f"{plain_web.url}/m.onnx"}
    plain_web.respond = lambda request: (
        Response(status=302, headers=endless) if request.path == "/here.onnx" else Response(status=404)
    )
    with pytest.raises(RemoteError, match=r"there is no such file"):
        fetched(cache, f"{plain_web.url}/here.onnx")


def test_a_file_that_changes_during_each_download_is_given_up(web: WebServer, cache: Path) -> None:
    def changed(request: object) -> Response:
        number = str(len(web.requests))
        return Response(b"content", headers={"ETag": f'"{number}"'})

    web.respond = changed
    with pytest.raises(RemoteError, match=r"has changed while it was downloaded; try again"):
        fetched(cache, f"{web.url}/m.onnx")
    assert len(web.requests) == 6


def test_a_broken_download_begins_again_at_the_next_start(web: WebServer, cache: Path) -> None:
    web.files["/m.onnx"] = b"content"
    web.cut_after = [3]
    with pytest.raises(UnreachableError, match=r"is truncated: 3 bytes arrived, it has 7; try again"):
        fetched(cache, f"{web.url}/m.onnx")
    assert fetched(cache, f"{web.url}/m.onnx") == b"content"
