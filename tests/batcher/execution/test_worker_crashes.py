"""Crashes of workers at every step: their requests run once more or fail, and the worker is restarted."""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.rig import PATIENCE, Recorder, enqueue, figures_add_up, occupy, reach, result

from tensorferry.batcher import BatcherError, DeadlineExceeded, InstanceFailed
from tensorferry.batcher.execution import worker as worker_module
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.execution.completion import RequestCompleter
from tensorferry.batcher.execution.executor import BatchExecutor
from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.queue.batch_selection import BatchSelector
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.queue.wakeup import WorkerWakeup
from tensorferry.batcher.statistics.counters import Counters
from tensorferry.batcher.statistics.recent_batches import RecentBatches
from tensorferry.batcher.supervision import supervise
from tensorferry.batcher.testing import ScriptedRunner

# The steps of a worker with a batch, in order, and the outcome of its requests after a crash there.
STEPS = [
    (RequestQueue, "take", "answered"),
    (RequestQueue, "_poll_locked", "answered"),
    (BatchSelector, "select", "answered"),
    (Devices, "dispatched", "answered"),
    (WorkerWakeup, "wake", "answered"),
    (BatchExecutor, "run", "answered"),
    (BatchExecutor, "_execute", "answered"),
    (RequestQueue, "finish", "answered"),
    (RequestCompleter, "answer", "answered"),
    (Counters, "ran", "failed"),
    (RecentBatches, "ran", "failed"),
    (Counters, "predicted", "answered"),
    (Devices, "completed", "answered"),
    (BatchCostModel, "should_learn", "answered"),
]


class HealthCalls:
    """Calls of a batcher's health callback. Thread-safe."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str | None, bool]] = []
        self._changed = threading.Condition()

    def __call__(self, instance: int, reason: str | None, hopeless: bool) -> None:
        with self._changed:
            self.calls.append((instance, reason, hopeless))
            self._changed.notify_all()

    def await_calls(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, PATIENCE), self.calls


def fails_once(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: BaseException, *, on: str = "-worker-"
) -> threading.Event:
    """Let the method raise once, before it does anything, when a thread of this name calls it."""
    works = getattr(owner, name)
    armed, crashed = threading.Event(), threading.Event()
    armed.set()

    def faulty(*arguments: Any, **options: Any) -> Any:
        if on in threading.current_thread().name and armed.is_set():
            armed.clear()
            crashed.set()
            raise fault
        return works(*arguments, **options)

    monkeypatch.setattr(owner, name, faulty)
    return crashed


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_FIRST_SECONDS", 0.01)


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("kind", [SystemExit, MemoryError, KeyError])
@pytest.mark.parametrize(("owner", "name", "fate"), STEPS, ids=[f"{o.__name__}.{n}" for o, n, _ in STEPS])
def test_after_a_crash_at_any_step_each_request_ends_once_and_the_worker_goes_on(
    make: Make,
    runner: ScriptedRunner,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    fate: str,
    kind: type[BaseException],
    pipelined: bool,
) -> None:
    health = HealthCalls()
    batcher = make(runner, 4, pipelined=pipelined, health=health)
    # With a known cost, because some steps are skipped without.
    batcher.add_warmup_sample(1, 0.001)
    batcher.add_warmup_sample(4, 0.001)
    first = occupy(batcher, runner)
    # So many that a batch is left for each step, although a second worker may have taken one by now.
    sent = [enqueue(batcher, [float(tag)])[1] for tag in range(1, 12)]
    crashed = fails_once(monkeypatch, owner, name, kind())
    runner.open()
    reach(crashed)
    outcomes = [recorder.await_outcome() for recorder in sent]
    # A bug that ends no thread fails only its own batch.
    failed = fate == "failed" or (
        kind is not SystemExit
        and (name in ("run", "_execute", "finish", "answer") or (pipelined and name == "completed"))
    )
    assert first.exception(PATIENCE) is None or failed
    for tag, outcome in enumerate(outcomes, 1):
        if outcome.error is None:
            assert outcome.outputs.tolist() == [2.0 * tag]
        else:
            assert isinstance(outcome.error, BatcherError)
            assert failed
    assert result(batcher.submit(np.float32(3))) == 6
    assert batcher.drain(PATIENCE), "no thread is busy"
    for recorder in sent:
        assert len(recorder.outcomes) == 1
    if kind is SystemExit:
        health.await_calls(2)
        (out, back) = health.calls
        assert out[0] == back[0] == 0
        assert out[1] == "a worker ended unexpectedly (SystemExit) and is restarted"
        assert back[1] is None
    figures_add_up(batcher.statistics())


def test_requests_that_were_taken_but_not_handed_out_are_completed(
    make: Make, runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expired requests are taken before the batch is formed; a crash in between must not lose them."""
    batcher = make(runner, 4)
    occupy(batcher, runner)
    late = request_of([1.0], (recorder := Recorder()), one_row=False, deadline=batcher._clock.now() + 3600)
    batcher.enqueue(late)
    _, other = enqueue(batcher, [2.0])
    expire = RequestQueue._expire_locked

    def expire_by_worker(queue: RequestQueue, start: float, now: float) -> None:
        if "-worker-" in threading.current_thread().name:
            expire(queue, start + 7200, now + 7200)

    monkeypatch.setattr(RequestQueue, "_expire_locked", expire_by_worker)
    crashed = fails_once(monkeypatch, RequestQueue, "_poll_locked", SystemExit())
    runner.open()
    reach(crashed)
    # By the worker that crashed, or by the expiry thread.
    assert isinstance(recorder.await_outcome().error, (InstanceFailed, DeadlineExceeded))
    assert other.await_outcome().outputs.tolist() == [4.0]
    assert batcher.drain(PATIENCE)
    assert len(recorder.outcomes) == 1


def test_a_request_that_crashes_each_worker_runs_twice(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = 0
    works = BatchExecutor._execute

    def execute(running: BatchExecutor, batch: Any, *rest: Any) -> Any:
        nonlocal runs
        if any(request.rows == 3 for request in batch):
            runs += 1
            raise SystemExit
        return works(running, batch, *rest)

    monkeypatch.setattr(BatchExecutor, "_execute", execute)
    health = HealthCalls()
    batcher = make(lambda x: x * 2, 4, health=health)
    _, recorder = enqueue(batcher, [1.0, 2.0, 3.0])
    caught = recorder.await_outcome().error
    assert isinstance(caught, InstanceFailed)
    assert "what ran the batch ended unexpectedly; retry in" in str(caught)
    assert runs == 2
    assert result(batcher.submit(1.0)) == 2
    health.await_calls(4)
    assert [reason is None for _, reason, _ in health.calls] == [False, True, False, True]
    statistics = batcher.statistics()
    assert (statistics.answered, statistics.failed, statistics.retried) == (1, 1, 1)


def test_repeated_crashes_are_reported_and_fail_the_queued_requests(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_LAST_SECONDS", 0.02)
    works, falling = RequestQueue._poll_locked, threading.Event()
    falling.set()

    def poll(queue: RequestQueue, device: Any) -> Any:
        if falling.is_set() and queue._backlog.rows:
            raise SystemExit
        return works(queue, device)

    monkeypatch.setattr(RequestQueue, "_poll_locked", poll)
    health = HealthCalls()
    batcher = make(lambda x: x * 2, health=health)
    _, recorder = enqueue(batcher, [1.0])
    assert isinstance(recorder.await_outcome().error, InstanceFailed)
    hopeless = [call for call in health.calls if call[2]]
    assert len(hopeless) == 1
    assert hopeless[0][1] == "workers end unexpectedly (SystemExit), 6 times by now"
    falling.clear()
    health.await_calls(12)
    assert health.calls[-1] == (0, None, False)
    assert result(batcher.submit(1.0)) == 2
    assert batcher.drain(PATIENCE)
    figures_add_up(batcher.statistics())


def test_another_device_takes_the_batch_of_a_crashed_worker(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_FIRST_SECONDS", 3600.0)
    monkeypatch.setattr(worker_module, "_LAST_SECONDS", 3600.0)
    health = HealthCalls()
    batcher = make([lambda x: x * 2, lambda x: x * 2], 4, health=health)
    crashed = fails_once(monkeypatch, BatchExecutor, "run", SystemExit())
    assert result(batcher.submit(1.0)) == 2
    assert crashed.is_set()
    assert [result(batcher.submit(float(tag))) for tag in range(5)] == [0, 2, 4, 6, 8]
    ((_, reason, hopeless),) = health.calls
    assert reason is not None
    assert not hopeless


def test_a_batch_taken_over_is_owned_by_the_other_device(
    make: Make, runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crashed worker has handed it back: it must neither do so again nor complete it."""
    hand_back = BatchExecutor._hand_back

    def handing(*arguments: Any) -> None:
        hand_back(*arguments)
        runner.await_batches(1)

    monkeypatch.setattr(BatchExecutor, "_hand_back", handing)
    fails_once(monkeypatch, BatchExecutor, "_execute", SystemExit())
    health = HealthCalls()
    batcher = make([runner, runner], 4, health=health)
    future = batcher.submit(1.0)
    health.await_calls(1)
    runner.open()
    assert result(future) == 2


def test_exceptions_injected_into_the_worker(make: Make, runner: ScriptedRunner) -> None:
    """As by debuggers: while the worker waits, and while it runs a batch."""
    health = HealthCalls()
    batcher = make(runner, 4, health=health)
    (worker,) = [thread for thread in batcher._workers._threads if "-worker-" in thread.name]

    def inject() -> None:
        assert worker.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(SystemExit))

    inject()
    _, idle = enqueue(batcher, [1.0])
    runner.await_batches(1)
    inject()
    runner.open()
    outcome = idle.await_outcome()
    assert outcome.error is None or isinstance(outcome.error, (InstanceFailed, SystemExit))
    assert result(batcher.submit(2.0)) == 4
    assert batcher.drain(PATIENCE)
    assert len(idle.outcomes) == 1


def test_after_a_crash_of_an_inline_run_a_worker_takes_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calling thread must be able to go on."""
    batcher = make(lambda x: x * 2, 4)
    batcher.add_warmup_sample(1, 1e-5)
    batcher.add_warmup_sample(4, 1e-5)
    for owner, name in ((BatchExecutor, "run"), (RequestQueue, "_poll_locked"), (Devices, "dispatched")):
        with monkeypatch.context() as patch:
            crashed = fails_once(patch, owner, name, SystemExit(), on=threading.current_thread().name)
            recorders = [Recorder() for _ in range(3)]
            for tag, recorder in enumerate(recorders):
                batcher.enqueue(request_of([float(tag)], recorder, one_row=False), notify=False)
            while not crashed.is_set():
                try:
                    assert batcher.run_inline(1.0) == math.inf
                except SystemExit:
                    break
                # The worker was not waiting again.
                batcher.enqueue(request_of([0.0], Recorder(), one_row=False), notify=False)
            for tag, recorder in enumerate(recorders):
                assert recorder.await_outcome().outputs.tolist() == [2.0 * tag]


def test_the_expiry_thread_is_restarted(
    make: Make, runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tensorferry.batcher.execution.worker_pool._EXPIRY_SECONDS", 0.01)
    batcher = make(runner, 4)
    occupy(batcher, runner)
    crashed = fails_once(monkeypatch, RequestQueue, "_expire_locked", SystemExit(), on="-expiry")
    recorder = Recorder()
    batcher.enqueue(request_of([1.0], recorder, one_row=False, deadline=batcher._clock.now() + 0.05))
    reach(crashed)
    assert type(recorder.await_outcome().error).__name__ == "DeadlineExceeded"
    assert "the expiry thread crashed" in caplog.text


def test_a_crash_of_the_crash_handler_is_handled() -> None:
    script: list[BaseException | None] = [SystemExit(), KeyError(), None]
    mended: list[BaseException] = []

    def work() -> None:
        if (fault := script.pop(0)) is not None:
            raise fault

    def mend(fault: BaseException) -> None:
        mended.append(fault)
        if len(mended) == 1:
            raise MemoryError

    supervise(work, mend)
    assert [type(fault) for fault in mended] == [SystemExit, MemoryError, KeyError]


def test_a_health_callback_that_raises_is_ignored(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def health(instance: int, reason: str | None, hopeless: bool) -> None:
        raise SystemExit

    caplog.set_level(logging.ERROR)
    fails_once(monkeypatch, BatchExecutor, "run", SystemExit())
    batcher = make(lambda x: x * 2, health=health)
    assert result(batcher.submit(1.0)) == 2
    assert "the health callback of an instance raised" in caplog.text
