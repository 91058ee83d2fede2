"""Crashes of threads of the batcher: their requests run once more or fail, and the thread is restarted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from support.batcher.interleave import Interleaver
from support.batcher.rig import Recorder, fails_below_zero, figures_add_up, new_request

from tensorferry.batcher import Batcher, BatcherError, InstanceFailed, Request
from tensorferry.batcher.queue.device_failures import DeviceFailures


class World:
    """A batcher in virtual time, and what its health callback said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.interleaver = Interleaver(0)
        self.interleaver.install(monkeypatch)
        self.health: list[tuple[int, str | None, bool]] = []
        self.crashes = 0
        # Whether a thread crashes that is about to run this batch, or reads the clock.
        self.falls_with: Callable[[Sequence[Request]], bool] = lambda batch: False
        self.falls_at: Callable[[str], BaseException | None] = lambda thread: None
        self.batcher: Batcher

    def run(self, main: Callable[[], object], devices: int = 1, **options: Any) -> None:
        def make_and_close() -> None:
            given = {"clock": self.clock, "health": self.note, "batch_started": self.batch_started, **options}
            self.batcher = Batcher([self.model_fn] * devices, 4, **given)
            main()
            assert self.batcher.close()

        self.interleaver.run(make_and_close)
        figures_add_up(self.batcher.statistics())

    def model_fn(self, x: Any) -> Any:
        self.interleaver.sleep(0.01)
        return fails_below_zero(x)

    def note(self, instance: int, reason: str | None, hopeless: bool) -> None:
        self.health.append((instance, reason, hopeless))

    def batch_started(self, batch: Sequence[Request]) -> None:
        if self.falls_with(batch):
            self.crashes += 1
            raise SystemExit

    @property
    def clock(self) -> Any:
        clock = self.interleaver.clock
        clock.now = self.now
        return clock

    def now(self) -> float:
        thread = self.interleaver.current
        if (fault := self.falls_at(thread.name if thread else "")) is not None:
            self.crashes += 1
            raise fault
        return self.interleaver.now()

    def send(self, *values: float, notify: bool = True, deadline: float = math.inf) -> Recorder:
        recorder = Recorder()
        self.batcher.enqueue(new_request(values, recorder, deadline=deadline), notify=notify)
        return recorder

    def outcome(self, recorder: Recorder) -> Any:
        """Wait for the outcome; return the outputs or the error."""
        self.interleaver.wait(lambda: bool(recorder.outcomes))
        outcome = recorder.only
        return outcome.error if outcome.error is not None else outcome.outputs.tolist()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


class Hook:
    """A response hook that raises once, when `where` is called."""

    def __init__(self, world: World, where: str, kind: type[BaseException]) -> None:
        self._world, self._where, self._kind = world, where, kind

    def begin(self, count: int) -> None:
        self._fall("begin")

    def end(self) -> None:
        self._fall("end")

    def started(self, batch: Sequence[Request]) -> Callable[[], None]:
        self._fall("started")
        return partial(self._fall, "ended")

    def _fall(self, where: str) -> None:
        if where == self._where and not self._world.crashes:
            self._world.crashes += 1
            raise self._kind


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("kind", [SystemExit, KeyError])
@pytest.mark.parametrize("where", ["started", "ended", "begin", "end"])
def test_after_a_crash_of_a_callback_each_request_ends_once_and_the_worker_goes_on(
    world: World, where: str, kind: type[BaseException], pipelined: bool
) -> None:
    hook = Hook(world, where, kind)
    restarted = kind is SystemExit
    fails = where == "begin" or (kind is KeyError and where != "end")

    def main() -> None:
        recorders = [world.send(float(tag)) for tag in range(6)]
        outcomes = [world.outcome(recorder) for recorder in recorders]
        failed = {str(outcome) for outcome in outcomes if isinstance(outcome, BatcherError)}
        if fails:
            assert failed == {"internal error while running the batch"}
        else:
            assert outcomes == [[2.0 * tag] for tag in range(6)]
        assert world.outcome(world.send(7.0)) == [14.0]

    world.run(main, response_hook=hook, batch_started=hook.started, pipelined=pipelined)
    assert world.crashes == 1
    reason = "a worker ended unexpectedly (SystemExit) and is restarted"
    assert world.health == ([(0, reason, False), (0, None, False)] if restarted else [])


def test_a_pipelined_device_is_idle_again_after_a_crash_beside_another_batch(world: World) -> None:
    def main() -> None:
        world.falls_with = lambda batch: not world.crashes
        recorders = [world.send(float(tag)) for tag in range(24)]
        assert [world.outcome(recorder) for recorder in recorders] == [[2.0 * tag] for tag in range(24)]
        world.interleaver.sleep(5.0)
        (device,) = world.batcher._queue._devices.each
        assert device.idle

    world.run(main, pipelined=True)


def test_a_crash_is_reported_before_the_recovery_by_another_worker(world: World) -> None:
    def slow(instance: int, reason: str | None, hopeless: bool) -> None:
        if reason is not None:
            world.interleaver.sleep(9.0)
        world.note(instance, reason, hopeless)

    def main() -> None:
        world.falls_with = lambda batch: not world.crashes
        assert world.outcome(world.send(1.0)) == [2.0]
        world.interleaver.sleep(20.0)

    world.run(main, pipelined=True, health=slow)
    assert [reason is None for _, reason, _ in world.health] == [False, True]


def test_a_crash_during_the_recovery_by_another_worker_is_over_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovered = DeviceFailures.recovered
    recovering: list[int] = []

    def slow(failures: DeviceFailures, device: int) -> None:
        recovering.append(device)
        # Time moves once the other worker has crashed and waits for the end of the recovery.
        world.interleaver.sleep(1.0)
        recovered(failures, device)

    def crash(batch: Sequence[Request]) -> bool:
        if batch[0].rows == 1 and not world.crashes:
            world.interleaver.wait(lambda: bool(recovering))
            return True
        return False

    def model_fn(x: Any) -> Any:
        world.interleaver.sleep(0.01)
        if len(x) == 4 and not recovering:
            raise InstanceFailed("broken", recover=lambda: None)
        return fails_below_zero(x)

    def main() -> None:
        world.falls_with = crash
        breaks, crashes = world.send(1.0, 2.0, 3.0, 4.0), world.send(5.0)
        assert world.outcome(breaks) == [2.0, 4.0, 6.0, 8.0]
        assert world.outcome(crashes) == [10.0]

    monkeypatch.setattr(DeviceFailures, "recovered", slow)
    monkeypatch.setattr(world, "model_fn", model_fn)
    world.run(main, pipelined=True)
    assert world.crashes == 1
    assert [reason is None for _, reason, _ in world.health] == [False, True]


def test_a_request_that_crashes_each_worker_runs_twice(world: World) -> None:
    def main() -> None:
        world.falls_with = lambda batch: batch[0].rows == 3
        error = world.outcome(world.send(1.0, 2.0, 3.0))
        assert isinstance(error, InstanceFailed)
        assert "what ran the batch ended unexpectedly; retry in" in str(error)
        assert world.outcome(world.send(1.0)) == [2.0]

    world.run(main)
    assert world.crashes == 2
    assert [reason is None for _, reason, _ in world.health] == [False, True, False, True]
    statistics = world.batcher.statistics()
    assert (statistics.answered, statistics.failed, statistics.retried) == (1, 1, 1)


def test_repeated_crashes_are_reported_and_fail_the_queued_requests(world: World) -> None:
    def main() -> None:
        world.falls_with = lambda batch: True
        recorders = [world.send(1.0, 2.0, 3.0) for _ in range(4)]
        assert all(isinstance(world.outcome(recorder), InstanceFailed) for recorder in recorders)
        assert world.crashes == 6
        # Pauses of 0.1, 0.2, 0.4, 0.8 and 1.6 s.
        assert world.interleaver.now() == pytest.approx(3.1)
        world.falls_with = lambda batch: False
        world.interleaver.sleep(2.1)
        assert world.outcome(world.send(1.0)) == [2.0]
        assert world.health[-1] == (0, None, False)
        world.interleaver.sleep(60.0)
        world.falls_with = lambda batch: world.crashes == 6
        assert world.outcome(world.send(1.0)) == [2.0]

    world.run(main)
    assert [reason for _, reason, hopeless in world.health if hopeless] == [
        "workers end unexpectedly (SystemExit), 6 times by now"
    ]
    assert world.health[-2:] == [
        (0, "a worker ended unexpectedly (SystemExit) and is restarted", False),
        (0, None, False),
    ]


def test_another_device_takes_the_batch_of_a_crashed_worker(world: World) -> None:
    def main() -> None:
        world.falls_with = lambda batch: not world.crashes
        assert world.outcome(world.send(1.0)) == [2.0]
        assert world.interleaver.now() < 0.1

    world.run(main, devices=2)
    assert world.crashes == 1


def test_after_a_crash_of_an_inline_run_a_worker_takes_over(world: World) -> None:
    """The calling thread must be able to go on."""

    def main() -> None:
        for rows in (1, 4):
            world.batcher.add_warmup_sample(rows, 1e-5)
        world.interleaver.sleep(1.0)
        world.falls_with = lambda batch: not world.crashes
        recorders = [world.send(float(tag), notify=False) for tag in range(3)]
        with pytest.raises(SystemExit):
            world.batcher.run_inline(1.0)
        assert [world.outcome(recorder) for recorder in recorders] == [[0.0], [2.0], [4.0]]

    world.run(main)


def test_the_expiry_thread_is_restarted(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def occupy(batch: Sequence[Request]) -> bool:
        world.interleaver.sleep(9.0)
        return False

    def main() -> None:
        world.falls_with = occupy
        running = world.send(1.0)
        world.interleaver.sleep(1.0)
        world.falls_at = lambda thread: SystemExit() if "-expiry" in thread and not world.crashes else None
        late = world.send(2.0, deadline=2.0)
        assert type(world.outcome(late)).__name__ == "DeadlineExceeded"
        assert world.interleaver.now() <= 2.1
        assert world.outcome(running) == [2.0]

    world.run(main)
    assert world.crashes == 1
    assert "the expiry thread crashed" in caplog.text


def test_a_health_callback_that_raises_is_ignored(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def health(instance: int, reason: str | None, hopeless: bool) -> None:
        raise SystemExit

    def main() -> None:
        world.falls_with = lambda batch: not world.crashes
        assert world.outcome(world.send(1.0)) == [2.0]

    world.run(main, health=health)
    assert "the health callback of an instance raised" in caplog.text
