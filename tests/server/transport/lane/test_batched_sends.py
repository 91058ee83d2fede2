"""The answers of a batch that a worker gives are sent by the thread that polls, each exactly once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from support.server.rig import PATIENCE

from tensorferry.server.transport.lane import batched_sends as module
from tensorferry.server.transport.lane.batched_sends import Outbox


class Sent:
    """Notes which answer was sent by which thread, and tells the polling thread of it, as core's events do."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self.by: list[tuple[int, str]] = []

    def answer(self, number: int) -> Callable[[], None]:
        def send() -> None:
            self.by.append((number, threading.current_thread().name))
            self._poller.event()

        return send


class Poller:
    """A thread that looks at the outbox when an operation has ended, until it is stopped."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
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
        self._outbox.polled()
        self._started.set()
        while True:
            self._events.acquire()
            if self._stopped:
                return
            self._outbox.empty()


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def poller(outbox: Outbox) -> Iterator[Poller]:
    poller = Poller(outbox)
    yield poller
    poller.stop()


@pytest.fixture
def sent(poller: Poller) -> Sent:
    return Sent(poller)


HERE = threading.current_thread().name


def test_one_is_sent_at_once_and_the_others_by_the_thread_that_polls(outbox: Outbox, sent: Sent) -> None:
    outbox.begin(4)
    for number in range(4):
        outbox.give(sent.answer(number))
    assert not sent.by
    outbox.end()
    # When `end` returns, all are sent.
    assert sent.by == [(0, HERE), (1, "poller"), (2, "poller"), (3, "poller")]


def test_outside_a_batch_an_answer_is_sent_at_once(outbox: Outbox, sent: Sent) -> None:
    outbox.give(sent.answer(0))
    assert sent.by == [(0, HERE)]
    outbox.begin(2)
    outbox.end()
    outbox.give(sent.answer(1))
    assert sent.by == [(0, HERE), (1, HERE)]


@pytest.mark.parametrize("given", [0, 1])
def test_a_batch_of_which_nobody_or_one_is_left(outbox: Outbox, sent: Sent, given: int) -> None:
    outbox.begin(2)
    for number in range(given):
        outbox.give(sent.answer(number))
    outbox.end()
    assert sent.by == [(0, HERE)][:given]


def test_the_thread_that_polls_sends_its_own_as_they_come(outbox: Outbox) -> None:
    outbox.polled()
    numbers: list[int] = []
    outbox.begin(2)
    outbox.give(lambda: numbers.append(1))
    assert numbers == [1]
    outbox.give(lambda: numbers.append(2))
    outbox.end()
    assert numbers == [1, 2]


def test_before_anybody_polls_nothing_is_handed_over(outbox: Outbox) -> None:
    numbers: list[int] = []
    outbox.begin(2)
    for number in (1, 2):
        outbox.give(lambda number=number: numbers.append(number))  # type: ignore[misc]
    assert numbers == [1, 2]
    outbox.end()


def test_workers_that_answer_at_the_same_time_send_each_answer_once(outbox: Outbox, sent: Sent) -> None:
    together = threading.Barrier(4)

    def work(first: int) -> None:
        together.wait(PATIENCE)
        for start in range(first, first + 1000, 10):
            outbox.begin(10)
            for number in range(start, start + 10):
                outbox.give(sent.answer(number))
            outbox.end()

    threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(number for number, _ in sent.by) == list(range(4000))


def test_one_that_cannot_be_sent_holds_no_other_up(
    outbox: Outbox, sent: Sent, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("core has changed")

    outbox.begin(4)
    for send in (sent.answer(0), fails, sent.answer(2)):
        outbox.give(send)
    with caplog.at_level(logging.ERROR):
        outbox.end()
    assert [number for number, _ in sent.by] == [0, 2]
    assert "an answer could not be sent" in caplog.text


def test_when_nobody_polls_any_more_the_worker_sends_all(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.01)
    stopped = Poller(outbox)
    stopped.stop()
    sent = Sent(stopped)
    outbox.begin(3)
    for number in range(3):
        outbox.give(sent.answer(number))
    outbox.end()
    assert sent.by == [(0, HERE), (1, HERE), (2, HERE)]


def test_a_thread_that_polls_late_sends_nothing_twice(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.01)
    in_the_middle, go_on = threading.Event(), threading.Event()
    numbers: list[int] = []
    stopped = Poller(outbox)
    stopped.stop()

    def hesitates() -> None:
        in_the_middle.set()
        assert go_on.wait(PATIENCE)
        numbers.append(1)

    def late() -> None:
        outbox.empty()

    thread = threading.Thread(target=late)
    outbox.begin(3)
    # The first is sent here; then the other thread comes, and the worker must wait for it to be done.
    outbox.give(thread.start)
    outbox.give(hesitates)
    outbox.give(lambda: numbers.append(2))

    def goes_on() -> None:
        assert in_the_middle.wait(PATIENCE)
        go_on.set()

    other = threading.Thread(target=goes_on)
    other.start()
    outbox.end()
    for each in (thread, other):
        each.join(PATIENCE)
    assert numbers == [1, 2]


def test_what_is_handed_over_in_a_rest_is_sent_in_it(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a worker would wait for as long, and the device with it; and the rest goes on."""
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    outbox.polled()
    numbers: list[int] = []
    worked = threading.Event()

    def work() -> None:
        nonlocal now
        for number in (0, 2):
            outbox.begin(2)
            for each in (number, number + 1):
                outbox.give(lambda each=each: numbers.append(each))  # type: ignore[misc]
            outbox.end()
        worked.set()
        now += 1000.0
        # Whoever waits looks at the clock then.
        outbox._bell.set()

    worker = threading.Thread(target=work)
    worker.start()
    outbox.rest(999.0)
    assert worked.is_set()
    worker.join(PATIENCE)
    assert numbers == [0, 1, 2, 3]


def test_a_rest_ends_by_itself(outbox: Outbox) -> None:
    outbox.polled()
    outbox.rest(0.001)
    outbox.rest(-0.001)
    assert outbox.is_polling
