"""A failed batch runs again in halves until the requests at fault are alone."""

from __future__ import annotations

from typing import Any

import pytest
from batcher.conftest import Busy, Make
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import enqueue, error, fails_below_zero, occupy, reproducible, result, rows

from tensorferry.batcher import Batcher, BatchFailed, QueueFull
from tensorferry.batcher.testing import ScriptedRunner


def test_a_failed_batch_runs_in_halves_of_halves(busy: Busy) -> None:
    batcher, runner = busy(fails_below_zero)
    futures = [batcher.submit(value) for value in (1.0, 2.0, -3.0, 4.0)]
    runner.open()
    assert isinstance(error(futures[2]), ValueError)
    assert [result(future) for future in futures if future is not futures[2]] == [2, 4, 8]
    assert rows(runner, 1) == [[1, 2, -3, 4], [1, 2], [-3, 4], [-3], [4]]
    assert (batcher.statistics().batches, batcher.statistics().failed_batches) == (3, 3)


@pytest.mark.parametrize("count", [1, 4])
def test_an_error_of_the_whole_batch_is_that_of_each_request(busy: Busy, count: int) -> None:
    failure = QueueFull("another model is busy", 0.5)

    def fail(x: Any) -> Any:
        if (x > 0).any():
            raise BatchFailed(failure)
        return x

    batcher, runner = busy(fail)
    futures = [batcher.submit(1.0) for _ in range(count)]
    runner.open()
    assert [error(future) for future in futures] == [failure] * count
    assert rows(runner, 1) == [[1] * count]
    assert batcher.statistics().failed == count


@reproducible
@given(bad=st.lists(st.booleans(), min_size=1, max_size=16))
def test_every_good_row_is_answered_in_at_most_2n_minus_1_runs(bad: list[bool]) -> None:
    runner = ScriptedRunner(fails_below_zero, gated=True)
    with Batcher(runner) as batcher:
        occupy(batcher, runner)
        values = [-1.0 - tag if poisoned else 1.0 + tag for tag, poisoned in enumerate(bad)]
        recorders = [enqueue(batcher, [value])[1] for value in values]
        runner.open()
    for value, recorder in zip(values, recorders, strict=True):
        if value < 0:
            assert recorder.kind == "ValueError"
            assert str(recorder.only.error) == f"negative: [{value}]", "each request gets its own error"
        else:
            assert recorder.only.outputs.tolist() == [2 * value]
    runs = len(runner.batches) - 1
    assert runs <= 2 * len(bad) - 1
    assert runs == 1 or any(bad)


@pytest.mark.parametrize("exception", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_no_exception_ends_the_worker(make: Make, exception: BaseException) -> None:
    def model_fn(x: Any) -> Any:
        if (x < 0).any():
            raise exception
        return x

    batcher = make(model_fn)
    assert error(batcher.submit(-1.0)) is exception
    assert result(batcher.submit(1.0)) == 1


def test_an_error_does_not_refer_to_the_batch(busy: Busy) -> None:
    """Its context would show the inputs of other requests, and keep them alive."""
    batcher, runner = busy(fails_below_zero)
    futures = [batcher.submit(value) for value in (1.0, -2.0, 3.0)]
    runner.open()
    caught = error(futures[1])
    assert caught is not None
    assert caught.__context__ is None
    assert caught.__cause__ is None


def test_a_cancel_while_halves_run_affects_no_other_request(busy: Busy) -> None:
    """The rest of the cancelled request's half must be answered."""
    batcher, runner = busy(fails_below_zero)
    requests = [enqueue(batcher, [value]) for value in (-1.0, 2.0, 3.0, 4.0)]
    runner.release(2)
    runner.await_batches(3)
    assert rows(runner, 2) == [[-1, 2]]
    assert batcher.cancel(requests[2][0])
    runner.open()
    assert batcher.close()
    kinds = [recorder.kind for _, recorder in requests]
    assert kinds == ["ValueError", "answered", "Cancelled", "answered"]
    assert batcher.statistics().failed_batches == 3
