"""One of N requests ends early, in every way and at every position: its neighbours are unaffected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from support.batcher.rig import enqueue, fails_below_zero, result, results

from tensorferry.batcher import DeadlineExceeded
from tensorferry.batcher.testing import VirtualClock

N = 4
WAYS = {
    "cancelled while queued": "Cancelled",
    "cancelled while running": "Cancelled",
    "expired while queued": "DeadlineExceeded",
    "expired while running": "DeadlineExceeded",
    "the model raises for it": "ValueError",
}


@pytest.mark.parametrize("position", range(N))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 3], ids=["one row", "three rows"])
def test_the_others_are_answered_and_the_one_ends_once(
    busy: Busy, clock: VirtualClock, way: str, position: int, size: int
) -> None:
    batcher, runner = busy(fails_below_zero, N * size, clock=clock)
    values = [float(10 + tag) for tag in range(N)]
    if way == "the model raises for it":
        values[position] *= -1
    members = []
    for tag, value in enumerate(values):
        deadline = {"deadline": 5.0} if "expired" in way and tag == position else {}
        members.append(enqueue(batcher, np.full(size, value), **deadline))

    if "running" in way:
        runner.release()
        runner.await_batches(2)
    if "cancelled" in way:
        assert batcher.cancel(members[position][0])
        assert not batcher.cancel(members[position][0])
    if "expired" in way:
        clock.advance(5)
    runner.open()
    assert batcher.close()

    for tag, (_, recorder) in enumerate(members):
        if tag == position:
            assert recorder.kind == WAYS[way]
            assert recorder.only.outputs is None
        else:
            assert recorder.only.outputs.tolist() == [2 * values[tag]] * size
    statistics = batcher.statistics()
    counted = {"Cancelled": "cancelled", "DeadlineExceeded": "expired", "ValueError": "failed"}[WAYS[way]]
    assert statistics.answered == N
    assert getattr(statistics, counted) == 1
    if "queued" in way:
        assert [len(batch) for batch in runner.batches] == [1, (N - 1) * size], "it never ran"
    if "running" in way:
        assert [len(batch) for batch in runner.batches] == [1, N * size], "nothing ran twice"


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_passed_deadline_is_refused_on_arrival(make: Make, timeout: float) -> None:
    batcher = make(lambda x: x)
    with pytest.raises(DeadlineExceeded):
        batcher.submit(1.0, timeout=timeout)
    assert (batcher.statistics().accepted, batcher.statistics().refused) == (0, 1)


def test_a_raising_completion_affects_no_other_request(busy: Busy, caplog: pytest.LogCaptureFixture) -> None:
    """Its neighbours and the worker are unaffected, even by SystemExit, which would silently end a
    thread.
    """

    def rude(done: Any) -> None:
        raise SystemExit

    batcher, runner = busy()
    futures = [batcher.submit(float(tag)) for tag in range(3)]
    futures[0].add_done_callback(rude)
    runner.open()
    assert results(futures) == [0, 2, 4]
    assert result(batcher.submit(3.0)) == 6
    assert [record.message for record in caplog.records] == ["the completion of a request of batcher raised"]
