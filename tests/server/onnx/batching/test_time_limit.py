"""The batching check stops runs that never end on unusual values."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support.models.small import written
from support.server.rig import Array

from tensorferry.server.errors import ModelFailedError
from tensorferry.server.onnx.batching.comparison_runs import ComparisonSettings, with_time_limit
from tensorferry.server.onnx.batching.row_comparison import ComparisonOutcome, compare_rows
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
