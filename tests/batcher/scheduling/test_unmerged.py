"""Without merging, requests share no batch."""

from __future__ import annotations

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from support.batcher.rig import Recorder, new_request, result, results, rows

from tensorferry.batcher import CloseReason, Request, RequestTooLarge
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


def rows_of(count: int) -> Request:
    return new_request(np.zeros((count, 1)), Recorder())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("pipelined", [False, True])
def test_each_request_is_a_batch_of_all_its_rows(make: Make, workers: int, pipelined: bool) -> None:
    runner = ScriptedRunner()
    batcher = make(runner, 4, merge=False, workers=workers, pipelined=pipelined)
    sizes = [1, 4, 2, 1, 1, 3, 4, 1]
    futures = [batcher.submit_rows(np.full(size, tag)) for tag, size in enumerate(sizes)]
    assert [result(future).tolist() for future in futures] == [
        [2 * tag] * size for tag, size in enumerate(sizes)
    ]
    assert sorted(rows(runner)) == [[tag] * size for tag, size in enumerate(sizes)]
    statistics = batcher.statistics()
    assert statistics.batches == len(sizes)


def test_a_request_of_too_many_rows_is_refused_not_cut(make: Make) -> None:
    batcher = make(lambda x: x, 4, merge=False, name="m")
    with pytest.raises(RequestTooLarge, match="batch-size must be <= 4 for 'm': the request has 5 rows"):
        batcher.submit_rows(np.zeros(5))


def test_requests_run_in_order_of_ranks_and_deadlines(busy: Busy, clock: VirtualClock) -> None:
    batcher, runner = busy(None, 4, merge=False, priority_weights=(1, 1), strict_priorities=True, clock=clock)
    futures = [
        batcher.submit_rows(np.full(3, 4.0), priority=2),
        batcher.submit_rows(np.full(2, 3.0), priority=2, timeout=50.0),
        batcher.submit_rows(np.full(4, 2.0), priority=1),
        batcher.submit_rows(np.full(1, 1.0), priority=1, timeout=60.0),
    ]
    runner.open()
    results(futures)
    assert rows(runner, 1) == [[1.0], [2.0] * 4, [3.0] * 2, [4.0] * 3]


def test_the_time_until_the_queue_is_empty_is_that_of_its_requests() -> None:
    queue = RequestQueue(BatcherSettings(8, merge=False), VirtualClock())
    queue.learning.add_warmup_sample(1, 1.0)
    queue.learning.add_warmup_sample(8, 1.0)
    queue.put([rows_of(2)])
    queue.put([rows_of(4)])
    assert queue.admission.drain_time() == pytest.approx(2.0)
    work = queue.poll()
    assert isinstance(work, BatchAssignment)
    assert (len(work.batch), work.reason) == (1, CloseReason.FULL)
