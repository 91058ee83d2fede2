"""The polling thread sends the responses of a worker's batch, each exactly once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.server.rig import PATIENCE

from tensorferry.server.transport.lane import batched_sends as module
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher
from tensorferry.server.transport.lane.tcp_cork import TcpCork


class Sent:
    """Records which thread sent each response, and wakes the polling thread as core's events do."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self.by: list[tuple[int, str]] = []

    def send(self, number: int) -> int:
        self.by.append((number, threading.current_thread().name))
        self._poller.event()
        return 1


class Poller:
    """A thread that flushes the response batcher after each operation, until it is stopped."""

    def __init__(self, response_batcher: ResponseBatcher) -> None:
        self._response_batcher = response_batcher
        self._events = threading.Semaphore(0)
        self._stopped = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poller")
        self._thread.start()
        assert self._started.wait(PATIENCE)

    def event(self) -> None:
        self._events.release()

    def stop(self) -> None:
        self._stopped = True
        self.event()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self._response_batcher.bind_polling_thread()
        self._started.set()
        while True:
            self._events.acquire()
            if self._stopped:
                return
            self._response_batcher.flush()


@pytest.fixture
def response_batcher(monkeypatch: pytest.MonkeyPatch) -> ResponseBatcher:
    # On a busy machine, the polling thread may take longer than it has in a server.
    monkeypatch.setattr(module, "_HANDOVER_SECONDS", PATIENCE)
    return ResponseBatcher()


@pytest.fixture
def poller(response_batcher: ResponseBatcher) -> Iterator[Poller]:
    poller = Poller(response_batcher)
    yield poller
    poller.stop()


@pytest.fixture
def sent(poller: Poller) -> Sent:
    return Sent(poller)


HERE = threading.current_thread().name


def respond(
    response_batcher: ResponseBatcher, send: Callable[[int], int], number: int, nbytes: int = 1
) -> None:
    """Send a response as a call does."""
    collected = response_batcher.this_thread.collected
    if collected is None:
        send(number)
    else:
        collected.append((nbytes, send, (number,)))


class Numbers(list[int]):
    """The numbers of the responses that were sent."""

    def send(self, number: int) -> int:
        self.append(number)
        return 1


@pytest.mark.parametrize("count", [0, 1, 4])
def test_the_worker_sends_one_and_the_polling_thread_the_others(
    response_batcher: ResponseBatcher, sent: Sent, count: int
) -> None:
    response_batcher.begin(4)
    for number in range(count):
        respond(response_batcher, sent.send, number)
    assert not sent.by
    response_batcher.end()
    # When `end` returns, all are sent.
    assert sent.by == [(0, HERE), (1, "poller"), (2, "poller"), (3, "poller")][:count]


def test_a_batch_within_another_is_sent_with_that_one(response_batcher: ResponseBatcher) -> None:
    """The answer of a pipeline's stage becomes a request of the next stage, which drops queued requests for it."""
    response_batcher.bind_polling_thread()
    numbers = Numbers()
    response_batcher.begin(2)
    respond(response_batcher, numbers.send, 1)
    response_batcher.begin(2)
    respond(response_batcher, numbers.send, 2)
    response_batcher.end()
    respond(response_batcher, numbers.send, 3)
    response_batcher.end()
    assert numbers == [1, 2, 3]
    respond(response_batcher, numbers.send, 4)
    assert numbers == [1, 2, 3, 4]


class Journal(TcpCork):
    """Cork that records what is done to it, and the sizes of the responses that are sent meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[str | int] = []

    def begin(self, count: int) -> None:
        self.entries.append(f"begin {count}")
        self.corked = [cast(Any, None)]

    def flush(self) -> None:
        self.entries.append("flush")

    def end(self) -> None:
        self.entries.append("end")
        self.corked = ()

    def send(self, nbytes: int) -> int:
        self.entries.append(nbytes)
        return nbytes


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1, 2], ["begin 2", 1, 2, "end"]),
        # A large response sends what was collected, and what follows is not corked.
        ([1, 100_000, 2], ["begin 3", 1, 100_000, "end", 2, "end"]),
        # The first of many does not wait for the last; the last is sent by `end`.
        ([1] * 33, ["begin 33", *[1] * 32, "flush", 1, "end"]),
        ([1] * 32, ["begin 32", *[1] * 32, "end"]),
    ],
)
def test_responses_of_a_batch_are_corked(sizes: list[int], expected: list[str | int]) -> None:
    response_batcher = ResponseBatcher()
    response_batcher._cork = journal = Journal()
    response_batcher.bind_polling_thread()
    response_batcher.begin(len(sizes))
    for size in sizes:
        respond(response_batcher, journal.send, size, size)
    response_batcher.end()
    assert journal.entries == expected


def test_concurrent_workers_send_each_response_once(response_batcher: ResponseBatcher, sent: Sent) -> None:
    together = threading.Barrier(4)

    def work(first: int) -> None:
        together.wait(PATIENCE)
        for start in range(first, first + 1000, 10):
            response_batcher.begin(10)
            for number in range(start, start + 10):
                respond(response_batcher, sent.send, number)
            response_batcher.end()

    threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(number for number, _ in sent.by) == list(range(4000))


def test_a_failed_send_does_not_affect_the_others(
    response_batcher: ResponseBatcher, sent: Sent, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(number: int) -> int:
        raise RuntimeError("core has changed")

    response_batcher.begin(4)
    for number, send in enumerate((sent.send, fails, sent.send)):
        respond(response_batcher, send, number)
    with caplog.at_level(logging.ERROR):
        response_batcher.end()
    assert [number for number, _ in sent.by] == [0, 2]
    assert "a response could not be sent" in caplog.text


def test_the_worker_sends_all_once_no_thread_polls(
    response_batcher: ResponseBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HANDOVER_SECONDS", 0.01)
    stopped = Poller(response_batcher)
    stopped.stop()
    sent = Sent(stopped)
    response_batcher.begin(3)
    for number in range(3):
        respond(response_batcher, sent.send, number)
    response_batcher.end()
    assert sent.by == [(0, HERE), (1, HERE), (2, HERE)]


def test_a_late_polling_thread_sends_nothing_twice(
    response_batcher: ResponseBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HANDOVER_SECONDS", 0.01)
    in_the_middle, go_on = threading.Event(), threading.Event()
    numbers = Numbers()
    stopped = Poller(response_batcher)
    stopped.stop()

    def starts(number: int) -> int:
        thread.start()
        return 1

    def hesitates(number: int) -> int:
        in_the_middle.set()
        assert go_on.wait(PATIENCE)
        return numbers.send(number)

    thread = threading.Thread(target=response_batcher.flush)
    response_batcher.begin(3)
    # The first is sent here; then the other thread comes, and the worker must wait for it to be done.
    for number, send in enumerate((starts, hesitates, numbers.send)):
        respond(response_batcher, send, number)

    def goes_on() -> None:
        assert in_the_middle.wait(PATIENCE)
        go_on.set()

    other = threading.Thread(target=goes_on)
    other.start()
    response_batcher.end()
    for each in (thread, other):
        each.join(PATIENCE)
    assert numbers == [1, 2]


def test_a_handover_during_a_pause_is_sent_in_it(
    response_batcher: ResponseBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker must not wait for the end of the pause; the pause continues."""
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    response_batcher.bind_polling_thread()
    numbers = Numbers()
    worked = threading.Event()

    def work() -> None:
        nonlocal now
        for number in (0, 2):
            response_batcher.begin(2)
            for each in (number, number + 1):
                respond(response_batcher, numbers.send, each)
            response_batcher.end()
        worked.set()
        now += 1000.0
        # The waiting thread reads the clock then.
        response_batcher._wake.set()

    worker = threading.Thread(target=work)
    worker.start()
    response_batcher.pause(999.0)
    assert worked.is_set()
    worker.join(PATIENCE)
    assert numbers == [0, 1, 2, 3]
