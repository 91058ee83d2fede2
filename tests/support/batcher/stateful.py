"""Stateful batchers of a running total, and requests of their sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.batcher.rig import Recorder, new_request

from tensorferry.batcher import (
    Request,
    SequenceTag,
    StatefulBatcher,
    StateTensor,
)
from tensorferry.batcher.testing import ScriptedRunner

TOTAL = StateTensor("past", "total", np.zeros((1, 1)))
START = {"start": True}

Make = Callable[..., StatefulBatcher]


def running_total(batch: dict[str, Any]) -> dict[str, Any]:
    """The sum of all x of a sequence. A negative x fails."""
    if (batch["x"] < 0).any():
        raise ValueError("negative")
    total = batch["past"] + batch["x"]
    return {"y": total * 10, "total": total}


def grows(batch: dict[str, Any]) -> dict[str, Any]:
    """The same, with all x as its state."""
    joined = np.concatenate([batch["past"], batch["x"]], axis=1)
    return {"y": joined.sum(axis=1, keepdims=True), "total": joined}


def send(batcher: StatefulBatcher, x: float, number: Any = 1, **options: Any) -> tuple[Request, Recorder]:
    recorder = Recorder()
    tag_options = {name: options.pop(name) for name in list(options) if name in SequenceTag._fields}
    tag = SequenceTag(number, **tag_options)
    request = new_request({"x": np.array([[float(x)]])}, recorder, sequence=tag, **options)
    batcher.enqueue(request)
    return request, recorder


def busy(make: Make, **options: Any) -> tuple[StatefulBatcher, ScriptedRunner, Recorder]:
    """A batcher that runs the first request of a sequence until the runner is opened."""
    runner = ScriptedRunner(running_total, gated=True)
    batcher = make(runner, **options)
    _, first = send(batcher, 1, **START)
    runner.await_batches(1)
    return batcher, runner, first


def value(recorder: Recorder) -> float:
    outcome = recorder.await_outcome()
    assert outcome.error is None, outcome.error
    return float(outcome.outputs["y"][0, 0])


def ask(batcher: StatefulBatcher, x: float, number: Any = 1, **options: Any) -> float:
    return value(send(batcher, x, number, **options)[1])


def error_of(recorder: Recorder) -> BaseException | None:
    return recorder.await_outcome().error


def living(batcher: StatefulBatcher) -> tuple[int, int]:
    found = batcher.sequence_statistics()
    return found.living, found.state_bytes
