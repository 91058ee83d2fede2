"""Downloads: answers of web servers that are not the file, and what is too large, too slow or never complete."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import pytest
from support.remote.web_server import Response, WebServer

from tensorferry.server.models.remote.download import LIMITS, Fetch, Limits, RemoteFile, Store
from tensorferry.server.models.remote.failures import RemoteError, UnreachableError
from tensorferry.server.models.remote.model_files import ModelFiles
from tensorferry.server.models.remote.stores import StoreOf, stores
from tensorferry.server.models.remote.url import RemoteUrl, parse_file

ADDRESS = "https://user:secret@host/m.onnx?token=secret"
BODY = bytes(1000)


class Host(Store):
    """A store of one file. `send` writes it to its argument."""

    def __init__(
        self, send: Callable[[FileIO], object], size: int | None = len(BODY), sha256: str | None = None
    ) -> None:
        self.send = send
        self.size = size
        self.sha256 = sha256

    def describe(self, url: RemoteUrl) -> RemoteFile:
        return RemoteFile(url, None, self.size, self.sha256)

    def read(self, file: RemoteFile, output: FileIO) -> None:
        self.send(output)


def whole(output: FileIO) -> None:
    output.write(BODY)


def fail(output: FileIO) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fetch(cache: Path, store_of: StoreOf, limits: Limits = LIMITS, address: str = ADDRESS) -> Path:
    return ModelFiles(cache, store_of, lambda path: (), limits).fetch(parse_file(address)).path


@pytest.mark.parametrize(
    ("host", "limits", "said"),
    [
        (Host(whole, size=5), Limits(), "has more than 5 bytes, as its host says"),
        (Host(whole, size=None), Limits(largest_bytes=999), "has more than 999 bytes, the most without Content-Length"),
        (Host(whole, size=1001), Limits(), "is truncated: 1000 bytes arrived, it has 1001"),
        (Host(whole, sha256="0" * 64), Limits(), f"its host says sha256={'0' * 64}: it was damaged on the way"),
        (Host(whole), Limits(spare_bytes=1 << 60), "must stay free: make room, or name another directory by --model-cache"),

        (Host(fail), Limits(), "No space left on device; make room, or name another directory by --model-cache"),
    ],
)  # fmt: skip
def test_what_a_host_may_not_send_is_refused_and_removed(
    host: Host, limits: Limits, said: str, cache: Path
) -> None:
    with pytest.raises(RemoteError) as caught:
        fetch(cache, lambda url: host, limits)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["lock"]


def test_a_file_within_the_limits_is_fetched(cache: Path) -> None:
    hosts = iter((Host(whole), Host(whole, size=None), Host(lambda output: None, size=0)))
    for size in (1000, 1000, 0):
        assert fetch(cache, lambda url: next(hosts), Limits(largest_bytes=1000)).stat().st_size == size


@pytest.fixture
def silence() -> Iterator[threading.Event]:
    """An event for which a host waits until the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_a_host_that_never_answers_is_given_up(web: WebServer, cache: Path, silence: threading.Event) -> None:
    def never(request: object) -> Response:
        silence.wait()
        return Response(status=503)

    web.respond = never
    with pytest.raises(UnreachableError, match=r"m\.onnx: the host sent 0 bytes in 0\.05 s; it must answer"):
        fetch(cache, stores(allow_http=False), Limits(window_seconds=0.05), f"{web.url}/m.onnx")


def test_a_thread_that_was_given_up_writes_nothing_more(tmp_path: Path, silence: threading.Event) -> None:
    refused = threading.Event()

    def late(output: FileIO) -> None:
        silence.wait()
        try:
            output.write(BODY)
        except RemoteError:
            refused.set()
            raise

    host = Host(late)
    with pytest.raises(UnreachableError, match=r"the host sent 0 bytes in 0\.01 s; .* and send 1\.0 MB"):
        Fetch(host, Limits(window_seconds=0.01)).download(host.describe(parse_file(ADDRESS)), tmp_path / "m")
    silence.set()
    assert refused.wait(60)


def test_a_model_must_arrive_in_the_whole_time(cache: Path, silence: threading.Event) -> None:
    limits = Limits(window_seconds=0.05, window_bytes=0, whole_seconds=0.2)
    with pytest.raises(UnreachableError, match=r"has not arrived within 0\.2 s, the longest time"):
        fetch(cache, lambda url: Host(lambda output: silence.wait()), limits)


def test_progress_is_logged_with_what_a_slow_host_has_sent(
    web: WebServer, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    web.files["/m.onnx"] = bytes(20)
    web.cut_after = [10]
    web.hold.clear()

    def close_if_shown(record: logging.LogRecord) -> bool:
        if record.getMessage() == f"{web.url}/m.onnx: 10 bytes downloaded (50 %)":
            web.hold.set()
        return True

    caplog.handler.addFilter(close_if_shown)
    limits = Limits(window_seconds=0.05, window_bytes=0)
    with pytest.raises(UnreachableError, match=r"is truncated: 10 bytes arrived, it has 20"):
        fetch(cache, stores(allow_http=False), limits, f"{web.url}/m.onnx")


# Web servers.


def fetched(cache: Path, address: str) -> bytes:
    return fetch(cache, stores(allow_http=True), address=address).read_bytes()


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
