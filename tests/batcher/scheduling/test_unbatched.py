"""max_batch_size 0: nothing is batched, and a request's arrays need not have rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from support.batcher.rig import result, rows


@pytest.mark.parametrize("delay", [0.0, 60.0])
def test_each_request_runs_alone_and_at_once(busy: Busy, delay: float) -> None:
    batcher, runner = busy(None, 0, delay)
    futures = [batcher.submit(np.array([value, value])) for value in range(3)]
    futures.append(batcher.submit_rows(np.arange(5)))
    runner.open()
    assert [result(future).tolist() for future in futures] == [[0, 0], [2, 2], [4, 4], [0, 2, 4, 6, 8]]
    assert rows(runner, 1) == [[0, 0], [1, 1], [2, 2], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("method", ["submit", "submit_rows"])
def test_scalars_and_inputs_of_different_lengths_pass(make: Make, method: str) -> None:
    batcher = make(lambda x: {"shapes": [array.shape for array in x.values()]}, 0)
    sent = {"a": 1.5, "b": np.zeros(3), "c": np.zeros((2, 2)), "d": "text"}
    assert result(getattr(batcher, method)(sent)) == {"shapes": [(), (3,), (2, 2), ()]}


@pytest.mark.parametrize("output", [7, None, "text", np.float32(3), np.zeros(()), [1, 2]])
def test_whatever_the_model_returns_is_the_result(make: Make, output: Any) -> None:
    answer = result(make(lambda x: output, 0).submit(1.0))
    assert type(answer) is type(output)
    assert answer == output
