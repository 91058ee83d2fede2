"""A run hangs: which requests fail, with which error, and which go on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from polling import until
from support.batcher.rig import enqueue, reach

from tensorferry.batcher import InstanceFailed, OutOfMemory, RunTimedOut
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.testing import ScriptedRunner


def test_requests_that_another_device_runs_by_now_do_not_fail(make: Make) -> None:
    def fails_in_parts(x: Any) -> Any:
        if len(x) == 4:
            raise ValueError
        if 1.0 in x:
            raise InstanceFailed("busy")
        return x

    hanging, working = ScriptedRunner(fails_in_parts, gated=True), ScriptedRunner(gated=True)
    batcher = make([hanging, working], 4)
    occupied = [enqueue(batcher, [0.0])[1]]
    until(lambda: hanging.batches or working.batches)
    occupied.append(enqueue(batcher, [0.0])[1])
    hanging.await_batches(1)
    working.await_batches(1)
    recorders = [enqueue(batcher, [float(tag)])[1] for tag in range(1, 5)]
    # The batch fails, its first half goes back into the queue, and its second half hangs.
    hanging.release(3)
    hanging.await_batches(4)
    working.release()
    working.await_batches(2)
    batcher.abort_hung_run(0, RunTimedOut("hung"))
    early = [len(recorder.outcomes) for recorder in recorders]
    working.open()
    for recorder in (*occupied, *recorders):
        recorder.await_outcome()
    hanging.open()
    assert early == [0, 0, 1, 1]
    assert [recorder.kind for recorder in recorders] == ["answered"] * 2 + ["RunTimedOut"] * 2


@pytest.mark.parametrize(
    ("requests", "failure", "kinds"),
    [
        (1, OutOfMemory, ["RunTimedOut"]),
        (4, OutOfMemory, ["RunTimedOut"] * 2 + ["InstanceFailed"] * 2),
        (4, ValueError, ["RunTimedOut"] * 2 + ["InstanceFailed"] * 2),
    ],
    ids=["rows of one request", "some requests that fit", "half of the requests"],
)
def test_a_request_that_hangs_in_a_part_of_its_batch_is_not_invited_to_retry(
    make: Make, requests: int, failure: type[Exception], kinds: list[str]
) -> None:
    def fails_together(x: Any) -> Any:
        if len(x) == 4:
            raise failure
        return x

    runner = ScriptedRunner(fails_together, gated=True)
    batcher = make(runner, 4)
    enqueue(batcher, [0.0])
    runner.await_batches(1)
    recorders = [enqueue(batcher, np.zeros(4 // requests))[1] for _ in range(requests)]
    runner.release(2)
    runner.await_batches(3)
    batcher.abort_hung_run(0, RunTimedOut("hung"))
    assert [recorder.kind for recorder in recorders] == kinds
    runner.open()
    assert batcher.close()
    assert [len(batch) for batch in runner.batches[2:]] == [2], "what has failed does not run"


class HeldAppend(list[BatchAssignment]):
    """A list whose `append` waits for `go_on`."""

    def __init__(self, *assignments: BatchAssignment) -> None:
        super().__init__(assignments)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def append(self, work: BatchAssignment) -> None:
        self.reached.set()
        reach(self.go_on)
        super().append(work)


def test_a_batch_that_is_taken_as_a_run_is_aborted_does_not_wait_for_the_run(make: Make) -> None:
    runner = ScriptedRunner(gated=True)
    batcher = make(runner, 1, pipelined=True)
    enqueue(batcher, [0.0])
    runner.await_batches(1)
    (executor,) = batcher._workers._executors
    held = executor.in_flight = HeldAppend(*executor.in_flight)
    _, recorder = enqueue(batcher, [1.0])
    reach(held.reached)
    batcher.abort_hung_run(0, RunTimedOut("hung"))
    held.go_on.set()
    assert isinstance(recorder.await_outcome().error, InstanceFailed)
    runner.open()


def test_a_split_request_that_hangs_in_its_first_part_is_not_invited_to_retry(make: Make) -> None:
    runner = ScriptedRunner(gated=True)
    batcher = make(runner, 4, pipelined=True)
    _, recorder = enqueue(batcher, np.zeros(8))
    runner.await_batches(1)
    batcher.abort_hung_run(0, RunTimedOut("hung"))
    assert recorder.kind == "RunTimedOut"
    runner.open()
