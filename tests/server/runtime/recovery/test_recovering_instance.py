"""Recovering instance: errors for the batcher, release of memory, recovery; and the watchdog."""

from __future__ import annotations

import gc
import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from polling import until
from support.models.controlled import run_in_thread
from support.processes import models
from support.server.rig import PATIENCE, Array

from tensorferry.batcher import InstanceFailed, OutOfMemory, RunTimedOut
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.runtime.recovery import watchdog as watchdog_module
from tensorferry.server.runtime.recovery.instance_health import InstanceEvent, InstanceHealth
from tensorferry.server.runtime.recovery.recovering_instance import RecoveringInstance
from tensorferry.server.runtime.recovery.watchdog import Overdue, RunLimits, Watchdog, WatchedRun
from tensorferry.server.runtime.session import Session

BROKEN = (
    "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=h ; file=f.cc ; line=1"
)


class Scripted:
    """Stand-in for a session, with a scripted run."""

    device = "cuda:0"
    staged = None

    def __init__(self, run: Callable[[], Any] = dict) -> None:
        self._run = run
        self.ended = threading.Event()

    def run(self, inputs: Mapping[str, Array]) -> Any:
        try:
            return self._run()
        except RuntimeError as error:
            raise ModelFailedError("the model failed on this request") from error

    def end_runs(self) -> None:
        self.ended.set()

    def allow_runs(self) -> None:
        self.ended.clear()


def raising(message: str) -> Callable[[], Any]:
    def run() -> Any:
        raise RuntimeError(message)

    return run


def instance(
    session: Any, rebuild: Callable[[], Any] = Scripted, limits: RunLimits | None = None, **options: Any
) -> tuple[RecoveringInstance, InstanceHealth]:
    health = InstanceHealth("m", "1", **options)
    return RecoveringInstance(session, rebuild, health, 0, limits or RunLimits()), health


def test_out_of_memory_does_not_mark_the_instance_down() -> None:
    message = "Failed to allocate memory for requested buffer of size 9"
    recovering, health = instance(Scripted(raising(message)))
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            recovering.run({})
    assert health.reason is None
    assert health.statistics().events == {}


def test_a_broken_session_is_freed_before_the_rebuild() -> None:
    broken = Scripted(raising(BROKEN))
    gone = weakref.ref(broken)

    def rebuild() -> Any:
        assert gone() is None, "the device would have to hold both sessions"
        return Scripted(lambda: {"y": 1})

    recovering, health = instance(broken, rebuild)
    del broken
    gc.disable()
    try:
        with pytest.raises(InstanceFailed) as caught:
            recovering.run({})
        assert str(caught.value) == "the device failed (CUDA error 700), and its session is being rebuilt"
        assert health.reason == str(caught.value)
        recover = caught.value.recover
        assert recover is not None
        recover()
        recover()
    finally:
        gc.enable()
    assert health.reason is None
    assert recovering.run({}) == {"y": 1}
    assert health.statistics().events == {InstanceEvent.DEVICE_FAILED: 1, InstanceEvent.REBUILT: 1}


def test_delays_between_failed_rebuilds_double_and_the_fifth_reports_the_loss() -> None:
    lost: list[str] = []
    failures = 8

    def rebuild() -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise StartError("no such device")
        return Scripted()

    recovering, health = instance(
        Scripted(raising(BROKEN)), rebuild, lost=lambda health, reason: lost.append(reason)
    )
    with pytest.raises(InstanceFailed):
        recovering.run({})
    delays = []
    for number in range(8):
        with pytest.raises(InstanceFailed) as caught:
            recovering.recover()
        delays.append(caught.value.retry_after)
        assert len(lost) == (number >= 4)
    assert delays == [0.5, 1, 2, 4, 8, 16, 32, 60]
    assert "restart the server" in lost[0]
    with pytest.raises(InstanceFailed):
        recovering.run({})
    recovering.recover()
    assert health.reason is None
    assert health.statistics().events == {
        InstanceEvent.DEVICE_FAILED: 1,
        InstanceEvent.REBUILD_FAILED: 8,
        InstanceEvent.REBUILT: 1,
    }


def test_a_model_is_down_when_all_its_instances_are() -> None:
    seen: list[str | None] = []
    health = InstanceHealth("m", "1", (2,), lambda changed: seen.append(changed.reason))
    health.mark_down(0, "first")
    health.mark_down(1, "second")
    health.mark_down(1, "still")
    health.mark_up(0)
    health.mark_up(1)
    assert seen == [None, "second", "still", None, None]


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    watchdog = Watchdog(0.02)
    yield watchdog
    watchdog.close()


def test_a_run_above_the_limit_is_ended_and_the_next_one_runs(
    tmp_path: Path, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, a run may end later than it must in a server.
    monkeypatch.setattr(watchdog_module, "GRACE_SECONDS", PATIENCE)
    session = Session(models.probe(tmp_path / "probe.onnx"))
    recovering, health = instance(session, limits=RunLimits(watchdog, 0.05))
    inputs: dict[str, Array] = {"x": np.ones((1, 4), np.float32), "index": np.zeros(1, np.int64)}
    for _ in range(2):
        with pytest.raises(RunTimedOut, match=r"longer than 0\.05 s, which --run-timeout-seconds"):
            recovering.run({**inputs, "work": np.full(1, 100_000_000)})
        assert session.run({**inputs, "work": np.zeros(1, np.int64)})["y"].tolist() == [[2.0] * 4]
    assert health.statistics().events == {InstanceEvent.RUN_ENDED: 2}


def test_a_run_that_does_not_end_is_given_up_until_it_returns(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "GRACE_SECONDS", 0.02)
    may_return = threading.Event()
    given_up: queue.SimpleQueue[RunTimedOut] = queue.SimpleQueue()
    session = Scripted(lambda: may_return.wait(PATIENCE) and {"y": 2})
    recovering, health = instance(session, limits=RunLimits(watchdog, 0.02))
    recovering.on_hang(given_up.put)
    running = run_in_thread(lambda: recovering.run({}))
    given_up.get(timeout=PATIENCE)
    assert session.ended.is_set()
    assert "the device hangs" in str(health.reason)
    assert health.statistics().events == {InstanceEvent.HUNG: 1}
    may_return.set()
    assert running.result(PATIENCE) == {"y": 2}
    # The later of the watchdog and the run marks the instance up.
    watchdog.close()
    assert health.reason is None
    assert not session.ended.is_set(), "the next run is allowed"
    assert given_up.empty()


def test_a_rebuild_that_does_not_return_is_given_up(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "REBUILD_SECONDS", 0.02)
    may_return, gave_up = threading.Event(), threading.Event()

    def rebuild() -> Any:
        assert may_return.wait(PATIENCE)
        return Scripted()

    recovering, health = instance(Scripted(raising(BROKEN)), rebuild, RunLimits(watchdog))
    recovering.on_hang(lambda error: gave_up.set())
    with pytest.raises(InstanceFailed):
        recovering.run({})
    recovery = run_in_thread(recovering.recover)
    assert gave_up.wait(PATIENCE)
    assert "not rebuilt" in str(health.reason)
    may_return.set()
    recovery.result(PATIENCE)
    watchdog.close()
    assert health.reason is None
    assert health.statistics().events == {
        InstanceEvent.DEVICE_FAILED: 1,
        InstanceEvent.HUNG: 1,
        InstanceEvent.REBUILT: 1,
    }


def test_a_rebuild_that_has_ended_is_not_given_up() -> None:
    """The watchdog may look at the instance just when it is marked up."""

    def look(health: InstanceHealth) -> None:
        if health.reason is None:
            recovering.check(math.inf)

    recovering, health = instance(Scripted(raising(BROKEN)), changed=look)
    with pytest.raises(InstanceFailed):
        recovering.run({})
    recovering.recover()
    assert health.reason is None
    assert InstanceEvent.HUNG not in health.statistics().events


class Watched(WatchedRun):
    """Runs that end when the test says so. `meanwhile` is called once, when the watchdog finds a run overdue."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None
        self.calls: list[str] = []
        super().__init__(InstanceHealth(), 0, RunLimits())

    def begin(self, due: float) -> None:
        self._running, self._overdue = cast(Session, self), None
        self._due = due

    def end(self) -> Overdue | None:
        """End the run as `RecoveringInstance.run` does."""
        self._due = None
        return None if self._overdue is None else self.finish()

    def end_runs(self) -> None:
        self.calls.append("end")

    def allow_runs(self) -> None:
        self.calls.append("allow")

    def _give_up_run(self) -> None:
        self.calls.append("hung")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_overdue" and value is not None:
            meanwhile, self.meanwhile = self.meanwhile, lambda: None
            meanwhile()


def test_a_run_that_ends_in_time_is_not_ended_by_the_watchdog() -> None:
    watched = Watched()
    watched.begin(5.0)
    assert watched.check(0.0) == 5.0
    assert watched.end() is None
    assert watched.check(100.0) is None
    assert watched.calls == []
    watched.begin(5.0)
    watched.check(100.0)
    assert watched.end() is Overdue.ENDED
    watched.check(200.0)
    assert watched.calls == ["end", "allow"]


@pytest.mark.parametrize("next_run", [False, True])
def test_a_run_that_ends_before_the_watchdog_says_that_it_is_overdue(next_run: bool) -> None:
    """The thread that ran it has not seen that; the next run must go on."""
    watched = Watched()
    watched.begin(5.0)

    def meanwhile() -> None:
        watched._due = None
        if next_run:
            watched.begin(105.0)

    watched.meanwhile = meanwhile
    assert watched.check(100.0) is None
    assert watched.calls == []
    assert not watched.hangs
    if next_run:
        assert watched.check(100.0) == 105.0
    assert watched.end() is None
    assert watched.calls == []


@pytest.mark.parametrize("hung", [False, True])
def test_a_run_that_ends_while_the_watchdog_says_that_it_is_overdue(hung: bool) -> None:
    """The thread that ran it waits for the watchdog, and permits the next run if this one was asked to end."""
    watched, ended = Watched(), threading.Event()
    watched.begin(5.0)
    if hung:
        watched.check(100.0)
    outcomes: list[Overdue | None] = []
    thread = threading.Thread(target=lambda: outcomes.append(watched.end()))

    def meanwhile() -> None:
        thread.start()
        while watched._due is not None:
            ended.wait(0.001)

    watched.meanwhile = meanwhile
    assert watched.check(200.0) is None
    thread.join(PATIENCE)
    assert outcomes == [Overdue.ENDED if hung else None]
    assert watched.calls == (["end", "allow"] if hung else [])


def test_the_watchdog_keeps_no_instance_alive(watchdog: Watchdog) -> None:
    watched = Watched()
    watchdog.watch(watched)
    gone = weakref.ref(watched)
    del watched
    # The watchdog's thread may hold it for a moment.
    until(lambda: gone() is None)
