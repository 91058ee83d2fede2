"""After a batch nothing of it is kept alive by futures, requests, workers or errors.

The collector is off: what is freed here is freed at once, not when a cycle happens to be found.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from support.batcher.rig import Watch, enqueue, error, fails_below_zero, occupy, result

from tensorferry.batcher import Padding, PadInput, QueueFull
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

pytestmark = pytest.mark.usefixtures("collector_off")


@pytest.mark.parametrize("count", [3, 9], ids=["whole", "split"])
@pytest.mark.parametrize("how", ["answered", "cancelled", "cancelled while running", "expired"])
def test_a_request_that_has_ended_keeps_nothing(
    make: Make, clock: VirtualClock, count: int, how: str
) -> None:
    """Its request is kept, the worker is idle, and the batch is recorded."""
    model_fn = Watch(fails_below_zero)
    runner = ScriptedRunner(model_fn, gated=True)
    batcher = make(runner, 4, clock=clock)
    batcher.last_batches()
    if how in ("cancelled", "expired"):
        occupy(batcher, runner)
    sent = np.arange(float(count))
    ref = weakref.ref(sent)
    request, recorder = enqueue(batcher, sent, deadline=5.0 if how == "expired" else np.inf)
    if how == "cancelled while running":
        runner.await_batches(1)
    if "cancelled" in how:
        assert batcher.cancel(request)
    del sent
    if how == "expired":
        clock.advance(5.0)
    if how == "cancelled while running":
        assert ref() is not None, "the model is still reading it"
    if how == "cancelled":
        assert ref() is None
    runner.open()
    recorder.await_outcome()
    assert batcher.wait_idle()
    clock.await_sleepers()
    assert how != "answered" or len(recorder.only.outputs) == count
    recorder.outcomes.clear()
    assert ref() is None, "the input"
    assert model_fn.alive == 0, "the batch's arrays"
    assert request.rows == count


def test_a_refused_request_is_kept_by_its_caller_only(busy: Busy) -> None:
    batcher, _ = busy(None, 4, max_queue_size=9)
    batcher.submit(1.0)
    sent = np.arange(9.0)
    ref = weakref.ref(sent)
    with pytest.raises(QueueFull) as caught:
        batcher.submit_rows(sent)
    del sent, caught
    assert ref() is None


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_kept_error_does_not_keep_the_neighbours_rows(
    busy: Busy, clock: VirtualClock, position: int
) -> None:
    """Its traceback refers only to the run in which the request was alone."""
    refs: list[tuple[int, weakref.ref[Any]]] = []

    def model_fn(x: Any) -> Any:
        refs.append((len(x), weakref.ref(x)))
        return fails_below_zero(x)

    batcher, runner = busy(model_fn, clock=clock)
    futures = [batcher.submit(-1.0 if tag == position else 1.0) for tag in range(3)]
    runner.open()
    kept = error(futures[position])
    for future in futures:
        error(future)
    clock.await_sleepers()
    assert kept is not None
    assert [size for size, ref in refs if ref() is not None] == [1]


def test_a_kept_padded_row_does_not_keep_the_batch(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    model_fn = Watch(fails_below_zero)
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
