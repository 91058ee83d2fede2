"""A stage runs its steps on one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tensorferry.batcher import DeadlineExceeded, Request
from tensorferry.batcher.testing import VirtualClock
from tensorferry.server.python.steps.stage_function import StageFunction, StageStep


def _request(rows: int = 1, until: float = math.inf) -> Request:
    return Request((), lambda outcome: None, names=("x",), rows=rows, nbytes=0, deadline=until)


def _stage(steps: Sequence[StageStep], outputs: Sequence[str] | None, **options: Any) -> StageFunction:
    return StageFunction("m", steps, outputs, **options)


def test_nothing_runs_after_the_last_deadline() -> None:
    clock, ran = VirtualClock(), list[str]()

    def slow(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        ran.append("slow")
        clock.advance(5.0)
        return {"y": 1}

    def last(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        ran.append("last")
        return {"z": 1}

    stage = _stage([StageStep("slow", slow), StageStep("last", last)], ["z"], clock=clock.now)
    with pytest.raises(DeadlineExceeded, match="before step 'last' of model 'm'"):
        stage.run_batch({"x": 1}, [_request(until=4.0), _request(until=5.0)])
    assert ran == ["slow"]
    assert stage.run_batch({"x": 1}, [_request(until=9.0), _request(until=11.0)]) == {"z": 1}


def test_a_released_tensor_is_not_kept() -> None:
    def read(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"y": 1}

    steps = [
        StageStep("a", read, inputs={"x": "x"}, drops=("x",)),
        StageStep("b", read, inputs={"again": "x"}),
    ]
    with pytest.raises(KeyError, match="x"):
        _stage(steps, ["y"]).run_batch({"x": 1}, [_request()])
