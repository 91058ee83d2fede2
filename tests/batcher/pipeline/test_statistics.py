"""Figures of the whole and of each stage, and what an outcome says of its way."""

from __future__ import annotations

from typing import Any

import pytest
from support.batcher.pipelines import Puppets, add_one, answer, double, send, send_here, slow

from tensorferry.batcher import BatcherSettings, QueuePolicy, Stage, StageModel


def test_a_request_is_counted_once_with_the_times_of_its_stages(puppets: Puppets) -> None:
    clock = puppets.clock
    pipeline = puppets.two(slow(clock, 1.0), slow(clock, 2.0), gated=False)
    for _ in range(3):
        outcome = send(pipeline, [1, 2])[1].await_outcome()
        assert outcome.batch is not None
        assert (outcome.batch.compute_time, outcome.batch.rows, outcome.queue_delay) == (3.0, 2, 0.0)
        assert [(stage.stage, stage.queue_delay) for stage in outcome.stages] == [("a", 0.0), ("b", 0.0)]
        assert [stage.batch and stage.batch.compute_time for stage in outcome.stages] == [1.0, 2.0]
        assert outcome.stages[1].arrival - outcome.stages[0].arrival == 1.0
    counts = pipeline.statistics()
    assert (counts.accepted, counts.answered, counts.batches, counts.rows) == (3, 3, 3, 6)
    assert (counts.answer_times.compute_time_sum, counts.answer_times.total_sum) == (9.0, 9.0)
    assert (counts.latencies.count, counts.last_run) == (3, 9.0)
    # The busy time of the last stage.
    assert counts.compute_time_sum == 6.0
    stages = pipeline.stage_statistics()
    assert [stages[name].compute_time_sum for name in ("a", "b")] == [3.0, 6.0]
    assert [len(batches) for batches in pipeline.stage_batches().values()] == [3, 3]
    assert [batch.ended for batch in pipeline.last_batches()] == [3.0, 6.0, 9.0]


def test_waiting_in_any_stage_is_queue_delay(puppets: Puppets) -> None:
    pipeline = puppets.two(max_batch_size=1)
    puppets.runners["a"].open()
    send(pipeline, [0])
    puppets.runners["b"].await_batches(1)
    recorder = send_here(pipeline, [1])[1]
    puppets.clock.advance(4.0)
    puppets.runners["b"].open()
    assert answer(recorder) == [4]
    assert recorder.only.queue_delay == 4.0
    assert [stage.queue_delay for stage in recorder.only.stages] == [0.0, 4.0]


def test_times_of_branches_are_those_of_the_way_to_the_last_stage(puppets: Puppets) -> None:
    clock = puppets.clock
    pipeline = puppets.pipeline(
        puppets.stage("short", slow(clock, 1.0), "x", "m", gated=False),
        puppets.stage("long", slow(clock, 5.0), "x", "n", gated=False),
        puppets.join("m", "n", gated=False),
    )
    outcome = send_here(pipeline, [1])[1].await_outcome()
    assert outcome.batch is not None
    # One thread runs both branches; "long" is the last that "join" waits for.
    assert (outcome.batch.compute_time, outcome.queue_delay) == (5.0, 1.0)


def test_sizes_are_sums_over_the_stages(puppets: Puppets) -> None:
    pipeline = puppets.two(max_batch_size=1)
    puppets.runners["a"].release()
    send(pipeline, [0])
    puppets.runners["b"].await_batches(1)
    for value in range(3):
        send(pipeline, [value, value])
    puppets.runners["a"].await_batches(2)
    sizes = pipeline.statistics().sizes
    # Three requests of two rows, as six parts; one of them runs, and one part in the second stage.
    assert (sizes.queued, sizes.queued_rows, sizes.running) == (5, 5, 2)
    assert sizes.class_rows == (5,)
    assert sizes.held_bytes == 7 * 8


def test_settings_are_those_of_the_first_stage_or_as_given(puppets: Puppets) -> None:
    policy = QueuePolicy(timeout=3.0)
    pipeline = puppets.two(policies=[policy], max_batch_size=7, of_second={})
    assert (pipeline.settings.max_batch_size, pipeline.policies) == (7, (policy,))
    given = BatcherSettings(priority_weights=(3, 2, 1))
    other = puppets.batcher("other", double, gated=False)
    elsewhere = puppets.pipeline(
        Stage("s", lambda: StageModel(other), {"in": "x"}, {"out": "y"}), settings=given
    )
    assert (elsewhere.settings, elsewhere.priorities) == (given, 3)
    assert (
        puppets.pipeline(Stage("s", lambda: StageModel(other), {"in": "x"}, {"out": "y"})).settings
        == BatcherSettings()
    )


def test_each_request_of_a_pipeline_of_other_models_is_a_batch(puppets: Puppets) -> None:
    other = puppets.batcher("other", add_one, gated=False)
    pipeline = puppets.pipeline(Stage("s", lambda: StageModel(other), {"in": "x"}, {"out": "y"}))
    assert answer(send(pipeline, [1])[1]) == [2]
    counts = pipeline.statistics()
    assert (counts.answered, counts.batches, counts.last_run) == (1, 1, 0.0)
    assert (pipeline.stage_statistics(), pipeline.last_batches()) == ({}, ())
    assert pipeline.queue_full() is None
    assert pipeline.fast_reject(1.0) is None
    assert pipeline.drain_time() == 0.001


@pytest.mark.parametrize("fails", ["a", "b"])
def test_warnings_of_all_stages_are_its_own(puppets: Puppets, fails: str) -> None:
    options: dict[str, Any] = {"max_batch_size": 8, "max_queue_size": 4}
    first, second = (options, {}) if fails == "a" else ({}, options)
    pipeline = puppets.two(gated=False, of_second=second, **first)
    assert len(pipeline.statistics().warnings) == 1
