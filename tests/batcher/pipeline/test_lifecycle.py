"""Drain and close: in the order of the stages, mid-way, from completions, and with stages of others."""

from __future__ import annotations

import math
import threading

import pytest
from support.batcher.pipelines import Puppets, add_one, answer, double, kind, send, send_here
from support.batcher.rig import Recorder, new_request, reach, result

from tensorferry.batcher import (
    BatcherClosed,
    DeadlineExceeded,
    InstanceFailed,
    Outcome,
    Request,
    RunTimedOut,
    Stage,
    StageModel,
)


def test_draining_answers_what_is_in_any_stage(puppets: Puppets) -> None:
    pipeline = puppets.two(max_batch_size=1)
    puppets.runners["a"].release(2)
    recorders = [send(pipeline, [value])[1] for value in range(4)]
    puppets.runners["b"].await_batches(1)
    assert not pipeline.drain(0.0)
    with pytest.raises(BatcherClosed):
        send(pipeline, [9])
    puppets.open()
    assert pipeline.close()
    assert [answer(recorder) for recorder in recorders] == [[2], [4], [6], [8]]


def test_after_a_flush_no_batch_waits_for_its_window(puppets: Puppets) -> None:
    # The clock stands still, so no window ends.
    pipeline = puppets.two(gated=False, max_queue_delay=1.0)
    pipeline.flush()
    recorder = send(pipeline, [1])[1]
    assert pipeline.wait_idle()
    assert answer(recorder) == [4]


def test_closing_without_draining_answers_only_what_runs_in_the_last_stage(puppets: Puppets) -> None:
    pipeline = puppets.two(max_batch_size=1)
    puppets.runners["a"].release(2)
    last = send(pipeline, [1])[1]
    puppets.runners["b"].await_batches(1)
    waits = send(pipeline, [2])[1]
    puppets.runners["a"].await_batches(2)
    runs = send(pipeline, [3])[1]
    puppets.runners["a"].await_batches(3)
    queued_first = send(pipeline, [4])[1]
    assert not pipeline.close(drain=False, timeout=0.0)
    assert [kind(recorder) for recorder in (waits, queued_first)] == ["BatcherClosed"] * 2
    assert (last.outcomes, runs.outcomes) == ([], [])
    puppets.open()
    assert (answer(last), kind(runs)) == ([4], "BatcherClosed")
    assert pipeline.close()
    counts = pipeline.statistics()
    assert (counts.accepted, counts.answered, counts.abandoned) == (4, 1, 3)


def test_what_waits_in_a_model_of_others_is_waited_for_or_withdrawn(puppets: Puppets) -> None:
    other = puppets.batcher("other", double, max_batch_size=1)
    pipeline = puppets.pipeline(
        puppets.stage("a", add_one, "x", "m", gated=False),
        Stage("b", lambda: StageModel(other), {"in": "m"}, {"out": "y"}),
    )
    running = send_here(pipeline, [1])[1]
    puppets.runners["other"].await_batches(1)
    waits = send_here(pipeline, [2])[1]
    assert not pipeline.drain(0.0)
    assert pipeline.close(drain=False)
    assert [recorder.kind for recorder in (running, waits)] == ["BatcherClosed"] * 2
    assert other.statistics().sizes.queued == 0
    puppets.runners["other"].open()
    assert result(other.submit({"in": 1.0})) == {"out": 2}


def test_a_completion_may_drain_and_close(puppets: Puppets) -> None:
    pipeline = puppets.two(gated=False)
    done = threading.Event()
    said: list[bool] = []

    def complete(outcome: Outcome) -> None:
        said.extend((pipeline.drain(), pipeline.close()))
        done.set()

    pipeline.enqueue(new_request({"x": [1.0]}, complete))
    reach(done)
    assert said == [False, False]
    assert pipeline.close(), "the workers end by themselves"
    assert pipeline.statistics().answered == 1


def empty(recorder: Recorder, deadline: float = math.inf) -> Request:
    return Request((), recorder, names=("x",), rows=0, nbytes=0, deadline=deadline)


def test_empty_requests_are_answered_without_a_run(puppets: Puppets) -> None:
    pipeline = puppets.two(gated=False)
    recorder = Recorder()
    pipeline.answer_without_run(empty(recorder), {"y": []})
    assert recorder.only.outputs == {"y": []}
    assert puppets.rows("a") == []
    counts = pipeline.statistics()
    assert (counts.accepted, counts.answered) == (1, 1)
    with pytest.raises(DeadlineExceeded):
        pipeline.answer_without_run(empty(recorder, deadline=-1.0), {})
    pipeline.close()
    with pytest.raises(BatcherClosed):
        pipeline.answer_without_run(empty(recorder), {})
    assert pipeline.statistics().refusals == {"deadline": 1, "closed": 1}
    first = pipeline.stage_statistics()["a"]
    assert (first.accepted, first.answered, first.refused) == (0, 0, 0), "it gets none of them"


def test_empty_requests_are_refused_while_no_device_of_the_first_stage_works(puppets: Puppets) -> None:
    first = puppets.batcher("a", add_one)
    pipeline = puppets.pipeline(Stage("a", first, {"in": "x"}, {"out": "y"}))
    send(pipeline, [1])
    puppets.runners["a"].await_batches(1)
    first.abort_hung_run(0, RunTimedOut("hung"))
    with pytest.raises(InstanceFailed):
        pipeline.answer_without_run(empty(Recorder()), {})
