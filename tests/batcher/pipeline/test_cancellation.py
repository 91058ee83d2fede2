"""A cancelled request is withdrawn from every stage; nothing of it runs later."""

from __future__ import annotations

from typing import Any

import pytest
from support.batcher.pipelines import Puppets, add_one, answer, double, kind, queued, send, send_here

from tensorferry.batcher import Batcher, Request


def test_a_request_that_waits_for_the_second_stage_never_runs_there(puppets: Puppets) -> None:
    pipeline = puppets.two()
    puppets.runners["a"].open()
    running = send(pipeline, [1])[1]
    puppets.runners["b"].await_batches(1)
    request, recorder = send_here(pipeline, [2])
    assert queued(pipeline, "b") == 1
    assert pipeline.cancel(request)
    assert (recorder.kind, queued(pipeline, "b")) == ("Cancelled", 0)
    puppets.runners["b"].open()
    assert answer(running) == [4]
    assert pipeline.drain()
    assert puppets.rows("b") == [[2]]


def test_after_the_deadline_it_counts_as_expired(puppets: Puppets) -> None:
    pipeline = puppets.two()
    request, recorder = send(pipeline, [1], deadline=5.0)
    puppets.runners["a"].await_batches(1)
    puppets.clock.advance(5.0)
    assert pipeline.cancel(request)
    assert recorder.kind == "DeadlineExceeded"


def test_all_branches_and_all_parts_of_a_split_request_are_withdrawn(puppets: Puppets) -> None:
    pipeline = puppets.pipeline(
        puppets.stage("a", add_one, "x", "m", max_batch_size=2),
        puppets.stage("b", double, "x", "n", max_batch_size=3),
        puppets.join("m", "n"),
    )
    request, recorder = send(pipeline, range(10))
    puppets.runners["a"].await_batches(1)
    puppets.runners["b"].await_batches(1)
    assert pipeline.cancel(request)
    assert recorder.kind == "Cancelled"
    assert (queued(pipeline, "a"), queued(pipeline, "b")) == (0, 0)
    puppets.open()
    assert pipeline.drain()
    assert (puppets.rows("a"), puppets.rows("b")) == ([[0, 1]], [[0, 1, 2]])
    assert not puppets.runners["join"].batches
    assert len(recorder.outcomes) == 1


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_cancel_between_two_stages_wins(
    puppets: Puppets, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The second stage's batcher does not have the part yet, or has just got it."""
    pipeline = puppets.two()
    enqueue = Batcher.enqueue

    def interrupted(batcher: Batcher, request: Request, **options: Any) -> bool:
        if batcher is not pipeline.stages[1].batcher:
            return enqueue(batcher, request, **options)
        if where == "after":
            enqueue(batcher, request, **options)
        assert pipeline.cancel(sent)
        return where == "before" and enqueue(batcher, request, **options)

    monkeypatch.setattr(Batcher, "enqueue", interrupted)
    sent, recorder = send(pipeline, [1])
    puppets.runners["a"].open()
    assert kind(recorder) == "Cancelled"
    assert pipeline.drain()
    assert (len(recorder.outcomes), puppets.rows("b")) == (1, [])
