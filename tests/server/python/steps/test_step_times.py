"""The times of the steps of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensorferry.batcher.execution.collate import request_of
from tensorferry.server.python.steps.stage_function import StageFunction, StageStep

REQUEST = request_of(np.ones(2), lambda outcome: None, one_row=False)


def times() -> Iterator[float]:
    yield from (1.0, 1.5, 3.0, 10.0, 11.0)


def test_the_ends_of_the_last_run_s_steps_and_their_sums() -> None:
    first = StageStep("first", lambda inputs: {"y": inputs["x"] + 1})

    def fails_for_negative(inputs: Any) -> Any:
        if inputs["y"].min() < 0:
            raise ValueError("negative")
        return {"z": inputs["y"] * 2}

    second = StageStep("second", fails_for_negative)
    stage = StageFunction("m", [first, second], ("z",), clock=times().__next__)
    assert stage.run_batch({"x": np.ones(2)}, [REQUEST])["z"].tolist() == [4, 4]
    ends = stage.step_ends()
    assert ends == [("first", 1.5), ("second", 3.0)]
    assert (first.times.batches, first.times.seconds) == (1, 0.5)
    assert (second.times.batches, second.times.seconds) == (1, 1.5)
    # A run that raises is not counted in the step that raised. Earlier records do not change.
    with pytest.raises(ValueError, match="negative"):
        stage.run_batch({"x": -2 * np.ones(2)}, [REQUEST])
    assert (first.times.batches, second.times.batches) == (2, 1)
    assert ends == [("first", 1.5), ("second", 3.0)]
