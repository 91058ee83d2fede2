"""The writer of any log: items in order, bounded while they wait, and an end that does not wait for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from support.server.rig import PATIENCE

from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.batcher.testing import VirtualClock
from tensorferry.server.telemetry.log_writer import BackgroundWriter


class Disk:
    """Where items go; `full` until it is set free."""

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
        writer = BackgroundWriter("test-writer", disk.write, lambda fault: None, **{"most": 3, **options})  # type: ignore[arg-type]
        made.append(writer)
        writer.start()
        return writer

    yield opened
    disk.free.set()
    for writer in made:
        assert writer.stop(PATIENCE)


def stuck(disk: Disk, writer: BackgroundWriter[str]) -> None:
    """The writer is writing one item, and does not come back."""
    disk.free.clear()
    disk.reached.clear()
    assert writer.put("first", 1)
    assert disk.reached.wait(PATIENCE)


def test_all_is_written_in_order_before_the_end(disk: Disk, open_writer: Open) -> None:
    writer = open_writer(most=1000)
    for number in range(500):
        assert writer.put(str(number))
    assert writer.stop(PATIENCE)
    assert [item for items in disk.writes for item in items] == [str(number) for number in range(500)]
    assert not writer.put("late")
    assert writer.stop(PATIENCE)


def test_items_beyond_the_bound_are_refused_while_it_is_stuck(disk: Disk, open_writer: Open) -> None:
    writer = open_writer()
    stuck(disk, writer)
    assert [writer.put(item) for item in "abcde"] == [True, True, True, False, False]
    assert not writer.flush(0)
    disk.free.set()
    assert writer.flush(PATIENCE)
    assert disk.writes == [["first"], ["a", "b", "c"]]
    assert writer.put("d")


def test_bytes_are_bounded_too_but_one_item_always_has_room(disk: Disk, open_writer: Open) -> None:
    writer = open_writer(most=100, most_bytes=10)
    stuck(disk, writer)
    assert [writer.put("x", 6), writer.put("x", 6), writer.put("x", 4)] == [True, False, True]
    disk.free.set()
    assert writer.flush(PATIENCE)
    stuck(disk, writer)
    assert writer.put("large", 1000)
    assert not writer.put("x", 1)


def test_the_end_does_not_wait_for_what_is_stuck(disk: Disk, open_writer: Open) -> None:
    writer = open_writer()
    stuck(disk, writer)
    assert not writer.stop(0)


def test_it_goes_on_after_a_fault_and_a_pause(disk: Disk, open_writer: Open) -> None:
    clock = VirtualClock()
    writer = open_writer(backoff=RestartBackoff(clock))
    disk.faults = [SystemExit("a fault")]
    assert writer.put("lost")
    clock.await_sleepers(until=clock.now() + 0.01)
    assert writer.put("kept")
    clock.advance(0.01)
    assert writer.flush(PATIENCE)
    assert disk.writes == [["kept"]]


def test_a_fault_that_stays_takes_a_pause_each_time_and_the_end_waits_for_none(
    disk: Disk, open_writer: Open
) -> None:
    clock = VirtualClock()
    disk.faults = [SystemExit("a fault") for _ in range(9)]
    writer = open_writer(backoff=RestartBackoff(clock))
    for seconds in (0.01, 0.02):
        assert writer.put("lost")
        clock.await_sleepers(until=clock.now() + seconds)
        clock.advance(seconds)
    assert writer.put("lost")
    clock.await_sleepers(until=clock.now() + 0.04)
    assert writer.stop(PATIENCE)
    assert len(disk.faults) == 6


def test_a_destructor_may_log_while_its_thread_logs(disk: Disk, open_writer: Open) -> None:
    """The collector may run anywhere, in `put` too."""
    writer = open_writer()
    with writer._changed:
        assert writer.put("nested")
    assert writer.flush(PATIENCE)
