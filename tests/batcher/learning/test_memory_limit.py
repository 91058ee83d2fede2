"""Batches that do not fit into device memory run again in smaller parts; later batches are smaller for a while."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import enqueue, error, occupy, reproducible, result, results, rows

from tensorferry.batcher import Batcher, ModelOutputError, OutOfMemory
from tensorferry.batcher.learning.memory_limit import MemoryRowLimit
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


class Memory:
    """A model that doubles, on a device with room for `room` rows."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, x: Any) -> Any:
        if len(x) > self.room:
            raise OutOfMemory(f"{len(x)} rows")
        return x * 2


def test_later_batches_are_no_larger_than_those_that_fit(busy: Busy, clock: VirtualClock) -> None:
    batcher, runner = busy(Memory(3), 8, clock=clock)
    first = [batcher.submit(1.0) for _ in range(8)]
    occupied = len(runner.batches)
    runner.open()
    assert results(first) == [2.0] * 8
    assert [len(batch) for batch in runner.batches[occupied:]] == [8, 4, 2, 2, 2, 2]
    later = [enqueue(batcher, [float(tag)])[1] for tag in range(7)]
    assert [one.await_outcome().outputs.tolist() for one in later] == [[2.0 * tag] for tag in range(7)]
    assert all(len(batch) <= 2 for batch in runner.batches[occupied + 6 :])


def test_a_larger_batch_is_tried_after_a_while_and_the_limit_is_removed(
    make: Make, clock: VirtualClock
) -> None:
    memory = Memory(2)
    runner = ScriptedRunner(memory, gated=True)
    batcher = make(runner, 8, clock=clock)
    sizes = []
    for _ in range(6):
        occupied = occupy(batcher, runner)
        before = len(runner.batches)
        futures = [batcher.submit(1.0) for _ in range(8)]
        runner.release(100)
        assert results(futures) == [2.0] * 8
        result(occupied)
        # The gate is closed again.
        runner.release(-(100 - (len(runner.batches) - before) - 1))
        sizes.append([len(batch) for batch in runner.batches[before:]])
        # Memory is free again.
        memory.room = 8
        clock.advance(11)
    assert sizes[0] == [8, 4, 2, 2, 2, 2]
    assert [max(batch) for batch in sizes[1:]] == [3, 4, 6, 7, 8]
    assert sizes[-1] == [8]


def test_after_a_failed_try_the_next_one_is_later() -> None:
    limit = MemoryRowLimit(32)
    limit.record_oom(32, 0.0)
    assert (limit.rows, limit.allowed(9.9)) == (16, 16)
    now, tries = 10.0, []
    for _ in range(4):
        assert limit.allowed(now) > limit.rows
        limit.dispatched(24, now)
        assert limit.allowed(now) == 16, "one at a time"
        limit.record_oom(24, now)
        now = next(t for t in np.arange(now, now + 1000, 1.0) if limit.allowed(t) > limit.rows)
        tries.append(now)
    assert np.diff([10.0, *tries]).tolist() == [20, 40, 80, 160]
    limit.dispatched(20, now)
    limit.record_success(20)
    assert limit.rows == 20
    assert not limit.removed


@reproducible
@given(
    room=st.integers(1, 16),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=12),
    pipelined=st.booleans(),
)
def test_every_request_gets_its_rows_whatever_fits(room: int, sizes: list[int], pipelined: bool) -> None:
    """A request of more rows than fit runs in parts, and is answered as one."""
    runner = ScriptedRunner(Memory(room), gated=True)
    with Batcher(runner, 16, pipelined=pipelined) as batcher:
        occupy(batcher, runner)
        sent = [np.arange(size) + 100.0 * number for number, size in enumerate(sizes)]
        recorders = [enqueue(batcher, x)[1] for x in sent]
        runner.open()
    for x, recorder in zip(sent, recorders, strict=True):
        assert recorder.only.error is None
        assert recorder.only.outputs.tolist() == (2 * x).tolist()
    statistics = batcher.statistics()
    assert statistics.answered == statistics.accepted
    assert statistics.rows == sum(sizes) + 1


def test_a_request_whose_parts_do_not_fit_together_fails(busy: Busy) -> None:
    sizes = count(1)

    def model_fn(x: Any) -> Any:
        if len(x) > 2:
            raise OutOfMemory(f"{len(x)} rows")
        return np.zeros((len(x), next(sizes)))

    batcher, runner = busy(model_fn, 4)
    sent = [batcher.submit_rows(np.zeros(rows)) for rows in (4, 1)]
    runner.open()
    assert isinstance(error(sent[0]), ModelOutputError)
    assert len(result(sent[1])) == 1


@pytest.mark.parametrize("error_kind", [OutOfMemory, MemoryError])
def test_a_single_row_that_does_not_fit_fails_alone(busy: Busy, error_kind: type[Exception]) -> None:
    def model_fn(x: Any) -> Any:
        if (x < 0).any():
            raise error_kind("too much")
        return x * 2

    batcher, runner = busy(model_fn, 4)
    futures = [batcher.submit_rows(np.array(x)) for x in ([1.0], [-2.0], [3.0], [4.0], [-5.0, -6.0])]
    runner.open()
    for at in (1, 4):
        caught = error(futures.pop(at - (at > 1)))
        assert isinstance(caught, OutOfMemory)
        assert str(caught) == (
            "a single row of the request does not fit into the device's memory; send smaller inputs"
        )
    assert [result(future).tolist() for future in futures] == [[2], [6], [8]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"max_batch_size": 8, "merge": False},
            "the request's 4 rows, which this model runs together, do not fit",
        ),
        ({"max_batch_size": 0}, "the request alone does not fit into the device's memory"),
    ],
)
def test_an_indivisible_request_fails_as_a_whole(make: Make, options: dict[str, Any], said: str) -> None:
    batcher = make(Memory(2), **options)
    caught = enqueue(batcher, np.zeros(4))[1].await_outcome().error
    assert isinstance(caught, OutOfMemory)
    assert said in str(caught)
    assert result(batcher.submit_rows(np.ones(2))).tolist() == [2, 2]


def test_a_failing_part_of_a_request_fails_only_that_request(busy: Busy) -> None:
    def model_fn(x: Any) -> Any:
        if (x < 0).any():
            raise ValueError("negative")
        return Memory(2)(x)

    batcher, runner = busy(model_fn, 8)
    bad = batcher.submit_rows(np.array([1.0, 2.0, 3.0, -4.0]))
    good = batcher.submit_rows(np.array([5.0, 6.0, 7.0]))
    runner.open()
    assert isinstance(error(bad), ValueError)
    assert result(good).tolist() == [10, 12, 14]


def test_a_request_cancelled_while_its_parts_run_is_not_finished(busy: Busy) -> None:
    batcher, runner = busy(Memory(1), 4)
    request, recorder = enqueue(batcher, [1.0, 2.0, 3.0, 4.0])
    # Runs of the first request, of all four, of two, and of one.
    runner.release(3)
    runner.await_batches(4)
    assert batcher.cancel(request)
    runner.open()
    assert batcher.close()
    assert recorder.kind == "Cancelled"
    assert rows(runner, 1) == [[1, 2, 3, 4], [1, 2], [1]]


def test_each_device_and_each_bucket_has_a_limit_of_its_own(make: Make) -> None:
    runner = ScriptedRunner(lambda x: Memory(2 if x.shape[1] == 2 else 8)(x), gated=True)
    batcher = make(runner, 8)
    occupied = enqueue(batcher, np.zeros((1, 1)))[1]
    runner.await_batches(1)
    wide = [enqueue(batcher, np.ones((1, 2)))[1] for _ in range(8)]
    narrow = [enqueue(batcher, np.ones((1, 1)))[1] for _ in range(8)]
    runner.open()
    for one in (occupied, *wide, *narrow):
        assert one.await_outcome().error is None
    sizes = [batch.shape for batch in runner.batches[1:]]
    assert (8, 1) in sizes
    assert sizes.count((2, 2)) == 4
