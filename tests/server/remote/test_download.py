"""Downloads: continued where they broke, retried as long as bytes arrive, and never longer than the disk is large."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tensorferry.server.remote import download
from tensorferry.server.remote.download import Downloader
from tensorferry.server.remote.failures import RemoteError, UnreachableError
from tensorferry.server.remote.stores import RemoteFile
from tensorferry.server.remote.url import RemoteUrl, parse_file

BODY = bytes(range(256)) * 40
URL = parse_file("https://host/m.onnx")
FILE = RemoteFile(URL, '"v1"', len(BODY))


class Store:
    """Sends the body in chunks of 100 bytes; request number n ends after `lengths[n]` bytes, the others do not."""

    def __init__(self, *lengths: int, ranges: bool = True) -> None:
        self.lengths = list(lengths)
        self.offsets: list[int] = []
        self.ranges = ranges

    def describe(self, url: RemoteUrl) -> RemoteFile:
        raise NotImplementedError

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        raise NotImplementedError

    def read(self, file: RemoteFile, offset: int) -> tuple[int, Iterator[bytes]]:
        self.offsets.append(offset)
        start = offset if self.ranges else 0
        return start, self._chunks(start)

    def _chunks(self, start: int) -> Iterator[bytes]:
        end = start + self.lengths.pop(0) if self.lengths else len(BODY)
        for at in range(start, min(end, len(BODY)), 100):
            yield BODY[at : min(at + 100, end)]
        if end < len(BODY):
            raise UnreachableError("the connection broke")


class Time:
    """A clock that moves only when the downloader pauses or a test says so."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self.step = step
        self.pauses: list[float] = []

    def __call__(self) -> float:
        self.now += self.step
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def downloader(time: Time | None = None) -> Downloader:
    time = time or Time()
    return Downloader(time, time.pause)


def test_a_broken_download_is_continued_as_long_as_bytes_arrive(tmp_path: Path) -> None:
    time, store = Time(), Store(*[1000] * 10)
    digest = downloader(time).download(store, FILE, tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == BODY
    assert digest == hashlib.sha256(BODY).hexdigest()
    assert store.offsets == list(range(0, 10_001, 1000))
    assert time.pauses == []


def test_four_attempts_without_a_byte_are_the_end_and_what_arrived_stays(tmp_path: Path) -> None:
    time, store = Time(), Store(1500, 0, 0, 0, 0)
    with pytest.raises(UnreachableError, match=r"the connection broke"):
        downloader(time).download(store, FILE, tmp_path / "m")
    assert time.pauses == [1.0, 2.0, 4.0]
    assert (tmp_path / "m").stat().st_size == 1500
    again = Store()
    downloader().download(again, FILE, tmp_path / "m")
    assert again.offsets == [1500]
    assert (tmp_path / "m").read_bytes() == BODY


def test_a_host_without_ranges_sends_everything_again(tmp_path: Path) -> None:
    store = Store(1500, ranges=False)
    downloader().download(store, FILE, tmp_path / "m")
    assert store.offsets == [0, 1500]
    assert (tmp_path / "m").read_bytes() == BODY


def test_without_a_version_a_part_of_an_earlier_process_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"of another version")
    store = Store()
    downloader().download(store, RemoteFile(URL, None, len(BODY)), tmp_path / "m")
    assert store.offsets == [0]
    assert (tmp_path / "m").read_bytes() == BODY


def test_a_file_without_a_known_size_is_read_to_its_end(tmp_path: Path) -> None:
    store = Store()
    downloader().download(store, RemoteFile(URL, '"v1"', None), tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == BODY
    assert store.offsets == [0]


def test_a_body_that_ends_early_without_an_error_is_truncated(tmp_path: Path) -> None:
    file = RemoteFile(URL, '"v1"', len(BODY) + 1)
    with pytest.raises(
        RemoteError, match=rf"is truncated: {len(BODY)} bytes arrived, it has {len(BODY) + 1}"
    ):
        downloader().download(Store(), file, tmp_path / "m")


def test_a_body_that_is_longer_than_stated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match=r"has at least 100 bytes, but its host says 5"):
        downloader().download(Store(), RemoteFile(URL, '"v1"', 5), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_an_answer_without_a_length_is_stored_up_to_the_largest_size_and_then_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "LARGEST_BYTES", len(BODY) - 1)
    with pytest.raises(RemoteError, match=r"has more than 10\.2 KB, the largest file .*; use a host that"):
        downloader().download(Store(), RemoteFile(URL, '"v1"', None), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_download_ends_before_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([download.SPARE_BYTES] * 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free, 1000)))
    monkeypatch.setattr(download, "_LOOK_BYTES", 1000)
    with pytest.raises(RemoteError, match=r"has 1\.0 KB free, and 268\.4 MB must stay free: make room"):
        downloader().download(Store(), RemoteFile(URL, '"v1"', None), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_part_that_cannot_be_continued_does_not_stay(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError):
        downloader().download(Store(500, 0, 0, 0, 0), RemoteFile(URL, None, len(BODY)), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_an_empty_file_is_downloaded(tmp_path: Path) -> None:
    digest = downloader().download(Store(), RemoteFile(URL, '"v1"', 0), tmp_path / "m")
    assert digest == hashlib.sha256(b"").hexdigest()
    assert (tmp_path / "m").read_bytes() == b""


def test_a_hash_of_the_host_is_checked_and_a_damaged_file_removed(tmp_path: Path) -> None:
    stated, got = "00" * 32, hashlib.sha256(BODY).hexdigest()
    with pytest.raises(RemoteError) as caught:
        downloader().download(Store(), RemoteFile(URL, '"v1"', len(BODY), stated), tmp_path / "m")
    assert stated in str(caught.value)
    assert got in str(caught.value)
    assert not (tmp_path / "m").exists()


def test_a_file_that_does_not_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = download.SPARE_BYTES + len(BODY) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    store = Store()
    with pytest.raises(
        RemoteError,
        match=r"needs 10\.2 KB, but .* has 268\.4 MB free, and 268\.4 MB must stay free: make room, or .*--model-cache",
    ):
        downloader().download(store, FILE, tmp_path / "m")
    assert not store.offsets


def test_a_disk_that_is_full_while_writing_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").symlink_to("/dev/full")
    with pytest.raises(RemoteError, match=r"cannot be stored in .*: No space left on device; make room"):
        downloader().download(Store(), FILE, tmp_path / "m")


def test_progress_is_logged_at_most_every_five_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tensorferry.server")
    # 103 chunks, one each half second.
    downloader(Time(step=0.5)).download(Store(), FILE, tmp_path / "m")
    lines = [record.message for record in caplog.records]
    assert len(lines) == 10
    assert lines[0] == "https://host/m.onnx: 1.0 KB of 10.2 KB (10 %) downloaded, 200 bytes/s"
