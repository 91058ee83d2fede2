"""Records of the last batches: their times and members, and no tensors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from support.batcher.rig import PATIENCE, enqueue, error, fails_below_zero, occupy, result

from tensorferry.batcher import Batcher, BatchMember, BatchRecord, CloseReason, InstanceFailed
from tensorferry.batcher.statistics.recent_batches import MOST_BATCHES, MOST_MEMBERS, WATCHED_SECONDS
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


def test_a_record_has_times_and_members() -> None:
    """The second batch has two requests of different classes and queue delays."""
    clock, runner = VirtualClock(100.0), ScriptedRunner(gated=True)

    def run(x: Any) -> Any:
        y = runner(x)
        clock.advance(0.5)
        return y

    with Batcher(run, 8, priority_weights=(2, 1), clock=clock) as batcher:
        assert batcher.last_batches() == []
        first = occupy(batcher, runner)
        early = batcher.submit_rows(np.zeros(3), tag="early")
        clock.advance(0.25)
        late = batcher.submit(0.0, tag="late", priority=1)
        runner.release(2)
        for future in (first, early, late):
            result(future)
        # The last answer arrives before the batch is done.
        assert batcher.drain(PATIENCE)
        alone, both = batcher.last_batches()
    assert alone.members == [BatchMember(None, 1, 2, 0.0, answered=True)]
    assert (alone.number, alone.requests, alone.rows, alone.closed_at) == (1, 1, 1, 100.0)
    assert both.members is not None
    assert sorted(both.members, key=lambda member: str(member.tag)) == [
        BatchMember("early", 3, 2, 0.75, answered=True),
        BatchMember("late", 1, 1, 0.5, answered=True),
    ]
    assert both == BatchRecord(
        number=2,
        instance=0,
        requests=2,
        rows=4,
        reason=CloseReason.IDLE,
        again=False,
        predicted=both.predicted,
        padded_length=None,
        closed_at=100.75,
        join_at=100.75,
        ready=100.75,
        started=100.75,
        ended=101.25,
        answered=101.25,
        done=101.25,
        error="",
        members=both.members,
    )
    assert both.predicted > 0, "the first batch was learned"


def test_a_batch_is_recorded_before_its_answers() -> None:
    found: list[int] = []
    with Batcher(lambda x: x, 4) as batcher:
        for _ in range(20):
            _, recorder = enqueue(batcher, np.zeros(1))
            recorder.await_outcome()
            found.append(len(batcher.last_batches()))
    assert found == list(range(1, 21))


def test_members_are_noted_only_for_a_while_after_a_snapshot() -> None:
    clock = VirtualClock()
    with Batcher(lambda x: x, 4, clock=clock) as batcher:
        result(batcher.submit(0.0, tag="unseen"))
        assert [batch.members for batch in batcher.last_batches()] == [None]
        clock.advance(WATCHED_SECONDS / 2)
        result(batcher.submit(0.0, tag="seen"))
        clock.advance(WATCHED_SECONDS / 2)
        result(batcher.submit(0.0, tag="too late"))
        members = [batch.members for batch in batcher.last_batches()]
    assert members == [None, [BatchMember("seen", 1, 1, 0.0, answered=True)], None]


def test_batches_and_members_are_bounded() -> None:
    runner = ScriptedRunner(gated=True)
    with Batcher(runner, 2 * MOST_MEMBERS) as batcher:
        batcher.last_batches()
        first = occupy(batcher, runner)
        many = [batcher.submit(0.0, tag=number) for number in range(2 * MOST_MEMBERS)]
        runner.open()
        for future in (first, *many):
            result(future)
        full = batcher.last_batches()[-1]
        assert full.members is not None
        assert (full.requests, full.reason) == (2 * MOST_MEMBERS, CloseReason.FULL)
        assert [member.tag for member in full.members] == list(range(MOST_MEMBERS))
        for _ in range(MOST_BATCHES + 3):
            result(batcher.submit(0.0))
        kept = batcher.last_batches()
    assert len(kept) == MOST_BATCHES
    assert [batch.number for batch in kept] == list(range(6, 6 + MOST_BATCHES))


def test_a_long_tag_is_cut() -> None:
    with Batcher(lambda x: x, 4) as batcher:
        batcher.last_batches()
        result(batcher.submit(0.0, tag="x" * 1_000_000))
        (batch,) = batcher.last_batches()
    assert batch.members is not None
    assert batch.members[0].tag == "x" * 128


def test_a_failed_batch_and_its_halves_are_recorded() -> None:
    runner = ScriptedRunner(fails_below_zero, gated=True)
    with Batcher(runner, 4) as batcher:
        batcher.last_batches()
        first = occupy(batcher, runner)
        bad = batcher.submit(-1.0, tag="bad")
        good_one = batcher.submit(1.0, tag="good")
        runner.open()
        result(first)
        assert isinstance(error(bad), ValueError)
        assert result(good_one) == 2.0
        records = batcher.last_batches()
    recorded = [
        (
            batch.number,
            batch.error,
            batch.again,
            batch.reason,
            [(member.tag, member.answered) for member in batch.members or ()],
        )
        for batch in records
    ]
    assert recorded == [
        (1, "", False, CloseReason.IDLE, [(None, True)]),
        (None, "ValueError", False, CloseReason.IDLE, [("bad", False), ("good", False)]),
        (None, "ValueError", True, CloseReason.IDLE, [("bad", False)]),
        (2, "", True, CloseReason.IDLE, [("good", True)]),
    ]
    assert records[-1].predicted == 0.0


def test_a_request_cancelled_during_the_run_is_not_answered() -> None:
    runner = ScriptedRunner(gated=True)
    with Batcher(runner, 4) as batcher:
        batcher.last_batches()
        first = occupy(batcher, runner)
        stays, leaves = (batcher.submit(0.0, tag=tag) for tag in ("stays", "leaves"))
        runner.release()
        result(first)
        runner.await_batches(2)
        assert leaves.cancel()
        runner.open()
        result(stays)
        members = batcher.last_batches()[-1].members
    assert members is not None
    assert [(member.tag, member.answered) for member in members] == [("stays", True), ("leaves", False)]


def test_the_parts_of_a_split_request_have_its_tag() -> None:
    with Batcher(lambda x: x, 2) as batcher:
        batcher.last_batches()
        result(batcher.submit_rows(np.zeros(5), tag="large"))
        recorded = [
            (batch.rows, [member.tag for member in batch.members or ()]) for batch in batcher.last_batches()
        ]
    assert recorded == [(2, ["large"]), (2, ["large"]), (1, ["large"])]


def test_a_record_names_its_function() -> None:
    gates = [threading.Event(), threading.Event()]

    def running(index: int) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            gates[index].set()
            assert gates[1 - index].wait(PATIENCE), "both run at the same time"
            return x

        return run

    with Batcher([running(0), running(1)], 1) as batcher:
        for future in [batcher.submit(0.0) for _ in range(2)]:
            result(future)
        assert sorted(batch.instance for batch in batcher.last_batches()) == [0, 1]


def test_a_batch_that_was_handed_back_and_ran_again() -> None:
    """After a device failure the batch is recorded twice, and its queue delay goes on."""
    clock = VirtualClock()
    failures = [InstanceFailed("gone")]

    def run(x: Any) -> Any:
        clock.advance(1.0)
        if failures:
            raise failures.pop()
        return x

    with Batcher(run, 4, clock=clock) as batcher:
        batcher.last_batches()
        result(batcher.submit(0.0, tag="again"))
        failed, ran = batcher.last_batches()
    assert (failed.error, failed.number) == ("InstanceFailed", None)
    assert failed.members == [BatchMember("again", 1, 1, 0.0, answered=False)]
    assert (ran.error, ran.number, ran.again) == ("", 1, False)
    assert ran.members == [BatchMember("again", 1, 1, 1.0, answered=True)]


def test_no_tensor_is_kept() -> None:
    """Neither inputs nor outputs nor futures are kept."""
    alive: list[weakref.ref[Any]] = []

    def run(x: Any) -> Any:
        y = x + 1
        alive.extend((weakref.ref(x), weakref.ref(y)))
        return y

    with Batcher(run, 4) as batcher:
        batcher.last_batches()
        for _ in range(3):
            example = np.zeros(1000)
            future = batcher.submit(example, tag="x")
            result(future)
            alive += [weakref.ref(example), weakref.ref(future)]
            del example, future
        assert batcher.drain(PATIENCE)
        assert len(batcher.last_batches()) == 3
        gc.collect()
        assert [one() for one in alive] == [None] * 12
