"""A device fails: its requests run once more or fail, each once, and the device recovers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from batcher.conftest import Busy, Make
from polling import until
from support.batcher.rig import Recorder, enqueue, error, new_request, occupy, reach, result, rows

from tensorferry.batcher import Batcher, InstanceFailed, QueuePolicy, RunTimedOut
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


class Device:
    """A function that fails while it is `broken`, and its recovery, which the test controls."""

    def __init__(self, *, broken: bool = False, fn: Callable[[Any], Any] = lambda x: x * 2) -> None:
        self.broken = broken
        self.fn = fn
        self.tries = 0
        # Raised by the next recovery attempts.
        self.vain: list[Exception] = []
        self.tried, self.may_return = threading.Event(), threading.Event()

    def __call__(self, x: Any) -> Any:
        if self.broken:
            raise InstanceFailed("the device is broken", recover=self.recover)
        return self.fn(x)

    def recover(self) -> None:
        self.tries += 1
        self.tried.set()
        reach(self.may_return)
        if self.vain:
            raise self.vain.pop(0)
        self.broken = False


def broken_with(make: Make, count: int, **options: Any) -> tuple[Batcher, Device, list[Recorder]]:
    """A batcher whose device has failed with this many requests, and is recovering."""
    device = Device()
    runner = ScriptedRunner(device, gated=True)
    batcher = make(runner, 4, **options)
    recorders = [enqueue(batcher, [0.0])[1]]
    runner.await_batches(1)
    recorders += [enqueue(batcher, [float(tag)])[1] for tag in range(1, count)]
    device.broken = True
    runner.open()
    reach(device.tried)
    return batcher, device, recorders


def answered_again(batcher: Batcher) -> bool:
    """Return whether a request is answered; False while the device is out."""
    try:
        return bool(result(batcher.submit(4.0)) == 8)
    except InstanceFailed:
        return False


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_batch_is_run_again_when_the_device_is_back(make: Make, pipelined: bool) -> None:
    batcher, device, recorders = broken_with(make, 4, pipelined=pipelined)
    until(lambda: batcher.statistics().sizes.queued >= 4)
    device.may_return.set()
    assert [recorder.await_outcome().outputs.tolist() for recorder in recorders] == [[0], [2], [4], [6]]
    assert batcher.close()
    assert all(len(recorder.outcomes) == 1 for recorder in recorders)
    assert device.tries == 1
    statistics = batcher.statistics()
    assert (statistics.answered, statistics.failed) == (4, 0)
    assert 1 <= statistics.retried <= 2


def test_without_a_recovery_requeued_requests_run_at_once_first_and_in_order(
    make: Make, clock: VirtualClock
) -> None:
    failures = [InstanceFailed("a hiccup")]

    def model_fn(x: Any) -> Any:
        if len(x) == 3 and failures:
            raise failures.pop()
        return x * 2

    runner = ScriptedRunner(model_fn, gated=True)
    # On the real clock, batches that take long make the batcher try smaller ones.
    batcher = make(runner, 3, clock=clock)
    occupy(batcher, runner)
    sent = [enqueue(batcher, [float(tag)])[1] for tag in range(1, 7)]
    runner.open()
    for recorder in sent:
        assert recorder.await_outcome().error is None
    assert rows(runner, 1) == [[1, 2, 3], [1, 2, 3], [4, 5, 6]]


def test_a_request_is_run_once_more_and_not_twice(make: Make) -> None:
    device = Device(broken=True)

    def model_fn(x: Any) -> Any:
        device.broken = True
        return device(x)

    device.may_return.set()
    batcher = make(model_fn)
    caught = error(batcher.submit(1.0))
    assert isinstance(caught, InstanceFailed)
    assert str(caught) == "the device is broken; retry in 1.000 s"
    assert caught.retry_after == 1.0
    assert batcher.statistics().retried == 1


def test_the_other_device_takes_requeued_requests(make: Make) -> None:
    broken = Device()
    runner = ScriptedRunner(broken, gated=True)
    other = ScriptedRunner(gated=True)
    batcher = make([runner, other], 1)
    occupied = [enqueue(batcher, [float(tag)])[1] for tag in range(2)]
    runner.await_batches(1)
    other.await_batches(1)
    sent = [enqueue(batcher, [float(tag)])[1] for tag in range(2, 6)]
    broken.broken = True
    runner.open()
    reach(broken.tried)
    other.open()
    for recorder in (*occupied, *sent):
        assert recorder.await_outcome().error is None
    assert [result(batcher.submit(float(tag))) for tag in range(9)] == list(range(0, 18, 2))
    assert len(runner.batches) == 1
    broken.may_return.set()
    assert batcher.close()
    assert all(len(recorder.outcomes) == 1 for recorder in (*occupied, *sent))


def test_a_deadline_that_passes_during_the_recovery(make: Make, clock: VirtualClock) -> None:
    device = Device()
    runner = ScriptedRunner(device, gated=True)
    batcher = make(runner, 4, clock=clock)
    _, without_deadline = enqueue(batcher, [1.0])
    _, hasty = enqueue(batcher, [2.0], deadline=5.0)
    runner.await_batches(1)
    device.broken = True
    runner.release(1)
    reach(device.tried)
    clock.await_sleepers(until=5.0)
    clock.advance(5)
    assert type(hasty.await_outcome().error).__name__ == "DeadlineExceeded"
    assert not without_deadline.outcomes
    device.may_return.set()
    runner.open()
    assert batcher.close()
    assert (without_deadline.kind, hasty.kind) == ("answered", "DeadlineExceeded")


def test_a_queue_timeout_ends_with_the_first_dispatch(make: Make, clock: VirtualClock) -> None:
    device = Device(broken=True)
    runner = ScriptedRunner(device, gated=True)
    batcher = make(runner, clock=clock, policies=[QueuePolicy(timeout=2.0)])
    _, sent = enqueue(batcher, [1.0])
    runner.await_batches(1)
    runner.release(1)
    reach(device.tried)
    clock.advance(10)
    device.may_return.set()
    runner.open()
    assert sent.await_outcome().error is None


@pytest.mark.parametrize("drain", [True, False])
def test_drain_during_the_recovery_waits_for_it_and_close_fails_queued_requests(
    make: Make, drain: bool
) -> None:
    batcher, device, recorders = broken_with(make, 3)
    if drain:
        assert not batcher.drain(timeout=0.01)
    else:
        assert not batcher.close(drain=False, timeout=0.01), "a worker is inside the recovery"
    device.may_return.set()
    assert batcher.close()
    assert [recorder.kind for recorder in recorders] == ["answered" if drain else "BatcherClosed"] * 3


def test_a_device_that_fails_after_close_fails_its_batch(make: Make) -> None:
    device = Device(broken=True)
    device.may_return.set()
    runner = ScriptedRunner(device, gated=True)
    batcher = make(runner)
    _, sent = enqueue(batcher, [1.0])
    runner.await_batches(1)
    assert not batcher.close(drain=False, timeout=0.01)
    runner.open()
    assert batcher.close()
    assert sent.kind == "InstanceFailed"


@pytest.mark.parametrize("how", [InstanceFailed("still broken", 7.0), ValueError("a bug")])
def test_a_failed_recovery_fails_queued_requests_and_is_repeated(
    make: Make, clock: VirtualClock, how: Exception
) -> None:
    batcher, device, recorders = broken_with(make, 3, clock=clock)
    device.vain = [how]
    device.may_return.set()
    for recorder in recorders:
        assert isinstance(recorder.await_outcome().error, InstanceFailed)
    retry_after = how.retry_after if isinstance(how, InstanceFailed) else 1.0
    clock.await_sleepers(until=retry_after)
    with pytest.raises(InstanceFailed) as refused:
        batcher.submit(1.0)
    assert refused.value.retry_after == retry_after
    assert device.tries == 1
    clock.advance(retry_after)
    until(lambda: answered_again(batcher))
    assert device.tries == 2
    assert batcher.drain()


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_run_that_does_not_return_is_given_up(make: Make, pipelined: bool) -> None:
    runner = ScriptedRunner(gated=True)
    batcher = make(runner, 1, pipelined=pipelined)
    sent = [enqueue(batcher, [float(tag)])[1] for tag in range(3)]
    runner.await_batches(1)
    if pipelined:
        # The second worker holds the next batch, which runs after the one that hangs.
        until(lambda: len(batcher._workers._executors[0].in_flight) == 2)
    batcher.abort_hung_run(0, RunTimedOut("it hangs"))
    kinds = [recorder.await_outcome() and recorder.kind for recorder in sent]
    assert kinds == ["RunTimedOut", "InstanceFailed", "InstanceFailed"]
    with pytest.raises(InstanceFailed, match="it hangs"):
        batcher.submit(1.0)
    # The run returns after all.
    runner.open()
    until(lambda: answered_again(batcher))
    assert batcher.close()
    assert all(len(recorder.outcomes) == 1 for recorder in sent)
    assert batcher.statistics().answered == 1


def test_a_recovery_that_does_not_return_is_given_up(make: Make) -> None:
    batcher, device, recorders = broken_with(make, 2)
    batcher.abort_hung_run(0, RunTimedOut("the recovery hangs"))
    assert [recorder.await_outcome() and recorder.kind for recorder in recorders] == ["InstanceFailed"] * 2
    with pytest.raises(InstanceFailed):
        batcher.submit(1.0)
    device.may_return.set()
    until(lambda: answered_again(batcher))


def test_a_run_that_took_too_long_fails_its_requests_and_runs_nothing_again(busy: Busy) -> None:
    def model_fn(x: Any) -> Any:
        if len(x) > 1:
            raise RunTimedOut("too long")
        return x * 2

    batcher, runner = busy(model_fn, 4)
    futures = [batcher.submit(1.0) for _ in range(3)]
    runner.open()
    assert [str(error(future)) for future in futures] == ["too long"] * 3
    assert len(runner.batches) == 2
    assert result(batcher.submit(1.0)) == 2


def test_the_submitting_thread_recovers_no_device(make: Make) -> None:
    """It reads requests of all clients, so it must not wait for a device."""
    device = Device()
    batcher = make(device, 4)
    for count in (1, 4):
        batcher.add_warmup_sample(count, 1e-6)
    recorder = Recorder()
    device.broken = True
    mine = new_request([1.0], recorder)
    if batcher.enqueue(mine, notify=False):
        batcher.run_inline(1.0)
    reach(device.tried)
    assert not recorder.outcomes
    device.may_return.set()
    assert recorder.await_outcome().outputs.tolist() == [2]
