"""Requests enqueued quietly: the thread that brought them runs what is short itself, workers all else."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from batcher.rig import PATIENCE, Recorder, enqueue, fails_below_zero, reach, result

from tensorferry.batcher import Batcher, BatcherError, Outcome, Request, RunTimedOut
from tensorferry.batcher.collate import request_of
from tensorferry.batcher.queue import RequestQueue
from tensorferry.batcher.returners import Returners
from tensorferry.batcher.testing import VirtualClock
from tensorferry.batcher.work import Work

SHORT, LONG = 100e-6, 0.5
# What the attending thread is ready to be kept for.
MOST = 1e-3


class Model:
    """Doubles its input, does on the way what the test wants, and remembers on which threads."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.batches: list[list[float]] = []
        # For the first batch, the second, and so on.
        self.script: list[Callable[[], object]] = []
        self._running = 0

    def __call__(self, x: Any) -> Any:
        self._running += 1
        assert self._running == 1, "one thread at a time"
        self.threads.append(threading.current_thread())
        self.batches.append(x.tolist())
        if self.script:
            self.script.pop(0)()
        self._running -= 1
        return fails_below_zero(x)

    @property
    def here(self) -> bool:
        """Whether all batches ran on the calling thread."""
        return all(thread is threading.current_thread() for thread in self.threads)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def batcher(make: Make, model: Model, clock: VirtualClock) -> Batcher:
    """Of batches that are known to be short. Its worker waits."""
    made = make(model, 4, clock=clock)
    for rows in (1, 4):
        made.anchor(rows, SHORT)
    await_worker(clock)
    return made


def await_worker(clock: VirtualClock) -> None:
    """Until the worker waits for work."""
    clock.await_sleepers(until=math.inf)


def quietly(batcher: Batcher, x: Any, **options: Any) -> tuple[Request, Recorder, bool]:
    """Enqueues the rows `x` quietly; whether `attend` must then be called."""
    recorder = Recorder()
    request = request_of(x, recorder, one_row=False, **options)
    return request, recorder, batcher.enqueue_quietly(request)


def elsewhere(action: Callable[[], object]) -> None:
    """Does something on another thread, and waits for it."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_short_batch_runs_on_the_thread_that_attends(batcher: Batcher, model: Model) -> None:
    _, first, call = quietly(batcher, [1.0])
    assert call
    _, second, call = quietly(batcher, [2.0, 3.0])
    assert not call, "it was told already"
    assert not model.batches, "nobody was woken"
    assert batcher.attend(MOST) == math.inf
    assert model.batches == [[1.0, 2.0, 3.0]]
    assert model.here
    assert first.only.outputs.tolist() == [2.0]
    assert second.only.outputs.tolist() == [4.0, 6.0]
    assert second.only.position == 1


def test_all_that_is_queued_leaves_batch_by_batch(batcher: Batcher, model: Model) -> None:
    recorders = [quietly(batcher, [float(number)])[1] for number in range(9)]
    assert batcher.attend(MOST) == math.inf
    assert [len(batch) for batch in model.batches] == [4, 4, 1]
    assert model.here
    assert all(recorder.kind == "answered" for recorder in recorders)


def test_nothing_to_do_is_done_at_once(batcher: Batcher, model: Model) -> None:
    assert batcher.attend(MOST) == math.inf
    assert not model.batches


def test_what_is_enqueued_aloud_is_the_workers(batcher: Batcher, model: Model) -> None:
    _, recorder = enqueue(batcher, [1.0])
    recorder.await_outcome()
    assert not model.here


@pytest.mark.parametrize("anchors", [(), (LONG, LONG), (SHORT, LONG)], ids=["unknown", "long", "as large"])
def test_a_worker_is_woken_for_what_may_be_long(
    make: Make, model: Model, clock: VirtualClock, anchors: tuple[float, ...]
) -> None:
    batcher = make(model, 4, clock=clock)
    for rows, seconds in zip((1, 4), anchors, strict=False):
        batcher.anchor(rows, seconds)
    await_worker(clock)
    _, recorder, call = quietly(batcher, [1.0, 2.0, 3.0, 4.0])
    assert call
    assert batcher.attend(MOST) == math.inf
    recorder.await_outcome()
    assert not model.here


def test_one_bucket_that_may_be_long_is_enough_to_wake_a_worker(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    """Which leaves first is decided when one leaves."""
    wide = request_of(np.ones((1, 2)), Recorder(), one_row=False)
    batcher.anchor(4, LONG, wide.key)
    _, recorder, _ = quietly(batcher, [1.0])
    batcher.enqueue_quietly(wide)
    assert batcher.attend(MOST) == math.inf
    recorder.await_outcome()
    assert not model.here


@pytest.mark.parametrize(
    "options",
    [{"workers": 2}, {"pipelined": True}, {"max_queue_delay": 1.0}],
    ids=lambda each: next(iter(each)),
)
def test_a_worker_is_woken_where_there_is_more_to_decide(
    make: Make, clock: VirtualClock, options: dict[str, Any]
) -> None:
    threads: list[threading.Thread] = []

    def model_fn(x: Any) -> Any:
        threads.append(threading.current_thread())
        return x

    batcher = make(model_fn, 4, clock=clock, **options)
    for rows in (1, 4):
        batcher.anchor(rows, SHORT)
    clock.await_sleepers(1 if "max_queue_delay" in options else 2, until=math.inf)
    _, recorder, call = quietly(batcher, [1.0])
    assert call
    assert batcher.attend(MOST) == math.inf
    if "max_queue_delay" in options:
        clock.await_sleepers(until=1.0)
        assert not recorder.outcomes, "a window is a window"
        clock.advance(1.0)
    recorder.await_outcome()
    assert threads != [threading.current_thread()]


def test_while_the_worker_runs_a_batch_the_next_is_its_own(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    go = threading.Event()
    model.script = [lambda: reach(go)]
    _, first = enqueue(batcher, [1.0])
    _, second, call = quietly(batcher, [2.0])
    if call:
        assert batcher.attend(MOST) == math.inf
    go.set()
    first.await_outcome()
    second.await_outcome()
    assert threading.current_thread() not in model.threads


def test_after_a_batch_that_took_very_long_workers_run_all(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    model.script = [lambda: clock.advance(0.1)]
    quietly(batcher, [1.0])
    batcher.attend(MOST)
    assert model.here
    for rows in (1, 4):
        batcher.anchor(rows, 0.0)
    _, recorder, _ = quietly(batcher, [2.0])
    assert batcher.attend(10.0) == math.inf
    recorder.await_outcome()
    assert not model.here


@pytest.mark.parametrize("ended", ["by itself", "not at all"])
def test_after_a_run_that_hung_workers_run_all_for_good(
    batcher: Batcher, model: Model, clock: VirtualClock, ended: str
) -> None:
    """Who attends serves others, too: for it a second such run must not stand still."""

    def hang() -> None:
        error = RunTimedOut("it took too long")
        if ended == "not at all":
            batcher.give_up(0, error)
            return
        model._running -= 1
        raise error

    model.script = [hang]
    _, recorder, _ = quietly(batcher, [1.0])
    batcher.attend(MOST)
    assert isinstance(recorder.await_outcome().error, RunTimedOut)
    clock.advance(3600.0)
    for rows in (1, 4):
        batcher.anchor(rows, 0.0)
    await_worker(clock)
    model.threads.clear()
    _, recorder, _ = quietly(batcher, [2.0])
    assert batcher.attend(10.0) == math.inf
    recorder.await_outcome()
    assert not model.here


class Loyal(Returners):
    """Two callers come back within a second."""

    def wait_until(self, now: float, queued: int, batch_time: Any, room: int, answering: Any = None) -> float:
        """For a second after the last answers, unless two are there."""
        return now if queued >= 2 else max(now, self._answered_at + 1.0)

    def answered(self, now: float, callers: int) -> None:
        """Remembers when."""
        self._answered_at = now


@pytest.fixture
def loyal(monkeypatch: pytest.MonkeyPatch, clock: VirtualClock) -> None:
    """Has every batcher wait for callers; since before, it is long ago that one was answered."""
    monkeypatch.setattr("tensorferry.batcher.queue.Returners", Loyal)
    clock.advance(10.0)


@pytest.mark.usefixtures("loyal")
def test_the_wait_for_returners_is_returned_and_kept(
    make: Make, model: Model, clock: VirtualClock, batcher: Batcher
) -> None:
    quietly(batcher, [1.0])
    assert batcher.attend(MOST) == math.inf, "nobody was answered lately"
    _, recorder, call = quietly(batcher, [2.0])
    assert call
    assert batcher.attend(MOST) == 11.0
    clock.advance(0.5)
    assert batcher.attend(MOST) == 11.0
    assert not recorder.outcomes
    clock.advance(0.5)
    assert batcher.attend(MOST) == math.inf
    assert recorder.only.outputs.tolist() == [4.0]
    assert model.here


@pytest.mark.usefixtures("loyal")
def test_the_wait_is_over_when_all_are_back(batcher: Batcher, model: Model, clock: VirtualClock) -> None:
    quietly(batcher, [1.0])
    batcher.attend(MOST)
    quietly(batcher, [2.0])
    assert batcher.attend(MOST) == 11.0
    assert quietly(batcher, [3.0])[2], "there is nothing to wait for any more"
    assert batcher.attend(MOST) == math.inf
    assert model.batches == [[1.0], [2.0, 3.0]]
    assert model.here


@pytest.mark.usefixtures("loyal")
def test_a_wait_for_returners_that_others_end_is_over(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    quietly(batcher, [1.0])
    batcher.attend(MOST)
    _, first, _ = quietly(batcher, [2.0])
    assert batcher.attend(MOST) == 11.0
    _, second = enqueue(batcher, [3.0])
    first.await_outcome()
    second.await_outcome()
    assert model.batches == [[1.0], [2.0, 3.0]]
    assert model.threads[1] is not threading.current_thread(), "the worker heard of it"
    assert batcher.attend(MOST) == math.inf


def polls(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when another thread than this has asked for work while the device was lent, and waits again."""
    asked, poll, here = threading.Event(), RequestQueue._poll_locked, threading.current_thread()

    def watched(queue: RequestQueue, device: Any) -> Any:
        step = poll(queue, device)
        if threading.current_thread() is not here:
            assert not isinstance(step, Work), "the device is lent"
            asked.set()
        return step

    monkeypatch.setattr(RequestQueue, "_poll_locked", watched)
    return asked


def test_what_others_bring_meanwhile_is_served_after_it(
    batcher: Batcher, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is woken, finds the device lent, and leaves it to the thread that runs the batch."""
    asked, others = polls(monkeypatch), []

    def another() -> None:
        elsewhere(lambda: others.append(enqueue(batcher, [2.0])[1]))
        reach(asked)

    model.script = [another]
    _, recorder, _ = quietly(batcher, [1.0])
    assert batcher.attend(MOST) == math.inf
    assert model.batches == [[1.0], [2.0]]
    assert model.here
    assert (recorder.kind, others[0].kind) == ("answered", "answered")


def test_what_others_bring_meanwhile_is_the_workers_if_it_may_be_long(
    batcher: Batcher, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Recorder] = []
    wide = np.ones((1, 2))
    batcher.anchor(1, LONG, request_of(wide, Recorder(), one_row=False).key)
    model.script = [lambda: elsewhere(lambda: others.append(enqueue(batcher, wide)[1]))]
    quietly(batcher, [1.0])
    assert batcher.attend(MOST) == math.inf
    others[0].await_outcome()
    assert [thread is threading.current_thread() for thread in model.threads] == [True, False]


def test_who_attends_meanwhile_leaves_it_to_the_first(batcher: Batcher, model: Model) -> None:
    others: list[Recorder] = []

    def another() -> None:
        others.append(quietly(batcher, [2.0])[1])
        assert batcher.attend(MOST) == math.inf
        assert not others[0].outcomes

    model.script = [lambda: elsewhere(another)]
    quietly(batcher, [1.0])
    assert batcher.attend(MOST) == math.inf
    assert model.batches == [[1.0], [2.0]]
    assert model.here
    assert others[0].kind == "answered"


def test_a_completion_may_enqueue_and_attend(batcher: Batcher, model: Model) -> None:
    """The thread is in the midst of a batch: it runs the next after it, not within."""
    again = Recorder()

    def complete(outcome: Outcome) -> None:
        batcher.enqueue_quietly(request_of([2.0], again, one_row=False))
        assert batcher.attend(MOST) == math.inf
        assert not again.outcomes

    batcher.enqueue_quietly(request_of([1.0], complete, one_row=False))
    assert batcher.attend(MOST) == math.inf
    assert again.only.outputs.tolist() == [4.0]


def test_a_failing_request_harms_no_neighbour(batcher: Batcher, model: Model) -> None:
    recorders = [quietly(batcher, [value])[1] for value in (1.0, -2.0, 3.0)]
    assert batcher.attend(MOST) == math.inf
    assert [recorder.kind for recorder in recorders] == ["answered", "ValueError", "answered"]
    assert model.here
    _, after, _ = quietly(batcher, [4.0])
    assert batcher.attend(MOST) == math.inf
    assert after.kind == "answered"
    statistics = batcher.statistics()
    assert (statistics.batches, sum(statistics.close_reasons.values())) == (3, 2)


def test_a_completion_that_raises_harms_nobody(batcher: Batcher) -> None:
    def complete(outcome: Outcome) -> None:
        raise SystemExit

    batcher.enqueue_quietly(request_of([1.0], complete, one_row=False))
    _, neighbour, _ = quietly(batcher, [2.0])
    assert batcher.attend(MOST) == math.inf
    assert neighbour.kind == "answered"


def test_who_cancels_while_it_runs_has_cancelled(batcher: Batcher, model: Model) -> None:
    request, recorder, _ = quietly(batcher, [1.0])
    _, neighbour, _ = quietly(batcher, [2.0])
    model.script = [lambda: elsewhere(lambda: batcher.cancel(request))]
    assert batcher.attend(MOST) == math.inf
    assert (recorder.kind, neighbour.kind) == ("Cancelled", "answered")
    assert neighbour.only.outputs.tolist() == [4.0]


def test_who_cancels_before_is_never_run(batcher: Batcher, model: Model) -> None:
    request, recorder, _ = quietly(batcher, [1.0])
    assert batcher.cancel(request)
    assert batcher.attend(MOST) == math.inf
    assert recorder.kind == "Cancelled"
    assert not model.batches


def test_an_answer_after_the_deadline_is_none(batcher: Batcher, model: Model, clock: VirtualClock) -> None:
    model.script = [lambda: clock.advance(1.0)]
    _, recorder, _ = quietly(batcher, [1.0], deadline=clock.now() + 0.5)
    assert batcher.attend(MOST) == math.inf
    assert recorder.kind == "DeadlineExceeded"


def test_who_expires_while_another_batch_runs_is_told_at_once(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    """The worker waits, but cannot see to it."""
    late: list[Recorder] = []

    def expire() -> None:
        late.append(quietly(batcher, [2.0], deadline=clock.now() + 0.01)[1])
        clock.await_sleepers(2)
        clock.advance(0.011)
        late[0].await_outcome()

    model.script = [expire]
    quietly(batcher, [1.0])
    assert batcher.attend(MOST) == math.inf
    assert late[0].kind == "DeadlineExceeded"
    assert model.batches == [[1.0]]


def test_who_expired_in_the_queue_is_told_by_the_thread_that_attends(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    told: list[threading.Thread] = []
    request = request_of(
        [1.0], lambda _: told.append(threading.current_thread()), one_row=False, deadline=clock.now() + 0.5
    )
    batcher.enqueue_quietly(request)
    clock.advance(1.0)
    assert batcher.attend(MOST) == math.inf
    assert told == [threading.current_thread()]
    assert not model.batches
    _, recorder, _ = quietly(batcher, [2.0])
    assert batcher.attend(MOST) == math.inf
    assert recorder.kind == "answered"


def test_drain_waits_for_a_batch_that_runs_elsewhere(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    drained: list[bool] = []
    drain = threading.Thread(target=lambda: drained.append(batcher.drain()))

    def during() -> None:
        drain.start()
        clock.await_sleepers(2)
        assert not drained

    model.script = [during]
    _, recorder, _ = quietly(batcher, [1.0])
    assert batcher.attend(MOST) == math.inf
    drain.join(PATIENCE)
    assert drained == [True]
    assert recorder.kind == "answered"


@pytest.mark.parametrize("drain", [False, True])
def test_a_close_meanwhile_ends_the_worker_after_it(
    batcher: Batcher, model: Model, clock: VirtualClock, drain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It woke for the close, and waited again, since the device was lent."""
    asked, closed, late = polls(monkeypatch), [], []
    close = threading.Thread(target=lambda: closed.append(batcher.close(drain=drain)))

    def during() -> None:
        late.append(quietly(batcher, [2.0])[1])
        close.start()
        reach(asked)
        # The worker has answered itself for both wake-ups, of the close and, without drain, of what it drops.
        clock.await_sleepers(2 if drain else 1)

    model.script = [during]
    _, recorder, _ = quietly(batcher, [1.0])
    assert batcher.attend(MOST) == math.inf
    close.join(PATIENCE)
    assert closed == [True]
    assert recorder.kind == "answered"
    assert late[0].kind == ("answered" if drain else "BatcherClosed")


@pytest.mark.parametrize("end", ["drain", "close"])
def test_a_completion_that_ends_the_batcher_does_not_wait_for_itself(batcher: Batcher, end: str) -> None:
    ended: list[bool] = []
    batcher.enqueue_quietly(request_of([1.0], lambda _: ended.append(getattr(batcher, end)()), one_row=False))
    assert batcher.attend(MOST) == math.inf
    assert ended == [False]
    assert batcher.close(), "from elsewhere it waits"


def test_a_closed_batcher_takes_nothing_quietly(batcher: Batcher) -> None:
    assert batcher.close()
    with pytest.raises(BatcherError, match="closed"):
        quietly(batcher, [1.0])
    assert batcher.attend(MOST) == math.inf


def test_a_request_of_many_rows_is_cut_and_answered_as_one(batcher: Batcher, model: Model) -> None:
    _, recorder, call = quietly(batcher, np.arange(10.0))
    assert call
    assert batcher.attend(MOST) == math.inf
    assert recorder.only.outputs.tolist() == [2.0 * value for value in range(10)]
    assert [len(batch) for batch in model.batches] == [4, 4, 2]
    assert model.here


def test_futures_still_work_beside(batcher: Batcher) -> None:
    future = batcher.submit(1.0)
    _, recorder, call = quietly(batcher, [2.0])
    if call:
        batcher.attend(MOST)
    assert result(future) == 2.0
    recorder.await_outcome()
