"""The batching check stops runs that never end on unusual values, and keeps to the time of a load."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from support.models.small import written
from support.server.rig import Array, signature, spec

from tensorferry.server.errors import ModelFailedError
from tensorferry.server.onnx.batching.comparison_runs import ComparisonSettings, with_time_limit
from tensorferry.server.onnx.batching.row_comparison import ComparisonOutcome, RowComparison, compare_rows
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.session import Session


def halved_until_small(path: Path) -> Path:
    """x [batch] → y: halved until all elements are below 1, which NaN and +inf never are."""
    text = """(float[batch] x) => (float[batch] y) {
        y = Loop <body = b (int64 i, bool on, float[n] state) => (bool still_on, float[n] after) {
            after = Mul (state, half) small = Less (after, one) numbers = Cast <to = 1> (small)
            all = ReduceMin <keepdims = 0> (numbers) still_on = Equal (all, nothing)
        }> (most, yes, x)
    }"""
    one, half, nothing = np.array([1, 0.5, 0], np.float32)
    return written(path, text, most=np.int64(1 << 62), yes=True, half=half, one=one, nothing=nothing)


def test_a_run_over_the_limit_is_stopped_and_the_next_one_works(tmp_path: Path) -> None:
    session = Session(halved_until_small(tmp_path / "m.onnx"))
    run = with_time_limit(session.run, session, 0.1)
    with pytest.raises(ModelFailedError):
        run({"x": np.full(1, np.nan, np.float32)})
    assert with_time_limit(session.run, session, 60)({"x": np.full(1, 2, np.float32)})["y"] == 0.5
    assert not [one for one in threading.enumerate() if one.name == "tensorferry-batching-check"]


def test_rows_on_which_a_model_never_ends_are_left_out(tmp_path: Path) -> None:
    session = Session(halved_until_small(tmp_path / "m.onnx"))
    limited = with_time_limit(session.run, session, 0.3)

    def run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        # Only these runs never end. All others have the time of a busy machine.
        return session.run(inputs) if np.isfinite(inputs["x"]).all() else limited(inputs)

    found = compare_rows(session.signature, session.run, ComparisonSettings(), run)
    # The number of iterations is that of the whole batch, so rows also mix.
    assert found.outcome is ComparisonOutcome.MIXES
    assert "depends on other rows" in found.reason


class SlowModel:
    """A function of x [batch, 8], of which each row takes `row_seconds`."""

    def __init__(self, model: Callable[[Array], Array], row_seconds: float = 0.5) -> None:
        self.now = 0.0
        self.sizes: list[int] = []
        self._model = model
        self._row_seconds = row_seconds

    def _run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.sizes.append(len(inputs["x"]))
        self.now += self._row_seconds * len(inputs["x"])
        with np.errstate(all="ignore"):
            return {"y": self._model(inputs["x"])}

    def compared(self, *, thorough: bool) -> RowComparison:
        def clock() -> float:
            return self.now

        made = signature(spec("x", "FP32", "batch", 8), outputs=(spec("y", "FP32", "batch", 8),))
        settings = ComparisonSettings(thorough=thorough, clock=clock, budget=LoadBudget(1.0, clock))
        return compare_rows(made, self._run, settings)


def test_a_slow_model_that_is_proved_runs_two_rows_together() -> None:
    slow = SlowModel(lambda x: x)
    found = slow.compared(thorough=False)
    assert found.outcome is ComparisonOutcome.SEPARATE
    assert slow.sizes == [1, 1, 1, 2]
    assert found.seconds == {1: 0.5, 2: 1.0}
    assert found.extent == "1 batches of 2 rows"


def test_a_slow_model_that_must_be_tested_is_not_finished() -> None:
    slow = SlowModel(lambda x: x)
    assert slow.compared(thorough=True).outcome is ComparisonOutcome.UNFINISHED
    assert sum(slow.sizes) <= 10


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize(
    ("model", "outcome"),
    [
        (lambda x: x - x.mean(), ComparisonOutcome.MIXES),
        (lambda x: x + np.float32(random.random()), ComparisonOutcome.UNSTABLE),
        (lambda x: x[: 1 if len(x) == 1 else 0], ComparisonOutcome.MIXES),
    ],
)
def test_mixing_of_two_rows_is_found_in_slow_models(
    model: Callable[[Array], Array], outcome: ComparisonOutcome, thorough: bool
) -> None:
    assert SlowModel(model).compared(thorough=thorough).outcome is outcome


def test_a_difference_is_explained_although_the_time_is_up() -> None:
    """Else a proved model would pass with it."""

    def shifted(x: Array) -> Array:
        if len(x) > 1 and np.isnan(x).any():
            slow.now = 1e9
            return np.asarray(x + np.float32(1e-9))
        return x

    slow = SlowModel(shifted, row_seconds=0.0)
    assert "beside" in slow.compared(thorough=False).reason
