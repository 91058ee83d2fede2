"""Models that would wait for each other in a circle are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.server.calling_models import World
from support.server.rig import fp32, infer, signature, spec
from support.server.rig import request as message

from tensorferry.server.errors import StepFailedError
from tensorferry.server.inference.calls.call_graph import CallGraph
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.serving import FP32, model
from tensorferry.serving import infer as call

VECTOR = signature(spec("x", "FP32", "batch"), outputs=(spec("y", "FP32", "batch"),))


def calls(name: str, other: str) -> Any:
    """A function that calls another model for positive numbers."""

    @model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, name=name, batched=True)
    def function(x: Any) -> Any:
        return call(other, x=x)["y"] if (x > 0).any() else -x

    return function


@pytest.fixture
def graph() -> CallGraph:
    return CallGraph(ModelRegistry())


def test_a_circle_has_its_models_in_the_error(graph: CallGraph) -> None:
    graph.begin("a", "b")
    graph.begin("b", "c")
    with pytest.raises(RecursionError, match="'c' -> 'a' -> 'b' -> 'c'"):
        graph.begin("c", "a")
    # The refused call was not noted.
    graph.begin("a", "c")


def test_calls_that_have_ended_count_until_the_model_changes(graph: CallGraph) -> None:
    graph.begin("a", "b")
    # An open call is never forgotten.
    graph.forget("a")
    with pytest.raises(RecursionError):
        graph.begin("b", "a")
    graph.end("a", "b")
    with pytest.raises(RecursionError):
        graph.begin("b", "a")
    graph.forget("a")
    graph.begin("b", "a")


def test_a_pipeline_waits_for_the_models_it_names(world: World) -> None:
    world.add("p", lambda inputs: {"y": inputs["x"]}, VECTOR, steps=["a"])
    world.load(calls("a", "p"))
    with pytest.raises(StepFailedError) as failed:
        infer(world.service, message({"x": fp32(2)}, model="a"))
    assert "'a' -> 'p' -> 'a'" in failed.value.reason


def test_functions_that_call_each_other_fail_and_do_not_wait(world: World) -> None:
    world.load(calls("a", "b"))
    world.load(calls("b", "a"))
    # The first call is answered, because the other model does not need it.
    for _ in range(3):
        with pytest.raises(StepFailedError, match="model 'a' called model 'b', which failed"):
            infer(world.service, message({"x": np.ones(1, "f4")}, model="a"))
        with pytest.raises(StepFailedError, match="model 'b' failed on this request") as failed:
            infer(world.service, message({"x": np.ones(1, "f4")}, model="b"))
        assert "'b' -> 'a' -> 'b'" in failed.value.reason
