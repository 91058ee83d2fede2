"""Batches are timed by the median of several runs, within a limit of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tensorferry.server.onnx.measuring.batch_times import BatchTime, time_batches


class Model:
    """A model whose runs take the seconds of a table, in turn; `clock` is the time they have taken."""

    def __init__(self, seconds: Mapping[int, list[float]]) -> None:
        self.now = 0.0
        self.runs = dict.fromkeys(seconds, 0)
        self._seconds = seconds

    def clock(self) -> float:
        return self.now

    def run(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        rows = len(inputs["x"])
        took = self._seconds[rows]
        self.now += took[self.runs[rows] % len(took)]
        self.runs[rows] += 1
        return {}


def timed(model: Model, seconds: float = 100.0) -> tuple[list[BatchTime], str]:
    found: list[BatchTime] = []
    stopped = time_batches(
        model.run,
        lambda rows: {"x": np.zeros(rows)},
        list(model.runs),
        found.append,
        memory=None,
        seconds=seconds,
        clock=model.clock,
    )
    return found, stopped


def test_the_median_of_the_runs_after_two_others_is_the_time() -> None:
    model = Model({1: [9.0, 0.9, 0.1, 0.2, 0.3, 0.2, 0.4]})
    # The first run takes longer than a second, so only one other run precedes.
    (first,), stopped = timed(model)
    assert first.seconds == pytest.approx(0.2)
    assert (first.rows, first.runs, stopped) == (1, 3, "")
    model = Model({1: [0.9, 0.8, 0.1, 0.2, 0.3, 0.2, 0.4]})
    (first,), _ = timed(model)
    assert first.seconds == pytest.approx(0.2)
    assert first.runs == 5


def test_short_runs_are_repeated_for_a_while_but_not_for_ever() -> None:
    (first, second), _ = timed(Model({1: [0.01], 2: [1e-6]}))
    assert (first.runs, second.runs) == (30, 10_000)
    assert first.rows_per_second == pytest.approx(100)


def test_sizes_that_would_take_too_long_are_left_out() -> None:
    model = Model({1: [0.5], 2: [1.0], 4: [2.0], 8: [4.0]})
    found, stopped = timed(model, seconds=18.0)
    assert [each.rows for each in found] == [1, 2]
    assert stopped == "a batch of 4 rows takes about 2.0 s, and all sizes may take 18 s"
    assert model.runs[4] == 0
