"""Inline runs: the thread that enqueued requests runs short batches itself; workers run all others."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.inline_runs import (
    LONG,
    MOST,
    SHORT,
    Model,
    await_worker,
    elsewhere,
    quietly,
    short_batches,
    wake_ups,
)
from support.batcher.rig import PATIENCE, Recorder, enqueue, new_request

from tensorferry.batcher import Batcher, Outcome, RunTimedOut
from tensorferry.batcher.learning.return_model import ReturnModel
from tensorferry.batcher.testing import VirtualClock


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def batcher(make: Make, model: Model, clock: VirtualClock) -> Batcher:
    return short_batches(make, model, clock)


def test_a_short_batch_runs_on_the_calling_thread(batcher: Batcher, model: Model) -> None:
    _, first, call = quietly(batcher, [1.0])
    assert call
    _, second, call = quietly(batcher, [2.0, 3.0])
    assert not call, "the call is pending already"
    assert not model.batches, "no worker was woken"
    assert batcher.run_inline(MOST) == math.inf
    assert model.batches == [[1.0, 2.0, 3.0]]
    assert model.here
    assert first.only.outputs.tolist() == [2.0]
    assert second.only.outputs.tolist() == [4.0, 6.0]
    assert second.only.position == 1


def test_all_queued_requests_run_batch_by_batch(
    batcher: Batcher, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = wake_ups(batcher, monkeypatch)
    recorders = [quietly(batcher, [float(number)])[1] for number in range(9)]
    assert batcher.run_inline(MOST) == math.inf
    assert not woken, "a worker could only wait for the device"
    assert [len(batch) for batch in model.batches] == [4, 4, 1]
    assert model.here
    assert all(recorder.kind == "answered" for recorder in recorders)


@pytest.mark.parametrize("anchors", [(), (LONG, LONG), (SHORT, LONG)], ids=["unknown", "long", "as large"])
def test_a_worker_is_woken_for_a_batch_that_may_be_long(
    make: Make, model: Model, clock: VirtualClock, anchors: tuple[float, ...]
) -> None:
    batcher = make(model, 4, clock=clock)
    for rows, seconds in zip((1, 4), anchors, strict=False):
        batcher.add_warmup_sample(rows, seconds)
    await_worker(clock)
    _, recorder, call = quietly(batcher, [1.0, 2.0, 3.0, 4.0])
    assert call
    assert batcher.run_inline(MOST) == math.inf
    recorder.await_outcome()
    assert not model.here


def test_one_bucket_with_long_batches_is_enough_to_wake_a_worker(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    """The bucket is chosen only when a batch is closed."""
    wide = new_request(np.ones((1, 2)), Recorder())
    batcher.add_warmup_sample(4, LONG, wide.key)
    _, recorder, _ = quietly(batcher, [1.0])
    batcher.enqueue(wide, notify=False)
    assert batcher.run_inline(MOST) == math.inf
    recorder.await_outcome()
    assert not model.here


@pytest.mark.parametrize(
    "options",
    [{"workers": 2}, {"pipelined": True}, {"max_queue_delay": 1.0}, {"steady": False}],
    ids=lambda each: next(iter(each)),
)
def test_a_worker_is_woken_if_there_are_windows_or_several_devices_or_runs_are_unsteady(
    make: Make, model: Model, clock: VirtualClock, options: dict[str, Any]
) -> None:
    batcher = make(model, 4, clock=clock, **options)
    for rows in (1, 4):
        batcher.add_warmup_sample(rows, SHORT)
    clock.await_sleepers(2 if {"workers", "pipelined"} & options.keys() else 1, until=math.inf)
    _, recorder, call = quietly(batcher, [1.0])
    assert call
    assert batcher.run_inline(MOST) == math.inf
    if "max_queue_delay" in options:
        clock.await_sleepers(until=1.0)
        assert not recorder.outcomes, "the window must be kept"
        clock.advance(1.0)
    recorder.await_outcome()
    assert not model.here


@pytest.mark.parametrize("what", ["the run", "a run that fails", "an answer"])
def test_after_a_very_long_batch_workers_run_all_batches_for_a_second(
    batcher: Batcher, model: Model, clock: VirtualClock, what: str
) -> None:
    def long() -> None:
        clock.advance(0.1)

    def fail() -> None:
        long()
        raise ValueError

    def take_long(outcome: Outcome) -> None:
        long()

    def serve() -> bool:
        """Serve a request; return whether on this thread."""
        for rows in (1, 4):
            batcher.add_warmup_sample(rows, 0.0)
        await_worker(clock)
        model.threads.clear()
        _, recorder, _ = quietly(batcher, [2.0])
        assert batcher.run_inline(10.0) == math.inf
        assert recorder.await_outcome().error is None
        return model.here

    model.script = [{"the run": long, "a run that fails": fail}.get(what, lambda: None)]
    complete = take_long if what == "an answer" else Recorder()
    batcher.enqueue(new_request([1.0], complete), notify=False)
    batcher.run_inline(MOST)
    assert model.here
    assert not serve()
    clock.advance(0.8)
    assert not serve()
    clock.advance(0.2)
    assert serve()


def test_a_long_batch_that_failed_is_run_again_by_a_worker(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    """It runs in halves until the request at fault is found, and each run may take as long."""

    def fail() -> None:
        clock.advance(0.1)
        raise ValueError

    model.script = [fail]
    recorders = [quietly(batcher, [value])[1] for value in (1.0, -2.0, 3.0)]
    assert batcher.run_inline(MOST) == math.inf
    assert [recorder.await_outcome().error is None for recorder in recorders] == [True, False, True]
    first, *others = model.threads
    assert first is threading.current_thread() not in others
    assert batcher.drain()
    assert [recorder.kind for recorder in recorders] == ["answered", "ValueError", "answered"]


@pytest.mark.parametrize("ended", ["by itself", "not at all"])
def test_after_a_hung_run_workers_run_all_batches_for_good(
    batcher: Batcher, model: Model, clock: VirtualClock, ended: str
) -> None:
    """The calling thread serves other connections, too, so it must not hang a second time."""

    def hang() -> None:
        error = RunTimedOut("it took too long")
        if ended == "by itself":
            raise error
        batcher.abort_hung_run(0, error)

    model.script = [hang]
    _, recorder, _ = quietly(batcher, [1.0])
    batcher.run_inline(MOST)
    assert isinstance(recorder.await_outcome().error, RunTimedOut)
    clock.advance(3600.0)
    for rows in (1, 4):
        batcher.add_warmup_sample(rows, 0.0)
    await_worker(clock)
    model.threads.clear()
    _, recorder, _ = quietly(batcher, [2.0])
    assert batcher.run_inline(10.0) == math.inf
    recorder.await_outcome()
    assert not model.here


class Loyal(ReturnModel):
    """All of `clients` return within a second."""

    clients = 2

    def wait_until(self, now: float, queued: int, batch_time: Any, room: int, answering: Any = None) -> float:
        """Wait for a second after the last answers, unless all clients are back."""
        self.wanted = self.clients
        return now if queued >= self.clients else max(now, self._answered_at + 1.0)

    def answered(self, now: float, callers: int) -> None:
        """Note the time."""
        self._answered_at = now


@pytest.fixture
def loyal(monkeypatch: pytest.MonkeyPatch, clock: VirtualClock) -> None:
    """Let every batcher wait for clients; the last answer is long ago."""
    monkeypatch.setattr("tensorferry.batcher.queue.request_queue.ReturnModel", Loyal)
    clock.advance(10.0)


@pytest.mark.usefixtures("loyal")
def test_it_returns_until_when_to_wait_for_clients(
    make: Make, model: Model, clock: VirtualClock, batcher: Batcher
) -> None:
    quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf, "no client was answered recently"
    _, recorder, call = quietly(batcher, [2.0])
    assert call
    assert batcher.run_inline(MOST) == 11.0
    clock.advance(0.5)
    assert batcher.run_inline(MOST) == 11.0
    assert not recorder.outcomes
    clock.advance(0.5)
    assert batcher.run_inline(MOST) == math.inf
    assert recorder.only.outputs.tolist() == [4.0]
    assert model.here


@pytest.mark.usefixtures("loyal")
def test_only_the_last_client_ends_the_wait(
    batcher: Batcher, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loyal, "clients", 3)
    quietly(batcher, [1.0])
    batcher.run_inline(MOST)
    quietly(batcher, [2.0])
    assert batcher.run_inline(MOST) == 11.0
    assert not quietly(batcher, [3.0])[2], "one more is expected"
    assert quietly(batcher, [4.0])[2]
    assert batcher.run_inline(MOST) == math.inf
    assert model.batches == [[1.0], [2.0, 3.0, 4.0]]
    quietly(batcher, [5.0])
    assert not quietly(batcher, [6.0])[2], "that wait is over"


@pytest.mark.usefixtures("loyal")
def test_only_a_deadline_before_its_end_ends_the_wait(
    batcher: Batcher, model: Model, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loyal, "clients", 9)
    quietly(batcher, [1.0])
    batcher.run_inline(MOST)
    quietly(batcher, [2.0])
    assert batcher.run_inline(MOST) == 11.0
    assert not quietly(batcher, [3.0], deadline=13.0)[2]
    assert quietly(batcher, [4.0], deadline=10.5)[2]
    until = batcher.run_inline(MOST)
    assert 10.4 < until < 10.5
    clock.advance(until - clock.now())
    assert batcher.run_inline(MOST) == math.inf
    assert sorted(model.batches[1]) == [2.0, 3.0, 4.0]


@pytest.mark.usefixtures("loyal")
def test_a_request_of_another_thread_ends_the_wait(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    quietly(batcher, [1.0])
    batcher.run_inline(MOST)
    _, first, _ = quietly(batcher, [2.0])
    assert batcher.run_inline(MOST) == 11.0
    _, second = enqueue(batcher, [3.0])
    first.await_outcome()
    second.await_outcome()
    assert model.batches == [[1.0], [2.0, 3.0]]
    assert model.threads[1] is not threading.current_thread(), "the worker was woken"
    assert batcher.run_inline(MOST) == math.inf


def test_the_calling_thread_completes_expired_requests(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    threads: list[threading.Thread] = []
    request = new_request(
        [1.0], lambda _: threads.append(threading.current_thread()), deadline=clock.now() + 0.5
    )
    batcher.enqueue(request, notify=False)
    clock.advance(1.0)
    assert batcher.run_inline(MOST) == math.inf
    assert threads == [threading.current_thread()]
    assert not model.batches
    _, recorder, _ = quietly(batcher, [2.0])
    assert batcher.run_inline(MOST) == math.inf
    assert recorder.kind == "answered"


# Events during an inline run.


def test_requests_of_others_run_after_the_inline_batch(
    batcher: Batcher, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker is woken, because it could only leave them to the thread that runs the batch."""
    woken, others = wake_ups(batcher, monkeypatch), []
    model.script = [lambda: elsewhere(lambda: others.append(enqueue(batcher, [2.0])[1]))]
    _, recorder, _ = quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    assert model.batches == [[1.0], [2.0]]
    assert model.here
    assert not woken
    assert (recorder.kind, others[0].kind) == ("answered", "answered")


def test_requests_of_others_are_run_by_a_worker_if_they_may_be_long(
    batcher: Batcher, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, wide = list[Recorder](), np.ones((1, 2))
    batcher.add_warmup_sample(1, LONG, new_request(wide, Recorder()).key)
    model.script = [lambda: elsewhere(lambda: others.append(enqueue(batcher, wide)[1]))]
    quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    others[0].await_outcome()
    assert [thread is threading.current_thread() for thread in model.threads] == [True, False]


def test_a_second_thread_leaves_the_requests_to_the_first(batcher: Batcher, model: Model) -> None:
    others: list[Recorder] = []

    def another() -> None:
        others.append(quietly(batcher, [2.0])[1])
        assert batcher.run_inline(MOST) == math.inf
        assert not others[0].outcomes

    model.script = [lambda: elsewhere(another)]
    quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    assert model.batches == [[1.0], [2.0]]
    assert model.here
    assert others[0].kind == "answered"


def test_a_completion_may_enqueue_and_run_inline(batcher: Batcher, model: Model) -> None:
    """The thread runs the next batch after the current one, not inside it."""
    again = Recorder()

    def complete(outcome: Outcome) -> None:
        batcher.enqueue(new_request([2.0], again), notify=False)
        assert batcher.run_inline(MOST) == math.inf
        assert not again.outcomes

    batcher.enqueue(new_request([1.0], complete), notify=False)
    assert batcher.run_inline(MOST) == math.inf
    assert again.only.outputs.tolist() == [4.0]


def test_a_request_that_expires_during_another_batch_fails_at_once(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    """The worker waits for the device and cannot expire it."""
    late: list[Recorder] = []

    def expire() -> None:
        late.append(quietly(batcher, [2.0], deadline=clock.now() + 0.01)[1])
        clock.await_sleepers(2)
        clock.advance(0.011)
        late[0].await_outcome()

    model.script = [expire]
    quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    assert late[0].kind == "DeadlineExceeded"
    assert model.batches == [[1.0]]


def test_drain_waits_for_an_inline_run(batcher: Batcher, model: Model, clock: VirtualClock) -> None:
    drained: list[bool] = []
    drain = threading.Thread(target=lambda: drained.append(batcher.drain()))

    def during() -> None:
        drain.start()
        clock.await_sleepers(2)
        assert not drained

    model.script = [during]
    _, recorder, _ = quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    drain.join(PATIENCE)
    assert drained == [True]
    assert recorder.kind == "answered"
