"""batch_inference: a model function over many inputs, batch by batch, on the caller's thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorferry.batcher import batch_inference
from tensorferry.batcher.testing import ScriptedRunner


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9])
def test_results_come_in_the_order_of_the_inputs(count: int) -> None:
    runner = ScriptedRunner()
    assert batch_inference(runner, np.arange(float(count)), 4) == [2.0 * i for i in range(count)]
    assert len(runner.batches) == -(-count // 4)


def test_the_function_may_use_its_result_again() -> None:
    memory = np.empty(2)
    results = batch_inference(lambda x: np.multiply(x, 2.0, out=memory), np.arange(4.0), 2)
    assert results == [0.0, 2.0, 4.0, 6.0]


def test_takes_any_iterable_and_no_more_of_it_than_a_batch_at_a_time() -> None:
    drawn = 0
    seen: list[int] = []

    def examples() -> Any:
        nonlocal drawn
        for value in range(5):
            drawn += 1
            yield np.float64(value)

    def model_fn(x: Any) -> Any:
        seen.append(drawn)
        return -x

    assert batch_inference(model_fn, examples(), 2) == [0, -1, -2, -3, -4]
    assert seen == [2, 4, 5]


def test_dicts_in_and_dicts_out() -> None:
    examples = [{"a": float(i), "b": np.full(2, i)} for i in range(5)]
    results = batch_inference(lambda x: {"sum": x["a"] + x["b"].sum(axis=1)}, examples, 2)
    assert results == [{"sum": 3.0 * i} for i in range(5)]


def test_consecutive_examples_of_one_shape_share_a_batch() -> None:
    runner = ScriptedRunner(lambda x: x.sum(axis=1))
    lengths = [2, 2, 3, 3, 2]
    assert batch_inference(runner, [np.ones(length) for length in lengths]) == lengths
    assert [batch.shape for batch in runner.batches] == [(2, 2), (2, 3), (1, 2)]


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_size_below_one_is_named(batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size is {batch_size}; it must be at least 1"):
        batch_inference(lambda x: x, [1.0], batch_size)
