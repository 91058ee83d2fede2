"""Split requests: run in several batches, but answered, failed or cancelled as one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from support.batcher.rig import (
    Recorder,
    enqueue,
    error,
    fails_below_zero,
    ignore,
    new_request,
    result,
    rows,
)

from tensorferry.batcher import DeadlineExceeded, OutOfMemory, QueueFull, Request
from tensorferry.batcher.execution.splitting import split_request
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("model_fn", "sent"),
    [
        pytest.param(lambda x: {"a": x["i"], "b": x["i"].tolist()}, {"i": np.arange(9)}, id="dict"),
        pytest.param(
            lambda x: {"a": x["i"].astype(object)}, {"i": np.array(list("abcdefghi"))}, id="strings"
        ),
    ],
)
def test_dicts_and_lists_are_joined(make: Make, workers: int, model_fn: Any, sent: Any) -> None:
    answer = result(make(model_fn, 2, workers=workers).submit_rows(sent))
    for output in answer.values():
        assert list(output) == sent["i"].tolist()


@pytest.mark.parametrize("fits", [4, 2], ids=["split", "parts that fit into memory"])
def test_a_function_may_use_its_result_again_for_the_next_part(make: Make, fits: int) -> None:
    memory = np.empty(4)

    def doubled(x: Any) -> Any:
        if len(x) > fits:
            raise OutOfMemory("too many rows")
        return np.multiply(x, 2.0, out=memory[: len(x)])

    assert result(make(doubled, 4).submit_rows(np.arange(8.0))).tolist() == [2.0 * i for i in range(8)]


def test_a_failing_part_fails_the_request_once_and_cancels_the_rest(busy: Busy) -> None:
    batcher, runner = busy(fails_below_zero, 2)
    request, recorder = enqueue(batcher, np.array([1.0, 2, -3, 4, 5, 6, 7]))
    neighbour = batcher.submit_rows(np.array([8.0]))
    runner.open()
    assert result(neighbour).tolist() == [16]
    assert batcher.close()
    assert recorder.kind == "ValueError"
    assert rows(runner, 1) == [[1, 2], [-3, 4], [8]], "the rest never ran"
    assert not batcher.cancel(request)
    statistics = batcher.statistics()
    ends = (statistics.answered, statistics.failed, statistics.cancelled)
    assert (statistics.accepted, *ends) == (3, 2, 1, 0), "a split request counts once"


def test_a_split_request_expires_between_its_parts(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(runner, 2, clock=clock)
    future = batcher.submit_rows(np.zeros(5), timeout=5)
    runner.await_batches(1)
    runner.release()
    runner.await_batches(2)
    clock.advance(5)
    runner.open()
    assert isinstance(error(future), DeadlineExceeded)
    assert batcher.close()
    assert len(runner.batches) == 2


def test_a_refused_request_can_be_enqueued_again(busy: Busy) -> None:
    """A refusal changes neither the queue nor the request."""
    batcher, runner = busy(None, 2, max_queue_size=5)
    blocker = batcher.submit(1.0)
    recorder = Recorder()
    request = new_request(np.arange(5.0), recorder)
    for _ in range(2):
        with pytest.raises(QueueFull):
            batcher.enqueue(request)
        assert (request.complete, request.split_parts, request.rows) == (recorder, (), 5)
        assert batcher.statistics().sizes.queued_rows == 1
    assert blocker.cancel()
    batcher.enqueue(request)
    runner.open()
    assert batcher.close()
    assert recorder.only.outputs.tolist() == [0, 2, 4, 6, 8]
    assert batcher.statistics().refused == 2


def test_parts_are_full_batches_of_each_key() -> None:
    def group(rows: int, key: str) -> Request:
        request = new_request(np.zeros(rows), ignore)
        request.key = key
        return request

    whole = group(16, "")
    whole.groups = [group(3, "a"), group(4, "a"), group(2, "a"), group(5, "b"), group(2, "b")]
    parts = split_request(whole, lambda key: 4 if key == "a" else 2)
    assert [(part.key, part.rows) for part in parts] == [
        *[("a", 3), ("a", 1), ("a", 3), ("a", 1), ("a", 1)],
        *[("b", 2), ("b", 2), ("b", 1), ("b", 1), ("b", 1)],
    ]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        pytest.param([{"a": [1, 1]}, {"b": [1]}], "'a'", id="other names"),
        pytest.param([np.zeros((2, 3)), np.zeros((1, 4))], "return a list of rows", id="other shapes"),
        pytest.param([{"a": [1, 1]}, np.zeros(1)], "", id="other types"),
    ],
)
def test_parts_whose_outputs_do_not_fit_together_fail_the_request(
    make: Make, outputs: Any, message: str
) -> None:
    iterator = iter(outputs)
    assert message in str(error(make(lambda x: next(iterator), 2).submit_rows(np.zeros(3))))


def test_a_list_and_an_array_of_parts_become_a_list(make: Make) -> None:
    outputs = iter([[1, 2], np.array([3])])
    assert result(make(lambda x: next(outputs), 2).submit_rows(np.zeros(3))) == [1, 2, 3]
