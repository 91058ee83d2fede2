"""Deadlines: each stage keeps the time that later stages need, and nothing runs for a request that is too late."""

from __future__ import annotations

import pytest
from support.batcher.pipelines import Puppets, add_one, answer, double, kind, send, send_here, slow

from tensorferry.batcher import BatchInfo, DeadlineExceeded, Stage, StageModel
from tensorferry.batcher.pipeline.later_times import LeastWait


def test_nothing_runs_later_if_the_deadline_passes_in_the_first_stage(puppets: Puppets) -> None:
    pipeline = puppets.two()
    late, fine = send(pipeline, [1], deadline=5.0)[1], send(pipeline, [2], deadline=50.0)[1]
    puppets.runners["a"].await_batches(1)
    puppets.clock.advance(5.0)
    puppets.open()
    assert (kind(late), answer(fine)) == ("DeadlineExceeded", [6])
    assert pipeline.drain()
    assert puppets.rows("b") == [[3]]
    assert pipeline.statistics().expired == 1


def test_nothing_runs_later_if_it_passes_between_the_stages(puppets: Puppets) -> None:
    def slow_lookup() -> StageModel:
        if puppets.runners["a"].batches:
            puppets.clock.advance(5.0)
        return StageModel(other)

    other = puppets.batcher("other", double, gated=False)
    pipeline = puppets.pipeline(
        puppets.stage("a", add_one, "x", "m", gated=False), Stage("b", slow_lookup, {"in": "m"}, {"out": "y"})
    )
    assert kind(send(pipeline, [1], deadline=4.0)[1]) == "DeadlineExceeded"
    assert puppets.rows("other") == []


class TestWithLearnedTimes:
    """Stages "a", "b" and "c" take 1, 2 and 4 s."""

    @pytest.fixture
    def stages(self, puppets: Puppets) -> list[Stage]:
        clock = puppets.clock
        return [
            puppets.stage(name, slow(clock, seconds), reads, gives, gated=False)
            for name, seconds, reads, gives in (
                ("a", 1.0, "x", "m"),
                ("b", 2.0, "m", "n"),
                ("c", 4.0, "n", "y"),
            )
        ]

    def test_a_stage_drops_what_the_later_ones_could_not_answer_in_time(
        self, puppets: Puppets, stages: list[Stage]
    ) -> None:
        pipeline = puppets.pipeline(*stages)
        times = pipeline.later_times
        assert times.after(1, 9.0) == [0, 0, 0], "nothing is known"
        send_here(pipeline, [0])
        now = puppets.clock.now()
        # Of the last second: "a" and "b" ended longer ago.
        assert times.after(1, 9.0) == pytest.approx([4, 4, 0], rel=0.01)
        with pytest.raises(DeadlineExceeded, match=r"stage 'a', after which 4\d\d\d\.\d ms"):
            send(pipeline, [1], deadline=now + 3.9)
        assert len(puppets.rows("a")) == 1
        assert pipeline.statistics().refusals == {"deadline": 1}

    def test_it_expires_in_a_queue_when_it_cannot_arrive_any_more(
        self, puppets: Puppets, stages: list[Stage]
    ) -> None:
        pipeline = puppets.pipeline(puppets.stage("first", add_one, "w", "x"), *stages, inputs=["w"])
        puppets.runners["first"].release()
        send(pipeline, {"w": [0.0]})[1].await_outcome()
        # A worker learns a batch's time after the answer.
        assert pipeline.wait_idle()
        now = puppets.clock.now()
        running = send(pipeline, {"w": [1.0]})[1]
        puppets.runners["first"].await_batches(2)
        late = send(pipeline, {"w": [2.0]}, deadline=now + 5.0)[1]
        puppets.clock.advance(0.9)
        assert not late.outcomes
        # It could be answered in 4 s, so until 5.0 nothing but the later stages is left.
        puppets.clock.advance(0.2)
        assert kind(late) == "DeadlineExceeded"
        puppets.runners["first"].open()
        running.await_outcome()
        assert puppets.rows("first") == [[0], [1]]

    def test_branches_count_by_the_longest_way(self, puppets: Puppets) -> None:
        clock = puppets.clock
        pipeline = puppets.pipeline(
            puppets.stage("a", add_one, "x", "m", gated=False),
            puppets.stage("b", slow(clock, 0.2), "m", "n", gated=False),
            puppets.stage("c", slow(clock, 0.3), "m", "o", gated=False),
            Stage(
                "d",
                puppets.batcher("d", lambda t: slow(clock, 0.1)({"in": t["p"]}), gated=False),
                {"p": "n", "q": "o"},
                {"out": "y"},
            ),
        )
        send_here(pipeline, [0])
        assert pipeline.later_times.after(1, 9.0) == pytest.approx([0.4, 0.1, 0.1, 0.0], rel=0.05)
        assert pipeline.least_time(1) == pytest.approx(0.4, rel=0.05)

    def test_what_was_learned_long_ago_drops_nothing(self, puppets: Puppets, stages: list[Stage]) -> None:
        """Otherwise a stage that was slow once would never be measured again."""
        pipeline = puppets.pipeline(*stages)
        send_here(pipeline, [0])
        puppets.clock.advance(1.1)
        assert pipeline.later_times.after(1, 9.0) == [0, 0, 0]
        assert kind(send_here(pipeline, [1], deadline=puppets.clock.now() + 3.0)[1]) == "DeadlineExceeded"
        assert puppets.rows("a") == [[0], [1]]

    def test_a_model_that_is_not_served_now_counts_as_nothing(
        self, puppets: Puppets, stages: list[Stage]
    ) -> None:
        def gone() -> StageModel:
            raise LookupError("gone")

        pipeline = puppets.pipeline(*stages[:2], Stage("c", gone, {"in": "n"}, {"out": "y"}))
        assert kind(send_here(pipeline, [1], deadline=50.0)[1]) == "LookupError"


class TestWaits:
    """The shortest wait of each batch of a busy later stage is kept, too."""

    def test_the_least_wait_of_each_batch_counts_in_the_mean(self) -> None:
        wait = LeastWait()
        for number, delays in enumerate([(4.0, 2.0, 3.0), (2.0, 5.0), (6.0,), (0.0,)], start=1):
            for delay in delays:
                wait.observe(BatchInfo(number, len(delays), len(delays), 1.0, ended=number / 2), delay, 8.0)
        # The last batch may not be complete.
        expected = 0.0
        for least in (0.0, 2.0, 2.0, 6.0):
            expected += 0.2 * (least - expected)
        assert wait.seconds(8.0, 2.9, idle=False) == pytest.approx(expected)
        assert wait.seconds(8.0, 2.01, idle=True) == pytest.approx(expected)
        assert wait.seconds(8.0, 2.9, idle=True) == 0.0

    def test_waits_of_patient_requests_refuse_no_other(self) -> None:
        """Those with earlier deadlines go first, so they do not wait as long."""
        wait = LeastWait()
        for number in range(1, 50):
            wait.observe(BatchInfo(number, 1, 1, 1.0, ended=0.0), 3.0, timeout=60.0)
        assert wait.seconds(60.0, 0.0, idle=False) == pytest.approx(3.0, rel=0.01)
        assert wait.seconds(5.0, 0.0, idle=False) == 0.0

    def test_old_waits_are_forgotten_also_if_the_stage_is_busy(self) -> None:
        """Requests without deadlines can keep it busy for ever, and teach nothing."""
        wait = LeastWait()
        for number in range(1, 50):
            wait.observe(BatchInfo(number, 1, 1, 1.0, ended=0.0), 3.0, timeout=8.0)
        assert wait.seconds(8.0, 1.1, idle=False) == 0.0
        wait.observe(BatchInfo(50, 1, 1, 1.0, ended=2.0), 0.0, timeout=8.0)
        wait.observe(BatchInfo(51, 1, 1, 1.0, ended=2.1), 0.0, timeout=8.0)
        assert wait.seconds(8.0, 2.1, idle=False) <= 0.2 * 3.0

    def test_a_busy_later_stage_lets_the_first_drop_earlier(self, puppets: Puppets) -> None:
        clock = puppets.clock
        pipeline = puppets.two(max_batch_size=1)
        wait = pipeline.later_times.waits[1]
        for number in range(1, 99):
            wait.observe(BatchInfo(number, 1, 1, 1.0, ended=clock.now()), 3.0, timeout=3.0)
        puppets.runners["a"].open()
        running = send(pipeline, [0])[1]
        puppets.runners["b"].await_batches(1)
        with pytest.raises(DeadlineExceeded):
            send(pipeline, [1], deadline=clock.now() + 2.9)
        accepted = send(pipeline, [1], deadline=clock.now() + 3.1)[1]
        puppets.runners["b"].open()
        assert (answer(running), answer(accepted)) == ([2], [4])
