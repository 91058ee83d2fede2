"""The way of a request: which stage gets what, when, and with which attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from polling import until
from support.batcher.pipelines import Puppets, add_one, answer, double, queued, send, send_here
from support.batcher.rig import Recorder, enqueue, result

from tensorferry.batcher import (
    AloneKey,
    Batcher,
    BatcherClosed,
    InvalidRequest,
    Pipeline,
    Request,
    Stage,
    StageModel,
    Tensor,
)
from tensorferry.batcher.testing import VirtualClock


def test_stages_run_in_their_order_and_each_forms_its_own_batches(puppets: Puppets) -> None:
    pipeline = puppets.two(max_batch_size=4, of_second={"max_batch_size": 2})
    a, b = puppets.runners["a"], puppets.runners["b"]
    first = send(pipeline, [1])[1]
    a.await_batches(1)
    others = [send(pipeline, [value])[1] for value in (2, 3, 4)]
    a.release()
    b.await_batches(1)
    assert not first.outcomes
    a.release()
    until(lambda: queued(pipeline, "b") == 3)
    b.open()
    assert [answer(recorder) for recorder in (first, *others)] == [[4], [6], [8], [10]]
    assert puppets.rows("a") == [[1], [2, 3, 4]]
    assert puppets.rows("b") == [[2], [3, 4], [5]]


def test_a_request_that_shares_no_batch_shares_none_in_a_stage_or_a_stage_of_a_stage(
    puppets: Puppets,
) -> None:
    inner = puppets.pipeline(puppets.stage("a", add_one, "x", "y"))
    pipeline = puppets.pipeline(
        Stage("inner", inner, {"x": "x"}, {"y": "m"}), puppets.stage("b", double, "m", "y")
    )
    a, b = puppets.runners["a"], puppets.runners["b"]
    first = send(pipeline, [1])[1]
    a.await_batches(1)
    others = [
        send(pipeline, [value], **key)[1] for value, key in ((2, {}), (3, {"key": AloneKey()}), (4, {}))
    ]
    a.open()
    b.await_batches(1)
    b.open()
    assert [answer(recorder) for recorder in (first, *others)] == [[4], [6], [8], [10]]
    assert [3] in puppets.rows("a")
    assert [4] in puppets.rows("b")


def test_branches_run_at_the_same_time_and_are_joined(puppets: Puppets) -> None:
    join = Stage(
        "join",
        puppets.batcher("join", lambda t: {"sum": t["p"] + t["q"], "dropped": t["p"]}),
        {"p": "a", "q": "b"},
        {"sum": "y"},
    )
    pipeline = puppets.pipeline(
        puppets.stage("a", add_one, "x", "a"), puppets.stage("b", double, "x", "b"), join
    )
    recorder = send(pipeline, [3, 4])[1]
    puppets.runners["a"].await_batches(1)
    puppets.runners["b"].await_batches(1)
    for name in ("b", "a"):
        assert not puppets.runners["join"].batches
        puppets.runners[name].release()
    puppets.runners["join"].open()
    assert answer(recorder) == [10, 13]
    assert [stage.stage for stage in recorder.only.stages][-1] == "join"


class Seen:
    """A function that keeps what its requests were like."""

    def __init__(self) -> None:
        self.requests: list[tuple[Any, ...]] = []
        self.data: list[Any] = []

    def run_batch(self, inputs: Mapping[str, Any], requests: Sequence[Request]) -> Any:
        self.requests += [
            (r.priority, r.client, r.tag, r.owner, r.deadline, r.max_queue_time, r.rows, r.names)
            for r in requests
        ]
        self.data += [r.tensors[0].data for r in requests]
        return {"out": inputs["in"] + 1}


def test_a_stage_gets_the_callers_bytes_and_the_requests_attributes(clock: VirtualClock) -> None:
    first, second, owner, raw = Seen(), Seen(), object(), np.arange(3.0).tobytes()
    stages = [
        Stage(
            name,
            Batcher(seen, name=name, clock=clock, priority_weights=weights),
            {"in": reads},
            {"out": gives},
        )
        for name, seen, reads, gives, weights in (
            ("a", first, "x", "m", (2, 1)),
            ("b", second, "m", "y", (1,)),
        )
    ]
    with Pipeline("p", stages, inputs=["x"], outputs=["y"], clock=clock) as pipeline:
        recorder = Recorder()
        request = Request(
            (Tensor(np.dtype(float), (3,), raw),),
            recorder,
            names=("x",),
            rows=3,
            nbytes=len(raw),
            deadline=9.0,
            priority=2,
            tag="tag",
            client="client",
            max_queue_time=5.0,
            owner=owner,
        )
        pipeline.enqueue(request)
        assert answer(recorder) == [2, 3, 4]
    assert first.data[0] is raw
    expected = ("client", "tag", owner, 9.0, 5.0, 3, ("in",))
    # The second batcher has one class only.
    assert (first.requests, second.requests) == ([(2, *expected)], [(1, *expected)])
    assert recorder.only.priority == 2


@pytest.mark.parametrize("inputs", [{"x": 1.0, "z": 1.0}, {"z": 1.0}, {}])
def test_a_request_with_other_inputs_is_refused(puppets: Puppets, inputs: Any) -> None:
    pipeline = puppets.two(gated=False)
    with pytest.raises(InvalidRequest, match=r"\['x'\]|at least one"):
        pipeline.submit(inputs)
    with pytest.raises(InvalidRequest, match="one bare array"):
        pipeline.submit(1.0)
    assert result(pipeline.submit({"x": 1.0})) == {"y": 4}


def test_a_stage_may_read_a_tensor_twice(puppets: Puppets) -> None:
    squares = puppets.batcher("s", lambda t: {"out": t["p"] * t["q"]}, gated=False)
    adds = puppets.batcher("t", lambda t: {"out": t["p"] + t["q"]}, gated=False)
    pipeline = puppets.pipeline(
        Stage("s", squares, {"p": "x", "q": "x"}, {"out": "m"}),
        Stage("t", adds, {"p": "m", "q": "x"}, {"out": "y"}),
    )
    assert answer(send(pipeline, [3])[1]) == [12]


def test_a_request_of_more_rows_than_a_stages_batch_runs_in_parts_there(puppets: Puppets) -> None:
    pipeline = puppets.two(gated=False, max_batch_size=8, of_second={"max_batch_size": 2})
    recorder = send(pipeline, range(10))[1]
    assert answer(recorder) == [2 * (x + 1) for x in range(10)]
    assert [len(rows) for rows in puppets.rows("a")] == [8, 2]
    assert [len(rows) for rows in puppets.rows("b")] == [2] * 5


def test_a_stage_can_change_the_number_of_rows(puppets: Puppets) -> None:
    """Stages without batching see the whole request: one makes its rows, the other ends them."""
    pipeline = puppets.pipeline(
        puppets.stage(
            "split", lambda t: {"out": np.arange(float(t["in"]))}, "x", "m", max_batch_size=0, gated=False
        ),
        puppets.stage("each", double, "m", "n", max_batch_size=4, gated=False),
        puppets.stage(
            "join", lambda t: {"out": t["in"].sum()[np.newaxis]}, "n", "y", max_batch_size=0, gated=False
        ),
    )
    assert result(pipeline.submit({"x": np.array(6)}))["y"].tolist() == [30]
    assert puppets.rows("each") == [[0, 1, 2, 3], [4, 5]]


def test_inputs_without_rows_are_part_of_the_key(puppets: Puppets) -> None:
    def scale(inputs: Mapping[str, Any]) -> Any:
        assert inputs["by"].shape == (1,)
        return {"out": inputs["in"] * inputs["by"]}

    batcher = puppets.batcher("scale", scale, max_batch_size=4)
    stage = Stage("scale", batcher, {"in": "x", "by": "n"}, {"out": "y"}, shared=frozenset(["by"]))
    pipeline = puppets.pipeline(stage, inputs=["x", "n"])
    runner = puppets.runners["scale"]
    recorders = []
    for rows, by in (([0.0], 1.0), ([1.0], 2.0), ([2.0], 3.0), ([3.0, 4.0], 2.0)):
        recorder = Recorder()
        tensors = tuple(
            Tensor(np.dtype(float), (len(values),), np.array(values).tobytes()) for values in (rows, [by])
        )
        pipeline.enqueue(Request(tensors, recorder, names=("x", "n"), rows=len(rows), nbytes=16))
        recorders.append(recorder)
        runner.await_batches(1)
    runner.open()
    assert [answer(recorder) for recorder in recorders] == [[0], [2], [6], [6, 8]]
    assert puppets.rows("scale") == [[0], [1, 3, 4], [2]]


class TestModelsOfOthers:
    """A function returns the batcher for each request."""

    def test_requests_share_batches_with_those_of_other_callers(self, puppets: Puppets) -> None:
        other = puppets.batcher("b", double, max_batch_size=4)
        model = StageModel(other, key=lambda tensors, shapes: tuple(shapes))
        pipeline = puppets.pipeline(
            puppets.stage("a", add_one, "x", "m", gated=False),
            Stage("b", lambda: model, {"in": "m"}, {"out": "y"}),
        )
        running = send(pipeline, [0])[1]
        puppets.runners["b"].await_batches(1)
        mine = send_here(pipeline, [1])[1]
        theirs = enqueue(other, {"in": [7.0]}, key=((),))[1]
        puppets.runners["b"].open()
        assert (answer(running), answer(mine)) == ([2], [4])
        assert theirs.await_outcome().outputs["out"].tolist() == [14]
        assert puppets.rows("b") == [[1], [2, 7]]

    def test_a_model_that_is_replaced_meanwhile_is_looked_up_again(self, puppets: Puppets) -> None:
        old, new = puppets.batcher("old", add_one, gated=False), puppets.batcher("new", double, gated=False)
        old.close()
        found = [StageModel(old), StageModel(new)]
        pipeline = puppets.pipeline(
            puppets.stage("a", add_one, "x", "m", gated=False),
            Stage("b", lambda: found.pop(0), {"in": "m"}, {"out": "y"}),
        )
        assert result(pipeline.submit({"x": 5.0})) == {"y": 12}
        assert not found

    @pytest.mark.parametrize("first", [True, False])
    def test_an_error_of_the_function_is_the_requests(self, puppets: Puppets, first: bool) -> None:
        def none() -> StageModel:
            raise LookupError("no such model")

        gone = Stage("gone", none, {"in": "x" if first else "m"}, {"out": "m" if first else "y"})
        other = puppets.stage("s", add_one, "m" if first else "x", "y" if first else "m", gated=False)
        pipeline = puppets.pipeline(gone, other)
        if first:
            with pytest.raises(LookupError, match="no such model"):
                pipeline.submit({"x": 1.0})
            assert pipeline.statistics().accepted == 0
        else:
            with pytest.raises(LookupError, match="no such model"):
                result(pipeline.submit({"x": 1.0}))
            assert (pipeline.statistics().accepted, pipeline.statistics().failed) == (1, 1)

    def test_it_is_neither_drained_nor_closed_with_the_pipeline(self, puppets: Puppets) -> None:
        other = puppets.batcher("other", add_one, gated=False)
        pipeline = puppets.pipeline(Stage("s", lambda: StageModel(other), {"in": "x"}, {"out": "y"}))
        assert pipeline.close()
        with pytest.raises(BatcherClosed):
            pipeline.submit({"x": 1.0})
        assert result(other.submit({"in": 1.0})) == {"out": 2}


def test_two_stages_cannot_own_one_batcher(puppets: Puppets) -> None:
    batcher = puppets.batcher("b", add_one)
    stages = [Stage("a", batcher, {"in": "x"}, {"out": "m"}), Stage("b", batcher, {"in": "m"}, {"out": "y"})]
    with pytest.raises(ValueError, match="same batcher"):
        Pipeline("p", stages, inputs=["x"], outputs=["y"])
