"""How sequences end before their last request: idle, failed, cancelled, expired, or with their stream."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
from support.batcher.rig import PATIENCE, new_request
from support.batcher.stateful import (
    START,
    Make,
    ask,
    busy,
    error_of,
    living,
    running_total,
    send,
    value,
)

from tensorferry.batcher import (
    Cancelled,
    DeadlineExceeded,
    EndReason,
    Outcome,
    QueueFull,
    SequenceEnded,
    SequenceLimits,
    SequenceTag,
)
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


def test_an_idle_sequence_ends_without_further_requests(make: Make, clock: VirtualClock) -> None:
    batcher = make(clock=clock, limits=SequenceLimits(idle_seconds=5))
    ask(batcher, 1, 1, **START)
    clock.advance(4)
    ask(batcher, 1, 2, **START)
    clock.await_sleepers(1, until=5.0)
    clock.advance(1)
    clock.await_sleepers(1, until=9.0)
    assert living(batcher) == (1, 8)
    clock.advance(4)
    clock.await_sleepers(1, until=14.0)
    assert living(batcher) == (0, 0)


def test_a_failed_request_ends_its_sequence_and_no_other(make: Make) -> None:
    runner = ScriptedRunner(running_total, gated=True)
    batcher = make(runner)
    first = [send(batcher, 1, number, **START)[1] for number in (1, 2)]
    runner.await_batches(1)
    bad, after = send(batcher, -1)[1], send(batcher, 1)[1]
    anew = [send(batcher, 3, **START)[1], send(batcher, 1)[1]]
    other = send(batcher, 5, 2)[1]
    runner.open()
    assert [value(each) for each in first] == [10, 10]
    assert isinstance(error_of(bad), ValueError)
    assert isinstance(error_of(after), SequenceEnded)
    assert [value(each) for each in (*anew, other)] == [30, 40, 60]
    assert isinstance(error_of(send(batcher, -1, 3, **START)[1]), ValueError)
    assert batcher.sequence_statistics().started == 4


def test_requests_of_a_sequence_complete_in_their_order(make: Make) -> None:
    runner = ScriptedRunner(running_total, gated=True)
    batcher = make([runner, runner])
    completed: list[float] = []
    done = threading.Event()

    def complete(x: float, outcome: Outcome) -> None:
        if x == 1:
            # Nothing begins before this returns, also if another instance is free.
            send_to(5)
            assert batcher.sequence_statistics().waiting == 4
        completed.append(x)
        if x == 5:
            done.set()

    def send_to(x: float) -> None:
        tag = SequenceTag(1, start=x == 1)
        batcher.enqueue(new_request({"x": np.array([[x]])}, partial(complete, x), sequence=tag))

    send_to(1.0)
    runner.await_batches(1)
    for x in (-2.0, 3.0, 4.0):
        send_to(x)
    runner.open()
    assert done.wait(PATIENCE)
    assert completed == [1, -2, 3, 4, 5]


def test_a_request_that_is_cancelled_before_it_began_changes_nothing(make: Make) -> None:
    batcher, runner, first = busy(make)
    _, occupied = send(batcher, 0, "other", **START)
    waiting, cancelled = send(batcher, 100)
    _, last = send(batcher, 2)
    assert batcher.cancel(waiting)
    assert not batcher.cancel(waiting)
    assert batcher.statistics().refusals == {"cancelled": 1}
    runner.open()
    assert isinstance(error_of(cancelled), Cancelled)
    assert [value(first), value(occupied), value(last)] == [10, 0, 30]


def test_a_request_that_is_cancelled_while_it_begins_changes_nothing(make: Make) -> None:
    """Between the completions of those before it, on the same thread, and its place in the queue."""
    batcher, runner, _ = busy(make)
    _, bad = send(batcher, -1)
    lost: list[bool] = []
    follows = new_request({"x": np.array([[7.0]])}, lambda _: lost.append(batcher.cancel(begins)))
    follows.sequence = SequenceTag(1)
    batcher.enqueue(follows)
    begins, cancelled = send(batcher, 100, **START)
    runner.open()
    error_of(bad)
    assert isinstance(error_of(cancelled), Cancelled)
    assert lost == [True]
    assert batcher.wait_idle()
    assert batcher.statistics().refusals == {"invalid": 1}, "that of the request whose sequence had ended"
    assert living(batcher) == (0, 0)


def test_a_withdrawn_end_does_not_end_its_sequence(make: Make) -> None:
    batcher, runner, first = busy(make)
    last, _ = send(batcher, 2, end=True)
    assert batcher.cancel(last)
    after = [send(batcher, 5)[1], send(batcher, 2, end=True)[1]]
    runner.open()
    assert [value(each) for each in (first, *after)] == [10, 60, 80]


def test_a_stream_that_ends_before_a_queued_request_is_cancelled_ends_its_sequence(make: Make) -> None:
    runner = ScriptedRunner(running_total, gated=True)
    batcher = make(runner, max_batch_size=1)
    stream = object()
    _, first = send(batcher, 1, stream=stream, start=True)
    _, other = send(batcher, 1, "other", **START)
    runner.release()
    value(first)
    runner.await_batches(2)
    queued, _ = send(batcher, 2, stream=stream)
    batcher.end_stream(stream)
    assert batcher.cancel(queued)
    assert batcher.sequence_statistics().ended == {EndReason.STREAM: 1}
    runner.open()
    value(other)
    assert living(batcher) == (1, 8)


def test_a_request_that_is_cancelled_while_it_runs_ends_its_sequence(make: Make) -> None:
    runner = ScriptedRunner(running_total, gated=True)
    batcher = make(runner)
    request, recorder = send(batcher, 1, **START)
    runner.await_batches(1)
    _, after = send(batcher, 1)
    assert batcher.cancel(request)
    runner.open()
    assert isinstance(error_of(recorder), Cancelled)
    assert isinstance(error_of(after), SequenceEnded)
    assert batcher.sequence_statistics().ended == {EndReason.CANCELLED: 1}


def test_an_expired_request_ends_its_sequence(make: Make, clock: VirtualClock) -> None:
    batcher, runner, first = busy(make, clock=clock)
    _, late = send(batcher, 1, deadline=2.0)
    clock.advance(3)
    runner.open()
    assert value(first) == 10
    assert isinstance(error_of(late), DeadlineExceeded)
    with pytest.raises(SequenceEnded, match="a request of it failed"):
        send(batcher, 1)


@pytest.mark.parametrize("cancels", [False, True])
def test_a_deadline_that_passes_in_the_wait_ends_the_sequence_there(
    make: Make, clock: VirtualClock, cancels: bool
) -> None:
    """The request fails at once, also while the batcher drains. Those before it are answered."""
    batcher, runner, first = busy(make, clock=clock)
    second = send(batcher, 2)[1]
    expiring, late = send(batcher, 100, deadline=2.0)
    lost = send(batcher, 3)[1]
    again = send(batcher, 4, **START)[1]
    if cancels:
        # Before the batcher has seen that it passed.
        expiring.deadline = 0.0
        assert batcher.cancel(expiring)
    else:
        assert not batcher.drain(0.0)
        clock.await_sleepers(1, until=2.0)
        clock.advance(2)
    assert isinstance(error_of(late), DeadlineExceeded)
    assert not batcher.cancel(expiring)
    runner.open()
    assert [value(each) for each in (first, second, again)] == [10, 30, 40]
    assert "a request of it failed" in str(error_of(lost))


def test_a_passed_deadline_keeps_its_place_until_its_turn(make: Make) -> None:
    batcher, runner, first = busy(make, max_queue_size=1)
    _, late = send(batcher, 1, deadline=0.0, **START)
    assert isinstance(error_of(late), DeadlineExceeded)
    with pytest.raises(SequenceEnded, match="a request of it failed"):
        send(batcher, 1)
    with pytest.raises(QueueFull, match="1 requests of sequences"):
        send(batcher, 1, **START)
    runner.open()
    assert value(first) == 10
    assert ask(batcher, 1, 2, **START) == 10
    assert batcher.sequence_statistics().ended == {EndReason.FAILED: 1}


def test_a_stream_that_ends_while_a_request_runs_ends_its_sequence_afterwards(make: Make) -> None:
    runner = ScriptedRunner(running_total, gated=True)
    batcher = make(runner)
    stream = object()
    _, recorder = send(batcher, 1, stream=stream, start=True)
    runner.await_batches(1)
    start = send(batcher, 1, stream=stream, start=True)[1]
    batcher.end_stream(stream)
    assert living(batcher)[0] == 1
    with pytest.raises(SequenceEnded):
        send(batcher, 1, stream=stream)
    runner.open()
    assert [value(recorder), value(start)] == [10, 10]
    assert living(batcher) == (0, 0)
