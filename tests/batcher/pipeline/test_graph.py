"""Stages that do not fit together are refused when the pipeline is made, and the error names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from tensorferry.batcher import Padding, PadInput, Stage, StageModel
from tensorferry.batcher.pipeline.graph import graph_of


def unused() -> StageModel:
    raise AssertionError("no request runs")


def stage(name: str, inputs: Mapping[str, str], outputs: Mapping[str, str], **options: Any) -> Stage:
    return Stage(name, unused, inputs, outputs, **options)


def line(*tensors: str) -> list[Stage]:
    """Stages, each from one tensor to the next, named after what they give."""
    return [stage(after, {"in": before}, {"out": after}) for before, after in pairwise(tensors)]


def test_stages_are_put_into_an_order_in_which_they_can_run() -> None:
    graph = graph_of("p", list(reversed(line("x", "a", "b", "y"))), ["x"], ["y"])
    assert [each.name for each in graph.stages] == ["a", "b", "y"]
    assert graph.first == (0,)
    assert graph.followers == ((1,), (2,), ())
    assert graph.waits_for == (0, 1, 1)


def test_branches_start_together_and_a_stage_waits_for_all_it_reads() -> None:
    join = stage("join", {"p": "a", "q": "b", "r": "a"}, {"s": "y", "unread": "z"})
    graph = graph_of("p", [*line("x", "a"), *line("x", "b"), join], ["x"], ["y", "b"])
    assert graph.first == (0, 1)
    assert graph.followers == ((2,), (2,), ())
    assert graph.waits_for == (0, 0, 2)
    # A stage that reads a tensor twice is one reader; an output of the pipeline is never released.
    assert graph.readers == {"x": 2, "a": 1, "b": 2, "y": 1}
    assert graph.needed_later[2] == (("s", "y"),)


@pytest.mark.parametrize(
    ("stages", "inputs", "outputs", "words"),
    [
        ([], ["x"], ["y"], ["no stages"]),
        (line("x", "y"), [], ["y"], ["inputs []"]),
        (line("x", "y"), ["x"], [], ["outputs []"]),
        (line("x", "y"), ["x", "x"], ["y"], ["inputs", "['x']"]),
        (line("x", "y"), ["x"], ["y", "y"], ["outputs", "['y']"]),
        ([*line("x", "y"), *line("x", "y")], ["x"], ["y"], ["stages", "['y']"]),
        (line("x", "a", "y"), ["b"], ["y"], ["'a'", "reads tensor 'x'", "['b']"]),
        (line("x", "y"), ["x"], ["z"], ["output 'z'", "['y']"]),
        (line("x", "y"), ["x"], ["x"], ["output 'x'", "['y']"]),
        ([stage("s", {"in": "x"}, {"out": "x"})], ["x"], ["x"], ["'s'", "'x'", "input of the pipeline"]),
        (
            [stage("s", {"in": "x"}, {"out": "y"}), stage("t", {"in": "x"}, {"out": "y"})],
            ["x"],
            ["y"],
            ["'t'", "'y'", "'s'"],
        ),
        (
            [
                stage("s", {"in": "x", "back": "b"}, {"out": "a"}),
                stage("t", {"in": "a"}, {"out": "b"}),
                *line("x", "y"),
            ],
            ["x"],
            ["y"],
            ["['s', 't']", "cycle"],
        ),
    ],
)
def test_what_does_not_fit_together_is_named(
    stages: Sequence[Stage], inputs: Sequence[str], outputs: Sequence[str], words: Sequence[str]
) -> None:
    with pytest.raises(ValueError, match="'p'") as caught:
        graph_of("p", stages, inputs, outputs)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("inputs", "outputs", "options", "words"),
    [
        ({}, {"out": "y"}, {}, ["no inputs"]),
        ({"in": "x"}, {}, {}, ["no outputs"]),
        ({"in": "x"}, {"out": "y"}, {"shared": frozenset(["n"])}, ["['n']", "['in']"]),
        ({"in": "x"}, {"out": "y"}, {"shared": frozenset(["in"])}, ["StageModel"]),
        ({"in": "x"}, {"out": "y"}, {"padding": Padding((8,), {"in": PadInput(1, 0)})}, ["StageModel"]),
    ],
)
def test_a_stage_that_makes_no_sense_is_named(
    inputs: Mapping[str, str], outputs: Mapping[str, str], options: Any, words: Sequence[str]
) -> None:
    with pytest.raises(ValueError, match="'s'") as caught:
        stage("s", inputs, outputs, **options)
    assert all(word in str(caught.value) for word in words)
