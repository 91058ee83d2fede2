"""Tensors are released once no later stage reads them; after a request, nothing of it is kept.

The collector is off: what is freed here is freed at once, not when a cycle happens to be found.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.batcher.pipelines import Puppets, add_one, answer, double, send
from support.batcher.rig import Watch

from tensorferry.batcher import Batcher, Pipeline, Stage
from tensorferry.batcher.testing import ScriptedRunner

pytestmark = pytest.mark.usefixtures("collector_off")


def two(puppets: Puppets, first: Any, second: Any, **options: Any) -> Pipeline:
    """A pipeline of two stages whose functions are not recorded."""
    stages = [
        Stage(name, Batcher(fn, name=name, clock=puppets.clock, **options), {"in": reads}, {"out": gives})
        for name, fn, reads, gives in (("a", first, "x", "m"), ("b", second, "m", "y"))
    ]
    return Pipeline("p", stages, inputs=["x"], outputs=["y"], clock=puppets.clock)


@pytest.mark.parametrize("count", [3, 9], ids=["whole", "split"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_request_that_has_ended_keeps_only_its_answer(puppets: Puppets, count: int, bad: bool) -> None:
    first, second = Watch(add_one), Watch(double)
    with two(puppets, first, second, max_batch_size=4) as pipeline:
        sent = np.full(count, -5.0 if bad else 5.0)
        ref = weakref.ref(sent)
        request, recorder = send(pipeline, {"x": sent})
        outcome = recorder.await_outcome()
        assert pipeline.wait_idle()
        puppets.clock.await_sleepers(2)
        del sent
        assert bad or len(outcome.outputs["y"]) == count
        del outcome
        recorder.outcomes.clear()
        assert ref() is None, "the input"
        assert (first.alive, second.alive) == (0, 0)
        assert (request.tensors, request.pipeline_run) == ((), None)


@pytest.mark.parametrize("stage", ["a", "b"])
def test_a_cancelled_request_keeps_nothing(puppets: Puppets, stage: str) -> None:
    pipeline = puppets.two()
    if stage == "b":
        puppets.runners["a"].open()
    send(pipeline, [1])
    puppets.runners[stage].await_batches(1)
    sent = np.arange(3.0)
    ref = weakref.ref(sent)
    request, recorder = send(pipeline, {"x": sent})
    if stage == "b":
        puppets.runners["a"].await_batches(2)
        puppets.clock.await_sleepers(1)
        puppets.runners["a"].batches.clear()
    assert pipeline.cancel(request)
    assert recorder.kind == "Cancelled"
    del sent
    assert ref() is None


def test_a_tensor_is_released_when_its_last_reader_has_run(puppets: Puppets) -> None:
    """While the last stage runs, neither the caller's input nor the first outputs are there any more."""
    made: list[weakref.ref[Any]] = []

    def first(inputs: Mapping[str, Any]) -> Any:
        outputs = {"out": inputs["in"] + 1, "late": inputs["in"] + 2}
        made.extend(weakref.ref(array) for array in outputs.values())
        return outputs

    last = ScriptedRunner(lambda t: {"out": t["p"] + t["q"]}, gated=True)
    puppets.runners["last"] = last
    clock = puppets.clock
    pipeline = Pipeline(
        "p",
        [
            Stage("a", Batcher(first, name="a", clock=clock), {"in": "x"}, {"out": "m", "late": "l"}),
            Stage("b", Batcher(add_one, name="b", clock=clock), {"in": "m"}, {"out": "n"}),
            Stage("c", Batcher(last, name="c", clock=clock), {"p": "n", "q": "l"}, {"out": "y"}),
        ],
        inputs=["x"],
        outputs=["y"],
        clock=clock,
    )
    with pipeline:
        sent = np.arange(2.0)
        ref = weakref.ref(sent)
        recorder = send(pipeline, {"x": sent})[1]
        del sent
        last.await_batches(1)
        clock.await_sleepers(2)
        assert ref() is None
        assert [array() is not None for array in made] == [False, True], "the last stage still has `late`"
        last.open()
        assert answer(recorder) == [4, 6]
