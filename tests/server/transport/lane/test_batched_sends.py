"""The polling thread sends the responses of a worker's batch, each exactly once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from support.server.rig import PATIENCE

from tensorferry.server.transport.lane import batched_sends as module
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher


class Sent:
    """Records which thread sent each response, and wakes the polling thread as core's events do."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self.by: list[tuple[int, str]] = []

    def answer(self, number: int) -> Callable[[], None]:
        def send() -> None:
            self.by.append((number, threading.current_thread().name))
            self._poller.event()

        return send


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
def response_batcher() -> ResponseBatcher:
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


def test_the_worker_sends_one_and_the_polling_thread_the_others(
    response_batcher: ResponseBatcher, sent: Sent
) -> None:
    response_batcher.begin(4)
    for number in range(4):
        response_batcher.send(sent.answer(number))
    assert not sent.by
    response_batcher.end()
    # When `end` returns, all are sent.
    assert sent.by == [(0, HERE), (1, "poller"), (2, "poller"), (3, "poller")]


def test_outside_a_batch_a_response_is_sent_at_once(response_batcher: ResponseBatcher, sent: Sent) -> None:
    response_batcher.send(sent.answer(0))
    assert sent.by == [(0, HERE)]
    response_batcher.begin(2)
    response_batcher.end()
    response_batcher.send(sent.answer(1))
    assert sent.by == [(0, HERE), (1, HERE)]


@pytest.mark.parametrize("given", [0, 1])
def test_the_worker_sends_a_batch_of_at_most_one(
    response_batcher: ResponseBatcher, sent: Sent, given: int
) -> None:
    response_batcher.begin(2)
    for number in range(given):
        response_batcher.send(sent.answer(number))
    response_batcher.end()
    assert sent.by == [(0, HERE)][:given]


def test_the_polling_thread_sends_its_own_at_once(response_batcher: ResponseBatcher) -> None:
    response_batcher.bind_polling_thread()
    numbers: list[int] = []
    response_batcher.begin(2)
    response_batcher.send(lambda: numbers.append(1))
    assert numbers == [1]
    response_batcher.send(lambda: numbers.append(2))
    response_batcher.end()
    assert numbers == [1, 2]


def test_nothing_is_handed_over_before_a_thread_polls(response_batcher: ResponseBatcher) -> None:
    numbers: list[int] = []
    response_batcher.begin(2)
    for number in (1, 2):
        response_batcher.send(lambda number=number: numbers.append(number))  # type: ignore[misc]
    assert numbers == [1, 2]
    response_batcher.end()


def test_concurrent_workers_send_each_response_once(response_batcher: ResponseBatcher, sent: Sent) -> None:
    together = threading.Barrier(4)

    def work(first: int) -> None:
        together.wait(PATIENCE)
        for start in range(first, first + 1000, 10):
            response_batcher.begin(10)
            for number in range(start, start + 10):
                response_batcher.send(sent.answer(number))
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
    def fails() -> None:
        raise RuntimeError("core has changed")

    response_batcher.begin(4)
    for send in (sent.answer(0), fails, sent.answer(2)):
        response_batcher.send(send)
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
        response_batcher.send(sent.answer(number))
    response_batcher.end()
    assert sent.by == [(0, HERE), (1, HERE), (2, HERE)]


def test_a_late_polling_thread_sends_nothing_twice(
    response_batcher: ResponseBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HANDOVER_SECONDS", 0.01)
    in_the_middle, go_on = threading.Event(), threading.Event()
    numbers: list[int] = []
    stopped = Poller(response_batcher)
    stopped.stop()

    def hesitates() -> None:
        in_the_middle.set()
        assert go_on.wait(PATIENCE)
        numbers.append(1)

    def late() -> None:
        response_batcher.flush()

    thread = threading.Thread(target=late)
    response_batcher.begin(3)
    # The first is sent here; then the other thread comes, and the worker must wait for it to be done.
    response_batcher.send(thread.start)
    response_batcher.send(hesitates)
    response_batcher.send(lambda: numbers.append(2))

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
    numbers: list[int] = []
    worked = threading.Event()

    def work() -> None:
        nonlocal now
        for number in (0, 2):
            response_batcher.begin(2)
            for each in (number, number + 1):
                response_batcher.send(lambda each=each: numbers.append(each))  # type: ignore[misc]
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


def test_a_pause_ends_by_itself(response_batcher: ResponseBatcher) -> None:
    response_batcher.bind_polling_thread()
    response_batcher.pause(0.001)
    response_batcher.pause(-0.001)
    assert response_batcher.is_polling
