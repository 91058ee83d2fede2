"""After a batch nothing of it is kept alive by futures, requests, workers or errors.

The collector is off: what is freed here is freed at once, not when a cycle happens to be found.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.rig import enqueue, error, fails_below_zero, occupy, result

from tensorferry.batcher import Padding, PadInput, QueueFull
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watch:
    """A model function that doubles, and keeps weak references to its arrays."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Any]] = []

    def __call__(self, x: Any) -> Any:
        y = fails_below_zero(x)
        self.seen += [weakref.ref(x), weakref.ref(y)]
        return y

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.seen)


@pytest.mark.parametrize("count", [3, 9], ids=["whole", "split"])
def test_an_answered_request_keeps_only_its_answer(make: Make, clock: VirtualClock, count: int) -> None:
    """Its future and request are kept, and the worker is idle."""
    model_fn = Watch()
    batcher = make(model_fn, 4, clock=clock)
    sent = np.arange(float(count))
    ref = weakref.ref(sent)
    future = batcher.submit_rows(sent)
    answer = result(future)
    clock.await_sleepers()
    del sent
    assert ref() is None, "the input"
    assert model_fn.alive == 0, "the batch's arrays"
    assert len(answer) == count


@pytest.mark.parametrize("count", [3, 9], ids=["whole", "split"])
def test_a_kept_request_does_not_keep_its_tensors(make: Make, clock: VirtualClock, count: int) -> None:
    batcher = make(lambda x: x, 4, clock=clock)
    sent = np.arange(float(count))
    ref = weakref.ref(sent)
    request, recorder = enqueue(batcher, sent)
    recorder.await_outcome()
    clock.await_sleepers()
    recorder.outcomes.clear()
    del sent
    assert ref() is None
    assert request.rows == count


@pytest.mark.parametrize("count", [3, 9], ids=["whole", "split"])
@pytest.mark.parametrize("running", [False, True])
def test_a_cancelled_request_keeps_nothing(
    make: Make, runner: ScriptedRunner, clock: VirtualClock, count: int, running: bool
) -> None:
    batcher = make(runner, 4, clock=clock)
    if not running:
        occupy(batcher, runner)
    sent = np.arange(float(count))
    ref = weakref.ref(sent)
    request, recorder = enqueue(batcher, sent)
    if running:
        runner.await_batches(1)
    assert batcher.cancel(request)
    del sent
    if running:
        assert ref() is not None, "the model is still reading it"
        runner.release()
        clock.await_sleepers()
    assert ref() is None
    assert recorder.kind == "Cancelled"


@pytest.mark.parametrize("count", [3, 9], ids=["whole", "split"])
def test_an_expired_request_keeps_nothing(
    make: Make, runner: ScriptedRunner, clock: VirtualClock, count: int
) -> None:
    batcher = make(runner, 4, clock=clock)
    occupy(batcher, runner)
    sent = np.arange(float(count))
    ref = weakref.ref(sent)
    future = batcher.submit_rows(sent, timeout=5)
    clock.advance(5)
    runner.release()
    assert error(future) is not None
    clock.await_sleepers()
    del sent
    assert ref() is None


def test_a_refused_request_is_kept_by_its_caller_only(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner, 4, max_queue_size=9)
    occupy(batcher, runner)
    batcher.submit(1.0)
    sent = np.arange(9.0)
    ref = weakref.ref(sent)
    with pytest.raises(QueueFull) as caught:
        batcher.submit_rows(sent)
    del sent, caught
    assert ref() is None


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_kept_error_does_not_keep_the_neighbours_rows(
    make: Make, runner: ScriptedRunner, clock: VirtualClock, position: int
) -> None:
    """Its traceback refers only to the run in which the request was alone."""
    refs: list[tuple[int, weakref.ref[Any]]] = []

    def model_fn(x: Any) -> Any:
        refs.append((len(x), weakref.ref(x)))
        return fails_below_zero(x)

    runner = ScriptedRunner(model_fn, gated=True)
    batcher = make(runner, clock=clock)
    occupy(batcher, runner)
    futures = [batcher.submit(-1.0 if tag == position else 1.0) for tag in range(3)]
    runner.open()
    kept = error(futures[position])
    for future in futures:
        error(future)
    clock.await_sleepers()
    assert kept is not None
    assert [size for size, ref in refs if ref() is not None] == [1]


def test_a_dropped_error_keeps_nothing(make: Make, clock: VirtualClock) -> None:
    refs: list[weakref.ref[Any]] = []

    def model_fn(x: Any) -> Any:
        refs.append(weakref.ref(x))
        raise ValueError

    batcher = make(model_fn, clock=clock)
    assert isinstance(error(batcher.submit(1.0)), ValueError)
    clock.await_sleepers()
    assert [ref() for ref in refs] == [None]


def test_a_kept_row_does_not_keep_the_batch(make: Make, runner: ScriptedRunner, clock: VirtualClock) -> None:
    model_fn = Watch()
    runner = ScriptedRunner(model_fn, gated=True)
    batcher = make(runner, clock=clock)
    occupy(batcher, runner)
    futures = [batcher.submit(np.full(3, float(tag))) for tag in range(4)]
    runner.open()
    kept = [result(future) for future in futures]
    clock.await_sleepers()
    assert model_fn.alive == 0
    assert [row.tolist() for row in kept] == [[2.0 * tag] * 3 for tag in range(4)]


def test_a_kept_padded_row_does_not_keep_the_batch(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    model_fn = Watch()
    runner = ScriptedRunner(model_fn, gated=True)
    batcher = make(runner, 4, clock=clock, padding=Padding((8,), PadInput(1, 0.0), outputs=1))
    occupied = batcher.submit(np.ones(8))
    runner.await_batches(1)
    sent = [np.full((rows, 3), 1.0) for rows in (1, 2, 6)]
    refs = [weakref.ref(array) for array in sent]
    futures = [batcher.submit_rows(array) for array in sent]
    del sent
    runner.open()
    kept = [result(future) for future in (occupied, *futures)]
    clock.await_sleepers()
    assert model_fn.alive == 0
    assert not any(ref() is not None for ref in refs)
    assert [row.shape for row in kept] == [(8,), (1, 3), (2, 3), (6, 3)]
