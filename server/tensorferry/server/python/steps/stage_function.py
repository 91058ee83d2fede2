"""A stage: steps that run one after the other on the same batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tensorferry.batcher import DeadlineExceeded, Request

# Lets functions that run for these requests, in the named model, call other models within the block.
CallsOfBatch: TypeAlias = Callable[[str, Sequence[Request]], AbstractContextManager[None]]


def no_calls(model: str, requests: Sequence[Request]) -> AbstractContextManager[None]:
    """Let functions call no other models."""
    return nullcontext()


class StepTimes:
    """Batches that a step ran, and their seconds. Written by the one thread that runs an instance, read by any."""

    __slots__ = ("batches", "seconds")

    def __init__(self) -> None:
        self.batches = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count a batch."""
        self.seconds += seconds
        self.batches += 1


@dataclass(frozen=True, slots=True)
class StageStep:
    """A step of a stage.

    `inputs` gives the stage's tensor of each input of the step, `outputs` the tensor that each of its outputs becomes; None
    if all names are the same. `run` takes the inputs, and the rows of each request if the step is a `python` function.
    `drops` are the tensors that no later step reads.
    """

    name: str
    run: Callable[..., Mapping[str, Any]]
    python: bool = False
    inputs: Mapping[str, str] | None = None
    outputs: Mapping[str, str] | None = None
    drops: tuple[str, ...] = ()
    times: StepTimes = field(default_factory=StepTimes)


class StageFunction:
    """The model function of a stage, for a batcher. One thread at a time calls it.

    It returns the tensors in `outputs`, or those of its only step if that is None. Between two steps, a batch ends with
    DeadlineExceeded if none of its requests is wanted any more.
    """

    def __init__(
        self,
        model: str,
        steps: Sequence[StageStep],
        outputs: Sequence[str] | None,
        calls: CallsOfBatch = no_calls,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._steps = tuple(steps)
        self._outputs = outputs
        self._calls = calls
        self._clock = clock
        # Of the last run. Each run makes its own list.
        self._ends: list[tuple[str, float]] = []

    def step_ends(self) -> Sequence[tuple[str, float]]:
        """Return the name and the end of each step of the last run."""
        return self._ends

    def run_batch(self, inputs: Mapping[str, Any], requests: Sequence[Request], /) -> Mapping[str, Any]:
        """Run the steps on a batch. Raises what a step raises, or DeadlineExceeded."""
        with self._calls(self._model, requests):
            tensors: dict[str, Any] = dict(inputs)
            rows = [request.rows for request in requests]
            now = self._clock()
            ends: list[tuple[str, float]] = []
            self._ends = ends
            for index, step in enumerate(self._steps):
                if index and not any(request.is_wanted(now) for request in requests):
                    raise DeadlineExceeded(
                        f"the deadline passed, or the caller cancelled, before step {step.name!r} of model {self._model!r}"
                    )
                given = tensors
                if step.inputs is not None:
                    given = {own: tensors[name] for own, name in step.inputs.items()}
                outputs = step.run(given, rows) if step.python else step.run(given)
                started, now = now, self._clock()
                step.times.add(now - started)
                ends.append((step.name, now))
                if self._outputs is None:
                    # Its only step.
                    return outputs
                if step.outputs is None:
                    tensors.update(outputs)
                else:
                    for own, name in step.outputs.items():
                        tensors[name] = outputs[own]
                for name in step.drops:
                    del tensors[name]
            return {name: tensors[name] for name in self._outputs or ()}
