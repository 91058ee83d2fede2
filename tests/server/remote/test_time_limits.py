"""Limits of time: a host that is slow, silent or never done ends the fetch, and is named with what it sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tensorferry.server.remote.download import Downloader
from tensorferry.server.remote.failures import TooSlowError, UnreachableError
from tensorferry.server.remote.stores import RemoteFile
from tensorferry.server.remote.time_limits import TimedStore
from tensorferry.server.remote.url import RemoteUrl, parse_file

URL = parse_file("https://user:secret@host/m.onnx?token=secret")
SIZE = 1 << 30
FILE = RemoteFile(URL, '"v1"', SIZE)


class Host:
    """A store whose every request does `work`, and which sends `chunks(offset)`."""

    def __init__(
        self,
        chunks: Callable[[int], Iterator[bytes]] = lambda offset: iter(()),
        work: Callable[[], object] = lambda: None,
    ) -> None:
        self.chunks = chunks
        self.work = work

    def describe(self, url: RemoteUrl) -> RemoteFile:
        self.work()
        return FILE

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        self.work()
        return {}

    def read(self, file: RemoteFile, offset: int) -> tuple[int, Iterator[bytes]]:
        self.work()
        return offset, self.chunks(offset)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_a_host_that_sends_a_byte_each_half_second_is_given_up(tmp_path: Path) -> None:
    clock = Clock()

    def drip(offset: int) -> Iterator[bytes]:
        while True:
            clock.advance(0.5)
            yield b"."

    with pytest.raises(
        TooSlowError,
        match=r"^https://host/m.onnx\?\.\.\. arrives too slowly: 240 bytes in 120 s, at least 1\.0 MB",
    ):
        Downloader(clock, clock.advance).download(TimedStore(Host(drip), clock), FILE, tmp_path / "m")
    # A later start can continue it.
    assert (tmp_path / "m").stat().st_size == 239


def test_a_host_that_closes_the_connection_after_each_byte_is_given_up_too(tmp_path: Path) -> None:
    clock = Clock()

    def one(offset: int) -> Iterator[bytes]:
        clock.advance(29.0)
        yield b"."
        raise UnreachableError("the connection broke")

    with pytest.raises(TooSlowError, match=r"arrives too slowly: 5 bytes in 120 s"):
        Downloader(clock, clock.advance).download(TimedStore(Host(one), clock), FILE, tmp_path / "m")


def test_a_host_that_is_fast_enough_may_take_as_long_as_it_needs() -> None:
    clock = Clock()

    def steady(offset: int) -> Iterator[bytes]:
        for _ in range(100):
            clock.advance(60.0)
            yield bytes(1 << 19)

    _, chunks = TimedStore(Host(steady), clock).read(FILE, 0)
    assert sum(map(len, chunks)) == 100 << 19


@pytest.fixture
def silence() -> Iterator[threading.Event]:
    """An event for which a host waits until the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_a_host_that_never_completes_an_answer_is_given_up(silence: threading.Event) -> None:
    def nothing(offset: int) -> Iterator[bytes]:
        silence.wait()
        yield b""

    host = TimedStore(Host(work=silence.wait), window_seconds=0.01)
    for call in (lambda: host.describe(URL), lambda: host.list(URL), lambda: host.read(FILE, 0)):
        with pytest.raises(
            TooSlowError, match=r"^https://host/m.onnx\?\.\.\.: .* not answered within 0\.01 s"
        ):
            call()
    _, chunks = TimedStore(Host(nothing), window_seconds=0.01).read(FILE, 0)
    with pytest.raises(TooSlowError, match=r"arrives too slowly: 0 bytes"):
        next(chunks)


def test_a_model_has_six_hours_in_all() -> None:
    clock = Clock()
    host = TimedStore(Host(work=lambda: clock.advance(3600.0)), clock)
    for _ in range(6):
        host.describe(URL)
    with pytest.raises(TooSlowError, match=r"has not arrived within 21600 s"):
        host.describe(URL)


def test_a_download_that_is_given_up_leaves_no_thread() -> None:
    ended = threading.Event()

    def endless(offset: int) -> Iterator[bytes]:
        try:
            while True:
                yield b"."
        finally:
            ended.set()

    _, chunks = TimedStore(Host(endless)).read(FILE, 0)
    assert next(chunks) == b"."
    del chunks
    assert ended.wait(60.0)
