"""Statistics count requests and batches, with times on the batcher's clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.rig import enqueue, result

from tensorferry.batcher import CloseReason
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


def test_batches_rows_and_reasons_are_counted(make: Make, clock: VirtualClock) -> None:
    runner = ScriptedRunner()
    batcher = make(runner, 4, 10.0, clock=clock)
    full = batcher.submit_rows(np.zeros(4))
    assert len(result(full)) == 4
    late = batcher.submit_rows(np.zeros(3))
    clock.await_sleepers(until=10.0)
    clock.advance(10)
    assert len(result(late)) == 3
    last = batcher.submit(0.0)
    assert batcher.drain()
    assert result(last) == 0
    statistics = batcher.statistics()
    assert (statistics.accepted, statistics.answered, statistics.batches, statistics.rows) == (3, 3, 3, 8)
    assert statistics.batch_rows == {4: 1, 3: 1, 1: 1}
    assert statistics.close_reasons == {CloseReason.FULL: 1, CloseReason.WINDOW: 1, CloseReason.DRAIN: 1}
    assert statistics.queue_delay_sum == 10.0


def test_the_prediction_error_is_the_sum_of_absolute_differences(make: Make, clock: VirtualClock) -> None:
    took = iter((2.0, 3.0, 1.0))

    def model_fn(x: Any) -> Any:
        clock.advance(next(took))
        return x

    batcher = make(model_fn, 4, clock=clock)
    recorders = []
    for _ in range(3):
        recorders.append(enqueue(batcher, [1.0])[1])
        recorders[-1].await_outcome()
    assert batcher.drain()
    first, *later = [recorder.only.batch for recorder in recorders]
    assert first is not None
    assert not first.predicted, "nothing is known before it"
    errors = [info.compute_time - info.predicted for info in later if info is not None]
    assert errors[0] > 0 > errors[1]
    statistics = batcher.statistics()
    assert statistics.predictions == 2
    assert statistics.prediction_error_sum == pytest.approx(errors[0] - errors[1])
    assert statistics.actual_time_sum - statistics.predicted_time_sum == pytest.approx(sum(errors))
