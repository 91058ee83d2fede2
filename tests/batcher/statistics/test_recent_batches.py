"""Records of the last batches: their times and members, and no tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.batcher.rig import PATIENCE, error, fails_below_zero, occupy, result, results

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
        results([first, early, late])
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
        results([first, *many])
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
