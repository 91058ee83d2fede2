"""An error in any stage: the request gets it once, its other parts are withdrawn, and its neighbours get their answers."""

from __future__ import annotations

from typing import Any

import pytest
from support.batcher.pipelines import Puppets, add_one, answer, double, kind, queued, send

from tensorferry.batcher import Stage


@pytest.mark.parametrize("stage", ["a", "b"])
def test_31_of_32_are_answered_if_one_fails_in_a_stage(puppets: Puppets, stage: str) -> None:
    functions = (double, add_one) if stage == "a" else (add_one, double)
    pipeline = puppets.two(*functions)
    first = send(pipeline, [0])[1]
    puppets.runners["a"].await_batches(1)
    values = [*range(1, 17), -5, *range(18, 33)]
    recorders = [send(pipeline, [value])[1] for value in values]
    puppets.runners["a"].open()
    puppets.runners["b"].await_batches(1)
    puppets.runners["b"].open()
    answers = [2 * x + 1 if stage == "a" else 2 * (x + 1) for x in values]
    for value, recorder, expected in zip(values, recorders, answers, strict=True):
        if value == -5:
            assert kind(recorder) == "ValueError"
            assert str(recorder.only.error) == f"negative: [{-5.0 if stage == 'a' else -4.0}]"
            failed = recorder.only.stages[-1]
            assert (failed.stage, failed.batch) == (stage, None)
        else:
            assert answer(recorder) == [expected]
    answer(first)
    assert pipeline.drain()
    assert all(len(recorder.outcomes) == 1 for recorder in recorders)
    counts = pipeline.statistics()
    assert (counts.accepted, counts.answered, counts.failed) == (33, 32, 1)
    # The bad one was alone in its last run.
    assert len(pipeline.statistics().unanswered_rows) == 1


def test_an_error_in_a_branch_withdraws_the_other(puppets: Puppets) -> None:
    pipeline = puppets.pipeline(
        puppets.stage("a", add_one, "x", "m"),
        puppets.stage("b", double, "x", "n"),
        puppets.join("m", "n", gated=False),
    )
    running = send(pipeline, [1])[1]
    puppets.runners["a"].await_batches(1)
    puppets.runners["b"].await_batches(1)
    bad = send(pipeline, [-1])[1]
    puppets.runners["b"].open()
    assert kind(bad) == "ValueError"
    assert queued(pipeline, "a") == 0
    puppets.runners["a"].open()
    assert answer(running) == [4]
    assert pipeline.drain()
    assert puppets.rows("a") == [[1]]
    assert len(bad.outcomes) == 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda t: {"other": t["in"]}, ["'a'", "['other']", "['out']"]),
        (lambda t: t["in"], ["'a'", "ndarray", "['out']"]),
    ],
)
def test_a_stage_without_its_outputs_is_named(puppets: Puppets, function: Any, words: list[str]) -> None:
    pipeline = puppets.two(function, gated=False)
    recorder = send(pipeline, [1])[1]
    assert kind(recorder) == "ModelOutputError"
    assert all(word in str(recorder.only.error) for word in words)


def test_inputs_of_a_stage_with_different_rows_are_described(puppets: Puppets) -> None:
    pipeline = puppets.pipeline(
        puppets.stage("a", lambda t: {"out": t["in"][:1]}, "x", "m", gated=False, max_batch_size=0),
        Stage(
            "b",
            puppets.batcher("b", lambda t: {"out": t["p"]}, gated=False),
            {"p": "m", "q": "x"},
            {"out": "y"},
        ),
    )
    recorder = send(pipeline, [1, 2, 3])[1]
    assert kind(recorder) == "ModelOutputError"
    assert "{'p': [1], 'q': [3]}" in str(recorder.only.error)


def test_an_error_while_other_first_stages_start_rejects_the_request(puppets: Puppets) -> None:
    """Its part in the first of them is withdrawn, and its completion never called."""

    def gone() -> Any:
        raise LookupError("gone")

    pipeline = puppets.pipeline(
        puppets.stage("a", add_one, "x", "m"), Stage("b", gone, {"in": "x"}, {"out": "y"}), outputs=["m", "y"]
    )
    running = puppets.runners["a"]
    with pytest.raises(LookupError):
        send(pipeline, [1])
    running.open()
    assert pipeline.drain()
    counts = pipeline.statistics()
    assert (counts.accepted, counts.refused, counts.failed) == (0, 0, 0)
