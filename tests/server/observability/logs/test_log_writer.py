"""Background writer: limits, faults, and items of a destructor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support.server.rig import PATIENCE

from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.batcher.testing import VirtualClock
from tensorferry.server.observability.logs.log_writer import BackgroundWriter


class Disk:
    """Destination of the items; it blocks while `full`."""

    def __init__(self) -> None:
        self.writes: list[list[str]] = []
        self.reached = threading.Event()
        self.free = threading.Event()
        self.free.set()
        self.faults: list[BaseException] = []

    def write(self, items: Sequence[str]) -> None:
        self.reached.set()
        assert self.free.wait(PATIENCE)
        if self.faults:
            raise self.faults.pop()
        self.writes.append(list(items))


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk()
    yield made
    made.free.set()


Open = Callable[..., BackgroundWriter[str]]


@pytest.fixture
def open_writer(disk: Disk) -> Iterator[Open]:
    made: list[BackgroundWriter[str]] = []

    def opened(**options: object) -> BackgroundWriter[str]:
        settings: Any = {"max_items": 3, **options}
        writer = BackgroundWriter("test-writer", disk.write, **settings)
        made.append(writer)
        writer.start()
        return writer

    yield opened
    disk.free.set()
    for writer in made:
        assert writer.stop(PATIENCE)


def stuck(disk: Disk, writer: BackgroundWriter[str]) -> None:
    """Make the writer block while it writes one item."""
    disk.free.clear()
    disk.reached.clear()
    assert writer.put("first", 1)
    assert disk.reached.wait(PATIENCE)


def test_items_beyond_the_limit_are_refused(disk: Disk, open_writer: Open) -> None:
    writer = open_writer()
    stuck(disk, writer)
    assert [writer.put(item) for item in "abcde"] == [True, True, True, False, False]
    assert not writer.flush(0)
    disk.free.set()
    assert writer.flush(PATIENCE)
    assert disk.writes == [["first"], ["a", "b", "c"]]
    assert writer.put("d")


def test_bytes_are_limited_but_one_item_is_always_accepted(disk: Disk, open_writer: Open) -> None:
    writer = open_writer(max_items=100, max_bytes=10)
    stuck(disk, writer)
    assert [writer.put("x", 6), writer.put("x", 6), writer.put("x", 4)] == [True, False, True]
    disk.free.set()
    assert writer.flush(PATIENCE)
    stuck(disk, writer)
    assert writer.put("large", 1000)
    assert not writer.put("x", 1)


def test_the_thread_continues_after_a_fault_and_a_pause(disk: Disk, open_writer: Open) -> None:
    clock = VirtualClock()
    writer = open_writer(backoff=RestartBackoff(clock))
    disk.faults = [SystemExit("a fault")]
    assert writer.put("lost")
    clock.await_sleepers(until=clock.now() + 0.01)
    assert writer.put("kept")
    clock.advance(0.01)
    assert writer.flush(PATIENCE)
    assert disk.writes == [["kept"]]


def test_a_destructor_may_log_while_its_thread_logs(disk: Disk, open_writer: Open) -> None:
    """The garbage collector may run in `put`."""
    writer = open_writer()
    with writer._changed:
        assert writer.put("nested")
    assert writer.flush(PATIENCE)
