"""The answers of one batch become requests of the next stage: its worker wakes once, or they run on the same thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

from support.batcher.pipelines import Puppets, add_one, answer, double, send, send_here
from support.batcher.rig import result

from tensorferry.batcher import Stage, StageModel


class Wakeups:
    """Counts the calls of `wake` of a batcher, and the requests queued at each."""

    def __init__(self, batcher: Any) -> None:
        self.queued: list[int] = []
        self._batcher = batcher
        self._wake = batcher.wake
        batcher.wake = self

    def __call__(self) -> None:
        self.queued.append(self._batcher.statistics().sizes.queued)
        self._wake()


def test_a_whole_batch_arrives_before_the_next_stage_starts(puppets: Puppets) -> None:
    pipeline = puppets.two(max_batch_size=16)
    wakeups = Wakeups(pipeline.stages[1].batcher)
    first = send(pipeline, [0])[1]
    puppets.runners["a"].await_batches(1)
    recorders = [send(pipeline, [value])[1] for value in range(1, 9)]
    puppets.runners["b"].open()
    puppets.runners["a"].release()
    answer(first)
    # The second stage's worker waits again.
    puppets.clock.await_sleepers(1)
    puppets.runners["a"].open()
    assert [answer(recorder) for recorder in recorders] == [[2 * (x + 1)] for x in range(1, 9)]
    assert puppets.rows("b") == [[1], list(range(2, 10))]
    # A lone answer needs no deferral.
    assert wakeups.queued == [8]


def test_a_full_batch_of_the_next_stage_starts_before_all_have_arrived(puppets: Puppets) -> None:
    pipeline = puppets.two(max_batch_size=16, of_second={"max_batch_size": 4})
    wakeups = Wakeups(pipeline.stages[1].batcher)
    first = send(pipeline, [0])[1]
    puppets.runners["a"].await_batches(1)
    recorders = [send(pipeline, [value])[1] for value in range(1, 11)]
    puppets.runners["b"].open()
    puppets.runners["a"].release()
    answer(first)
    # The second stage's worker waits again.
    puppets.clock.await_sleepers(1)
    puppets.runners["a"].open()
    for recorder in recorders:
        answer(recorder)
    assert wakeups.queued[0] == 4


def test_a_lone_request_passes_all_stages_on_the_thread_that_submits(puppets: Puppets) -> None:
    threads: list[threading.Thread] = []

    def noted(inputs: Mapping[str, Any]) -> Any:
        threads.append(threading.current_thread())
        return add_one(inputs)

    pipeline = puppets.two(noted, noted, gated=False)
    assert send_here(pipeline, [1])[1].only.outputs["y"].tolist() == [3]
    assert threads == [threading.current_thread()] * 2


def test_a_thread_that_runs_nothing_itself_wakes_the_workers(puppets: Puppets) -> None:
    pipeline = puppets.two(gated=False, steady=False)
    recorder = send_here(pipeline, [1])[1]
    assert answer(recorder) == [4]


def test_models_of_others_get_the_requests_of_an_inline_run_once_it_is_over(puppets: Puppets) -> None:
    other = puppets.batcher("other", double, gated=False, max_batch_size=8)
    wakeups = Wakeups(other)
    pipeline = puppets.pipeline(
        puppets.stage("a", add_one, "x", "m", gated=False, max_batch_size=8),
        Stage("b", lambda: StageModel(other), {"in": "m"}, {"out": "y"}),
    )
    # The worker of the other model waits, too.
    puppets.clock.await_sleepers(2)
    recorder = send_here(pipeline, [1])[1]
    assert answer(recorder) == [4]
    assert wakeups.queued == [1]


def test_a_nested_pipeline_is_woken_as_a_batcher_is(puppets: Puppets) -> None:
    inner = puppets.two(gated=False)
    outer = puppets.pipeline(
        puppets.stage("c", add_one, "x", "m", gated=False, max_batch_size=8),
        Stage("inner", lambda: StageModel(inner), {"x": "m"}, {"y": "y"}),
    )
    recorders = [send_here(outer, [value])[1] for value in range(4)]
    assert [answer(recorder) for recorder in recorders] == [[2 * (x + 2)] for x in range(4)]
    assert outer.run_inline(1.0) == math.inf
    assert result(outer.submit({"x": 1.0})) == {"y": 6}
