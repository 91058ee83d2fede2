"""Admission: by the first stages' batchers, and by what waits in later ones. What was accepted is never refused later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from support.batcher.pipelines import Puppets, add_one, answer, double, kind, queued, send, send_here

from tensorferry.batcher import ClientPolicy, InvalidRequest, QueueFull, QueuePolicy, Stage


def test_the_queue_of_a_later_stage_rejects_new_requests_but_none_that_were_accepted(
    puppets: Puppets,
) -> None:
    pipeline = puppets.two(max_batch_size=8, of_second={"max_batch_size": 1, "max_queue_size": 2})
    a, b = puppets.runners["a"], puppets.runners["b"]
    running = send(pipeline, [0])[1]
    a.release()
    b.await_batches(1)
    first = send(pipeline, [1])[1]
    a.await_batches(2)
    others = [send(pipeline, [value])[1] for value in (2, 3, 4, 5)]
    a.open()
    # They arrive in the second stage, whose queue holds two rows, and none is refused.
    a.await_batches(3)
    assert pipeline.graph.stages[0].own is not None
    pipeline.graph.stages[0].own.batcher.submit({"in": 0.0}).result()
    assert queued(pipeline, "b") == 5
    for _ in range(2):
        with pytest.raises(QueueFull, match=r"stage 'b'.*5 of 2 rows") as caught:
            send(pipeline, [6])
        assert caught.value.retry_after > 0
    b.open()
    assert [answer(recorder) for recorder in (running, first, *others)] == [[2 * (x + 1)] for x in range(6)]
    assert answer(send(pipeline, [6])[1]) == [14]
    assert pipeline.statistics().refusals == {"queue_full": 2}


def test_an_accepted_request_may_exceed_any_bound_of_a_later_stage(puppets: Puppets) -> None:
    pipeline = puppets.two(
        gated=False,
        of_second={
            "max_queue_size": 1,
            "max_queue_bytes": 1,
            "max_batch_size": 2,
            "clients": ClientPolicy(max_rows=1, rate=0.001),
            "policies": [QueuePolicy(max_requests=1)],
        },
    )
    assert answer(send(pipeline, range(9))[1]) == [2 * (x + 1) for x in range(9)]
    assert pipeline.drain()
    assert pipeline.stage_statistics()["b"].sizes.held_bytes == 0


def test_classes_are_those_of_the_first_stage(puppets: Puppets) -> None:
    pipeline = puppets.two(max_batch_size=1, priority_weights=(2, 1), max_queue_size=1)
    assert (pipeline.priorities, pipeline.policies) == (2, ())
    running = send(pipeline, [0])[1]
    puppets.runners["a"].await_batches(1)
    low = send(pipeline, [1])[1]
    high = send(pipeline, [2], priority=1)[1]
    assert kind(low) == "Shed"
    with pytest.raises(InvalidRequest, match="priority is 3"):
        send(pipeline, [3], priority=3)
    puppets.open()
    assert (answer(running), answer(high)) == ([2], [6])
    assert (high.only.priority, running.only.priority) == (1, 2)
    assert pipeline.statistics().shed == 1


class TestClients:
    """A client's quota holds for the whole pipeline."""

    def test_a_request_in_a_later_stage_counts(self, puppets: Puppets) -> None:
        first = puppets.batcher("a", add_one, max_batch_size=1)
        first.add_warmup_sample(1, 5.0)
        pipeline = puppets.pipeline(
            Stage("a", first, {"in": "x"}, {"out": "m"}),
            puppets.stage("b", double, "m", "y"),
            clients=ClientPolicy(max_requests=1),
        )
        recorder = send(pipeline, [1], client="c")[1]
        send(pipeline, [3], client="d")
        with pytest.raises(QueueFull) as caught:
            send(pipeline, [2], client="c")
        assert caught.value.retry_after >= 5.0, "as long as the queued requests take"
        puppets.runners["a"].open()
        puppets.runners["b"].await_batches(1)
        with pytest.raises(QueueFull, match="client 'c'"):
            send(pipeline, [2], client="c")
        puppets.runners["b"].open()
        other = send(pipeline, [3], client="e")[1]
        assert (answer(recorder), answer(other)) == ([4], [8])
        assert answer(send(pipeline, [2], client="c")[1]) == [6]

    def test_a_request_that_a_stage_rejects_does_not_use_up_the_rate(self, puppets: Puppets) -> None:
        pipeline = puppets.pipeline(
            puppets.stage("a", double, "x", "y", max_batch_size=1, max_queue_size=1),
            clients=ClientPolicy(rate=1.0, burst=3),
        )
        running = send(pipeline, [1], client="c")[1]
        puppets.runners["a"].await_batches(1)
        waiting = send(pipeline, [2], client="c")[1]
        for _ in range(3):
            with pytest.raises(QueueFull, match="1 of 1 rows"):
                send(pipeline, [3], client="c")
        puppets.runners["a"].open()
        assert (answer(running), answer(waiting)) == ([2], [4])
        assert answer(send(pipeline, [3], client="c")[1]) == [6]
        with pytest.raises(QueueFull, match="more than 1 rows a second"):
            send(pipeline, [4], client="c")


def test_an_overloaded_first_stage_rejects_fast(puppets: Puppets) -> None:
    def slow(inputs: Mapping[str, Any]) -> Any:
        puppets.clock.advance(1.0)
        return add_one(inputs)

    pipeline = puppets.two(slow, max_batch_size=1)
    assert pipeline.fast_reject(math.inf) is None
    a, deadline = puppets.runners["a"], 11.0
    puppets.runners["b"].open()
    a.release()
    answer(send(pipeline, [0])[1])
    send(pipeline, [0], deadline=deadline)
    a.await_batches(2)
    sent = 0
    with pytest.raises(QueueFull, match="overload"):  # noqa: PT012
        for sent in range(20):
            send(pipeline, [sent], deadline=deadline)
    assert sent < 15
    assert isinstance(pipeline.fast_reject(deadline), QueueFull)
    assert pipeline.statistics().refused == 2


def test_a_nested_pipeline_has_room_if_all_its_stages_have(puppets: Puppets) -> None:
    pipeline = puppets.two(of_second={"max_batch_size": 1, "max_queue_size": 1})
    puppets.runners["a"].open()
    send(pipeline, [1])
    puppets.runners["b"].await_batches(1)
    assert pipeline.queue_full() is None
    send_here(pipeline, [2])
    assert isinstance(pipeline.queue_full(), QueueFull)
    assert pipeline.drain_time() > 0
