"""Pipelines whose stages a test controls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from support.batcher.rig import Recorder, enqueue, new_request

from tensorferry.batcher import Batcher, Pipeline, Request, Stage
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

Function = Callable[[Mapping[str, Any]], Any]


def add_one(inputs: Mapping[str, Any]) -> Any:
    return {"out": inputs["in"] + 1}


def double(inputs: Mapping[str, Any]) -> Any:
    """Double the numbers; raise for negative ones."""
    x = inputs["in"]
    if (x < 0).any():
        raise ValueError(f"negative: {x[x < 0].tolist()}")
    return {"out": x * 2}


def count_up(inputs: Mapping[str, Any]) -> Any:
    """Return for each number the numbers from 1 to it, as many ones, and the number."""
    lengths = [int(x) for x in inputs["x"]]
    return {
        "ids": [np.arange(1, length + 1) for length in lengths],
        "mask": [np.ones(length, bool) for length in lengths],
        "length": np.array(lengths),
    }


def slow(clock: VirtualClock, seconds: float) -> Function:
    """A function that adds one, and whose batches take `seconds` on the clock."""

    def run(inputs: Mapping[str, Any]) -> Any:
        clock.advance(seconds)
        return add_one(inputs)

    return run


class Puppets:
    """Makes pipelines of gated stages, and closes them all at the end."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.runners: dict[str, ScriptedRunner] = {}
        self._closed_last: list[Batcher | Pipeline] = []

    def batcher(self, name: str, fn: Function, *, gated: bool = True, **options: Any) -> Batcher:
        """A batcher whose runner is `runners[name]`."""
        runner = self.runners[name] = ScriptedRunner(fn, gated=gated)
        made = Batcher(runner, name=name, clock=self.clock, **options)
        self._closed_last.append(made)
        return made

    def stage(
        self, name: str, fn: Function, reads: str, gives: str, *, gated: bool = True, **options: Any
    ) -> Stage:
        """A stage from one tensor to another: its function's input is "in", its output "out"."""
        return Stage(name, self.batcher(name, fn, gated=gated, **options), {"in": reads}, {"out": gives})

    def join(self, *reads: str, gives: str = "y", gated: bool = True) -> Stage:
        """The stage "join", which adds these tensors."""
        batcher = self.batcher("join", lambda t: {"out": sum(t.values())}, gated=gated)
        return Stage("join", batcher, {f"in{at}": tensor for at, tensor in enumerate(reads)}, {"out": gives})

    def pipeline(self, *stages: Stage, **options: Any) -> Pipeline:
        """A pipeline from "x" to "y"."""
        given = {"inputs": ["x"], "outputs": ["y"], "clock": self.clock, **options}
        made = Pipeline("p", stages, **given)
        self._closed_last.insert(0, made)
        return made

    def two(
        self,
        first: Function = add_one,
        second: Function = double,
        *,
        gated: bool = True,
        of_second: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Pipeline:
        """The pipeline y = 2 (x + 1) in two stages, "a" and "b"."""
        return self.pipeline(
            self.stage("a", first, "x", "m", gated=gated, **options),
            self.stage("b", second, "m", "y", gated=gated, **(options if of_second is None else of_second)),
        )

    def open(self) -> None:
        """Let the batches of all stages run."""
        for runner in self.runners.values():
            runner.open()

    def rows(self, name: str) -> list[list[Any]]:
        """The numbers of each batch that a stage has run."""
        return [batch["in"].tolist() for batch in self.runners[name].batches]

    def close(self) -> None:
        self.open()
        for made in self._closed_last:
            assert made.close(), "a worker did not end"


def send(pipeline: Pipeline, x: Any, **options: Any) -> tuple[Request, Recorder]:
    """Enqueue the rows `x` with a callback; options are attributes of the request."""
    return enqueue(pipeline, x if isinstance(x, dict) else {"x": np.asarray(x, float)}, **options)


def send_here(pipeline: Pipeline, x: Any, **options: Any) -> tuple[Request, Recorder]:
    """Enqueue rows, and run on this thread every stage that is idle; those after a busy one are not reached."""
    sizes = [counts.sizes for counts in pipeline.stage_statistics().values()]
    clock = pipeline._clock
    assert isinstance(clock, VirtualClock)
    # A stage runs here only if its worker waits.
    clock.await_sleepers(sum(not (size.queued or size.running) for size in sizes))
    recorder = Recorder()
    request = new_request({"x": np.asarray(x, float)}, recorder, **options)
    pipeline.enqueue(request, notify=False)
    pipeline.run_inline(math.inf)
    return request, recorder


def answer(recorder: Recorder) -> Any:
    """Wait for the answer and return its output "y"."""
    outcome = recorder.await_outcome()
    assert outcome.error is None, outcome.error
    return outcome.outputs["y"].tolist()


def kind(recorder: Recorder) -> str:
    """Wait for the outcome and return `answered`, or the name of the error's type."""
    recorder.await_outcome()
    return recorder.kind


def queued(pipeline: Pipeline, stage: str) -> int:
    return pipeline.stage_statistics()[stage].sizes.queued
