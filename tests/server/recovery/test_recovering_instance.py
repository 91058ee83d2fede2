"""An instance that survives: what it tells the batcher, what it frees, when it is ready; and the watchdog."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import models
from support.server.rig import PATIENCE, Array

from tensorferry.batcher import InstanceFailed, OutOfMemory, RunTimedOut
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.recovery import recovering_instance
from tensorferry.server.recovery.instance_health import InstanceEvent, InstanceHealth
from tensorferry.server.recovery.recovering_instance import RecoveringInstance
from tensorferry.server.recovery.watchdog import RunOutcome, Watchdog, WatchedRun
from tensorferry.server.runtime.session import Session

BROKEN = (
    "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=h ; file=f.cc ; line=1"
)


class Scripted:
    """Stands in for a session: runs what it is given."""

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


def survivor(session: Any, rebuild: Callable[[], Any] = Scripted, **options: Any) -> RecoveringInstance:
    health = options.pop("health", None) or InstanceHealth("m", "1")
    return RecoveringInstance(session, rebuild, health, 0, **options)


def test_what_is_wrong_with_a_request_is_passed_on() -> None:
    with pytest.raises(ModelFailedError, match="failed on this request"):
        survivor(Scripted(raising("indices element out of data bounds"))).run({})


def test_too_little_memory_breaks_nothing() -> None:
    health = InstanceHealth("m", "1")
    one = survivor(
        Scripted(raising("Failed to allocate memory for requested buffer of size 9")), health=health
    )
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            one.run({})
    assert health.reason is None
    assert health.statistics().events == {}


def test_a_broken_session_is_freed_before_it_is_built_anew() -> None:
    broken = Scripted(raising(BROKEN))
    gone = weakref.ref(broken)
    health = InstanceHealth("m", "1")

    def rebuild() -> Any:
        assert gone() is None, "both would need their memory on the device"
        return Scripted(lambda: {"y": 1})

    one = survivor(broken, rebuild, health=health)
    del broken
    gc.disable()
    try:
        with pytest.raises(InstanceFailed) as caught:
            one.run({})
        assert str(caught.value) == "the device failed (CUDA error 700), and its session is being built anew"
        assert health.reason == str(caught.value)
        recover = caught.value.recover
        assert recover is not None
        recover()
        recover()
    finally:
        gc.enable()
    assert health.reason is None
    assert one.run({}) == {"y": 1}
    assert health.statistics().events == {InstanceEvent.DEVICE_FAILED: 1, InstanceEvent.REBUILT: 1}


def test_tries_in_vain_come_later_and_later_until_it_is_hopeless() -> None:
    lost: list[str] = []
    health = InstanceHealth("m", "1", lost=lost.append)
    vain = 8

    def rebuild() -> Any:
        nonlocal vain
        vain -= 1
        if vain >= 0:
            raise StartError("no such device")
        return Scripted()

    one = survivor(Scripted(raising(BROKEN)), rebuild, health=health)
    with pytest.raises(InstanceFailed):
        one.run({})
    waits = []
    for number in range(8):
        with pytest.raises(InstanceFailed) as caught:
            one.recover()
        waits.append(caught.value.retry_after)
        assert len(lost) == (number >= 4)
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60]
    assert "the server has to be restarted" in lost[0]
    with pytest.raises(InstanceFailed):
        one.run({})
    one.recover()
    assert health.reason is None
    assert health.statistics().events == {
        InstanceEvent.DEVICE_FAILED: 1,
        InstanceEvent.REBUILD_FAILED: 8,
        InstanceEvent.REBUILT: 1,
    }


def test_a_model_is_out_when_all_its_instances_are() -> None:
    seen: list[str | None] = []
    health = InstanceHealth("m", "1", 2, lambda changed: seen.append(changed.reason))
    health.mark_down(0, "first")
    health.mark_down(1, "second")
    health.mark_down(1, "still")
    health.mark_up(0)
    health.mark_up(1)
    assert seen == [None, "second", "still", None, None]


def test_a_long_run_is_ended_for_real_and_the_next_is_not(tmp_path: Path) -> None:
    session = Session(models.probe(tmp_path / "probe.onnx"))
    watchdog = Watchdog(0.05)
    try:
        health = InstanceHealth("m", "1")
        one = survivor(session, watchdog=watchdog, limit=0.05, health=health)
        inputs: dict[str, Array] = {"x": np.ones((1, 4), np.float32), "index": np.zeros(1, np.int64)}
        for _ in range(2):
            with pytest.raises(RunTimedOut, match=r"longer than 0\.05 s, which --run-timeout-seconds"):
                one.run({**inputs, "work": np.full(1, 100_000_000)})
            assert session.run({**inputs, "work": np.zeros(1, np.int64)})["y"].tolist() == [[2.0] * 4]
        assert health.statistics().events == {InstanceEvent.RUN_ENDED: 2}
    finally:
        watchdog.close()


def test_a_run_that_does_not_end_is_given_up_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorferry.server.recovery.watchdog.GRACE_SECONDS", 0.02)
    may_return = threading.Event()
    changes: list[str | None] = []
    health = InstanceHealth("m", "1", 1, lambda changed: changes.append(changed.reason))
    given_up: list[RunTimedOut] = []
    told = threading.Event()

    def give_up(error: RunTimedOut) -> None:
        given_up.append(error)
        told.set()

    session = Scripted(lambda: may_return.wait(PATIENCE) and {"y": 2})
    watchdog = Watchdog(0.02)
    try:
        one = survivor(session, watchdog=watchdog, limit=0.02, health=health)
        one.give_up = give_up
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(one.run({})))
        thread.start()
        assert told.wait(PATIENCE)
        assert session.ended.is_set()
        assert health.reason is not None
        assert "the device hangs" in health.reason
        assert health.statistics().events == {InstanceEvent.HUNG: 1}
        may_return.set()
        thread.join(PATIENCE)
        assert results == [{"y": 2}]
        # Whoever is last, the watchdog or the run, says that it is back.
        watchdog.close()
        assert health.reason is None
        assert not session.ended.is_set(), "the next may run"
        assert len(given_up) == 1
    finally:
        watchdog.close()


def test_a_rebuild_that_does_not_return_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering_instance, "REBUILD_SECONDS", 0.02)
    may_return, told = threading.Event(), threading.Event()
    health = InstanceHealth("m", "1")

    def rebuild() -> Any:
        assert may_return.wait(PATIENCE)
        return Scripted()

    watchdog = Watchdog(0.02)
    try:
        one = survivor(Scripted(raising(BROKEN)), rebuild, watchdog=watchdog, health=health)
        one.give_up = lambda error: told.set()
        with pytest.raises(InstanceFailed):
            one.run({})
        thread = threading.Thread(target=one.recover)
        thread.start()
        assert told.wait(PATIENCE)
        assert "not built anew" in str(health.reason)
        may_return.set()
        thread.join(PATIENCE)
        watchdog.close()
        assert health.reason is None
        assert health.statistics().events == {
            InstanceEvent.DEVICE_FAILED: 1,
            InstanceEvent.HUNG: 1,
            InstanceEvent.REBUILT: 1,
        }
    finally:
        watchdog.close()


def test_what_ends_in_time_is_left_alone() -> None:
    """And what ends at the last moment: of the end and the look, one is first."""
    calls: list[str] = []
    watched = WatchedRun(lambda: calls.append("hung"))
    now = time.monotonic()
    watched.begin(5.0, lambda: calls.append("end"), lambda: calls.append("allow_next"))
    assert watched.check(now) is not None
    assert watched.finish() is RunOutcome.IN_TIME
    assert watched.check(now + 100) is None
    assert calls == []
    watched.begin(5.0, lambda: calls.append("end"), lambda: calls.append("allow_next"))
    watched.check(now + 100)
    assert watched.finish() is RunOutcome.ENDED
    watched.check(now + 200)
    assert calls == ["end", "allow_next"]


def test_the_watchdog_keeps_nobody_alive() -> None:
    watchdog = Watchdog(PATIENCE)
    try:
        watched = WatchedRun(lambda: None)
        watchdog.watch(watched)
        gone = weakref.ref(watched)
        del watched
        assert gone() is None
    finally:
        watchdog.close()
