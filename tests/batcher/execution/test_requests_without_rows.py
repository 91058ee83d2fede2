"""Requests of no rows, which the caller answers itself: counted and completed without a run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.rig import Recorder

from tensorferry.batcher import BatcherClosed, DeadlineExceeded, Request, Tensor
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

_EMPTY = Tensor(np.dtype(np.float32), (0, 3), b"")


def _request(recorder: Recorder, rows: int = 0, deadline: float = math.inf) -> Request:
    return Request((_EMPTY,), recorder, names=None, rows=rows, nbytes=0, deadline=deadline)


def test_a_request_of_no_rows_is_answered_at_once_and_counted(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner)
    recorder = Recorder()
    request = _request(recorder)
    outputs = np.empty((0, 2))
    batcher.answer_without_run(request, outputs)
    assert recorder.only.outputs is outputs
    assert recorder.only.batch is None
    assert not batcher.cancel(request)
    statistics = batcher.statistics()
    assert (statistics.accepted, statistics.answered, statistics.batches, statistics.rows) == (1, 1, 0, 0)
    assert sum(statistics.latencies.counts) == sum(statistics.queue_delays.counts) == 1
    assert not runner.batches


def test_a_request_of_no_rows_is_refused_like_others(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(runner, clock=clock)
    recorder = Recorder()
    clock.advance(2.0)
    with pytest.raises(DeadlineExceeded, match="the deadline had passed"):
        batcher.answer_without_run(_request(recorder, deadline=1.0), None)
    assert batcher.drain()
    with pytest.raises(BatcherClosed):
        batcher.answer_without_run(_request(recorder), None)
    assert not recorder.outcomes
    assert batcher.statistics().refusals == {"deadline": 1, "closed": 1}
