"""Models of a real web server in the cache: when they are fetched, used again, refused and removed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import pwd
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from support.models import external, small
from support.remote.web_server import Response, WebServer

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.models.remote.cache import default_cache
from tensorferry.server.models.remote.download import Limits
from tensorferry.server.models.remote.failures import RemoteError, UnreachableError
from tensorferry.server.models.remote.model_files import FetchedModel, ModelFiles
from tensorferry.server.models.remote.stores import stores
from tensorferry.server.models.remote.url import parse_file
from tensorferry.server.models.repository.fetched_sources import open_repository
from tensorferry.server.onnx.graph import external_files


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def fetch(cache: Path, text: str, *, allow_http: bool = False) -> FetchedModel:
    return ModelFiles(cache, stores(allow_http=allow_http), external_files).fetch(parse_file(text))


@pytest.fixture
def model(web: WebServer, tmp_path: Path) -> bytes:
    """A model at /m.onnx."""
    body = small.twice(tmp_path / "made.onnx").read_bytes()
    web.files["/m.onnx"] = body
    return body


@pytest.fixture
def pair(web: WebServer, tmp_path: Path) -> tuple[bytes, bytes]:
    """A model at /a/big.onnx with its weights beside it."""
    (tmp_path / "made").mkdir()
    body, data = external.scaled(tmp_path / "made" / "big.onnx", 3.0)
    web.files["/a/big.onnx"], web.files["/a/big.onnx_data"] = body, data
    return body, data


def test_a_model_is_fetched_once_and_used_again_until_it_changes(
    web: WebServer, model: bytes, cache: Path, tmp_path: Path
) -> None:
    first = fetch(cache, f"{web.url}/m.onnx")
    assert first.path.name == "m.onnx"
    assert first.path.read_bytes() == model
    before = len(web.requests)
    assert fetch(cache, f"{web.url}/m.onnx").path == first.path
    (asked,) = web.requests[before:]
    assert asked.headers["Range"] == "bytes=0-0"
    web.files["/m.onnx"] = changed = small.echo(tmp_path / "other.onnx").read_bytes()
    assert fetch(cache, f"{web.url}/m.onnx").path.read_bytes() == changed
    # A model that is served stays, because its device may fail, and it is then loaded again.
    assert first.path.read_bytes() == model


def test_the_cache_may_be_on_nfs(
    web: WebServer, model: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, an exclusive lock needs a file that is open for writing, and a shared one a file that is open for reading."""
    flock = fcntl.flock

    def flock_of_nfs(file: IO[bytes], how: int) -> None:
        if not (file.writable() if how & fcntl.LOCK_EX else file.readable()):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    assert fetch(cache, f"{web.url}/m.onnx").path.read_bytes() == model


def test_trees_that_no_process_uses_are_removed(
    web: WebServer, model: bytes, cache: Path, tmp_path: Path
) -> None:
    path = fetch(cache, f"{web.url}/m.onnx").path
    web.files["/m.onnx"] = small.echo(tmp_path / "other.onnx").read_bytes()
    second = fetch(cache, f"{web.url}/m.onnx")
    assert not path.exists()
    assert [each.name for each in path.parents[1].iterdir() if each.is_dir()] == [second.path.parent.name]


def test_without_etag_and_time_a_model_is_fetched_each_time(
    web: WebServer, model: bytes, cache: Path
) -> None:
    web.etags = False
    for _ in range(2):
        assert fetch(cache, f"{web.url}/m.onnx").path.read_bytes() == model
    assert [request.headers.get("Range") for request in web.requests] == ["bytes=0-0", None] * 2


@pytest.mark.parametrize("first", ["", "pinned"])
def test_a_wrong_hash_is_refused_with_both_and_the_file_is_removed(
    web: WebServer, model: bytes, cache: Path, first: str
) -> None:
    if first:
        fetch(cache, f"{web.url}/m.onnx#sha256={sha256(model)}")
    web.files["/m.onnx"] = other = b"another file"
    # The copy in the cache is not the pinned file either.
    with pytest.raises(RemoteError) as caught:
        fetch(cache, f"{web.url}/m.onnx#sha256={'0' * 64}")
    assert f"sha256={sha256(other)}, but sha256={'0' * 64} is pinned: it is refused" in str(caught.value)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.read_bytes() == other]


@pytest.mark.parametrize("damage", ["changed", "cut", "removed"])
def test_a_model_that_was_damaged_in_the_cache_is_fetched_again(
    web: WebServer, model: bytes, cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    # Only the hash shows a change.
    pin = f"#sha256={sha256(model)}" if damage == "changed" else ""
    address = f"{web.url}/m.onnx{pin}"
    path = fetch(cache, address).path
    if damage == "removed":
        shutil.rmtree(path.parent)
    else:
        path.write_bytes(bytes(len(model)) if damage == "changed" else model[:-1])
    assert fetch(cache, address).path.read_bytes() == model
    assert "is damaged; it is fetched again" in caplog.text


@pytest.mark.parametrize("text", ["{", '{"trees": {"model": {}}}'])
def test_a_damaged_record_is_replaced(web: WebServer, model: bytes, cache: Path, text: str) -> None:
    # The hashes of the files are lost with it.
    fetch(cache, f"{web.url}/m.onnx").path.write_bytes(bytes(len(model)))
    (record,) = cache.glob("*/record.json")
    record.write_text(text)
    assert fetch(cache, f"{web.url}/m.onnx").path.read_bytes() == model
    assert json.loads(record.read_text())["url"] == f"{web.url}/m.onnx"


def test_if_the_host_is_gone_the_last_copy_is_used_with_a_warning(
    web: WebServer, model: bytes, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"{web.url}/m.onnx"
    fetch(cache, address)
    web.close()
    assert fetch(cache, address).path.read_bytes() == model
    assert "the copy in the cache is used, which may be outdated" in caplog.text
    with pytest.raises(UnreachableError, match=r"the host cannot be reached"):
        fetch(cache, address.replace("m.onnx", "other.onnx"))


def test_only_what_has_changed_is_fetched(
    web: WebServer, pair: tuple[bytes, bytes], cache: Path, tmp_path: Path
) -> None:
    before = fetch(cache, f"{web.url}/a/big.onnx")
    web.requests.clear()
    assert fetch(cache, f"{web.url}/a/big.onnx").path == before.path
    assert [request.headers["Range"] for request in web.requests] == ["bytes=0-0"] * 2
    web.files["/a/big.onnx_data"] = newer = external.scaled(tmp_path / "made" / "big.onnx", 5.0)[1]
    web.requests.clear()
    after = fetch(cache, f"{web.url}/a/big.onnx")
    assert (after.path.parent / "big.onnx_data").read_bytes() == newer
    whole = [request.path for request in web.requests if "Range" not in request.headers]
    assert whole == ["/a/big.onnx_data"]
    # onnx refuses weights that have several names, and a download never writes into a tree that a process uses.
    assert after.path.stat().st_nlink == before.path.stat().st_nlink == 1


def test_a_copy_of_what_has_not_changed_leaves_the_disk_free(
    web: WebServer, model: bytes, cache: Path
) -> None:
    web.files["/beside"] = b"weights"
    url, store_of = parse_file(f"{web.url}/m.onnx"), stores(allow_http=False)
    ModelFiles(cache, store_of, lambda path: {"beside"}).fetch(url)
    with pytest.raises(RemoteError, match=r"must stay free: make room"):
        ModelFiles(cache, store_of, lambda path: (), Limits(spare_bytes=1 << 60)).fetch(url)


def test_weights_of_a_pinned_model_must_be_pinned(
    web: WebServer, pair: tuple[bytes, bytes], cache: Path
) -> None:
    pinned = f"{web.url}/a/big.onnx#sha256={sha256(pair[0])}"
    with pytest.raises(RemoteError) as caught:
        fetch(cache, pinned)
    added = f"&big.onnx_data={sha256(pair[1])}"
    assert f"add {added} if you trust them" in str(caught.value)
    fetch(cache, pinned + added)
    web.requests.clear()
    fetch(cache, pinned + added)
    assert not web.requests
    with pytest.raises(RemoteError, match=r"big.onnx_data has sha256="):
        fetch(cache, f"{pinned}&big.onnx_data={'0' * 64}")


@pytest.mark.parametrize("location", ["../outside.bin", "/etc/passwd"])
def test_weights_outside_of_the_directory_are_not_fetched(
    web: WebServer, model: bytes, cache: Path, location: str
) -> None:
    files = ModelFiles(cache, stores(allow_http=False), lambda path: {location})
    with pytest.raises(RemoteError, match=rf"names '{location}', which is not below its directory"):
        files.fetch(parse_file(f"{web.url}/m.onnx"))
    assert web.paths() == ["/m.onnx", "/m.onnx"]


def test_two_that_fetch_at_once_download_once(web: WebServer, model: bytes, cache: Path) -> None:
    address = f"{web.url}/m.onnx"
    started, go = threading.Event(), threading.Event()
    serve = web.respond

    def slow(request: object) -> Response:
        started.set()
        assert go.wait(30)
        return serve(request)  # type: ignore[arg-type]

    web.respond = slow
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(fetch(cache, address).path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert started.wait(30)
    go.set()
    for thread in threads:
        thread.join(30)
    assert len(set(paths)) == 1
    assert [request.headers.get("Range") for request in web.requests] == ["bytes=0-0", None, "bytes=0-0"]


def test_plain_http_needs_a_permission(plain_web: WebServer, cache: Path, tmp_path: Path) -> None:
    plain_web.files["/m.onnx"] = body = small.twice(tmp_path / "made.onnx").read_bytes()
    with pytest.raises(RemoteError, match=r"is not encrypted.*--allow-http"):
        fetch(cache, f"{plain_web.url}/m.onnx")
    assert not plain_web.requests
    assert fetch(cache, f"{plain_web.url}/m.onnx", allow_http=True).path.read_bytes() == body


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
def test_the_cache_is_readable_by_its_user_alone(
    web: WebServer, pair: tuple[bytes, bytes], cache: Path
) -> None:
    fetch(cache, f"{web.url}/a/big.onnx")
    everything = [cache, *cache.rglob("*")]
    assert len(everything) > 8
    assert [str(path) for path in everything if path.stat().st_mode & 0o077] == []
    (entry,) = cache.iterdir()
    entry.chmod(0o755)
    fetch(cache, f"{web.url}/a/big.onnx")
    assert stat.S_IMODE(entry.stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_written_is_named(web: WebServer, model: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        RemoteError, match=r"cannot be used: Not a directory; name a directory .*--model-cache"
    ):
        fetch(tmp_path / "file", f"{web.url}/m.onnx")


@pytest.mark.parametrize(
    ("variables", "path"),
    [
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/tensorferry/models"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/u"}, "/home/u/.cache/tensorferry/models"),
    ],
)
def test_the_default_cache_is_that_of_the_user(
    variables: dict[str, str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(default_cache()) == path


def test_a_user_without_a_home_directory_is_asked_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert not open_repository(ServerConfig(())).roots
    with pytest.raises(RemoteError, match=r"has no home directory .* by --model-cache"):
        default_cache()


def test_secrets_are_neither_in_the_log_nor_in_the_cache(
    web: WebServer, model: bytes, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    address = f"{web.url}/m.onnx?X-Amz-Signature=deadbeef&token=s3cr3t".replace("://", "://user:hunter22@")
    fetch(cache, address)
    web.files.clear()
    with pytest.raises(RemoteError) as caught:
        fetch(cache, address)
    kept = "".join(path.read_text(errors="replace") + str(path) for path in cache.rglob("*.json"))
    for secret in ("hunter22", "deadbeef", "s3cr3t"):
        assert secret not in caplog.text + str(caught.value) + kept
    assert web.requests[0].query == "X-Amz-Signature=deadbeef&token=s3cr3t"
    assert web.requests[0].headers["Authorization"].startswith("Basic ")
