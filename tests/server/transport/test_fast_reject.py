"""Calls that are turned away in an overload before their messages are read."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.server.rig import PATIENCE
from support.server.scripted_service import ServedTransport, failure, opened, success

from tensorferry.batcher import QueueFull
from tensorferry.server.inference.early_rejection import EarlyRejection
from tensorferry.server.status import Status
from tensorferry.server.transport.call_admission import Refusal
from tensorferry.server.transport.lane.inline_runs import InlineRuns
from tensorferry.server.transport.lane.lane import Lane

FULL = QueueFull("overload: come back later; retry in 0.25 s", 0.25, 0.001)


class Model:
    """One whose batcher turns away who has a deadline before 10."""

    def __init__(self) -> None:
        self.batcher = self
        self.asked: list[float] = []

    def fast_reject(self, deadline: float) -> QueueFull | None:
        self.asked.append(deadline)
        return FULL if deadline < 10 else None


class Registry:
    """Holds models; `generation` is to grow when they change."""

    def __init__(self, *models: Model) -> None:
        self.held = models
        self.generation = 1

    def models(self) -> tuple[Model, ...]:
        return self.held


def early_rejection(registry: Registry, *sources: str) -> EarlyRejection:
    tracing: Any = SimpleNamespace(sources=sources)
    held: Any = registry
    return EarlyRejection(held, tracing)


def test_the_one_model_is_asked() -> None:
    foreseen = early_rejection(Registry(Model()))
    assert foreseen.check(9.0) is FULL
    assert foreseen.check(11.0) is None


def test_where_nobody_knows_the_model_its_message_is_read() -> None:
    assert early_rejection(Registry()).check(9.0) is None
    registry = Registry(Model(), Model())
    foreseen = early_rejection(registry)
    assert foreseen.check(9.0) is None
    registry.held = registry.held[:1]
    registry.generation += 1
    assert foreseen.check(9.0) is FULL
    registry.held = ()
    registry.generation += 1
    assert foreseen.check(9.0) is None


def test_a_call_that_may_be_traced_is_read() -> None:
    model = Model()
    assert early_rejection(Registry(model), "file").check(9.0) is None
    assert not model.asked


def test_one_is_the_sole_one_as_long_as_there_is_no_other() -> None:
    registry = Registry(Model())
    foreseen = early_rejection(registry, "file")
    batcher: Any = foreseen.only_batcher()
    assert batcher is registry.held[0]
    registry.held = (Model(), Model())
    registry.generation += 1
    assert foreseen.only_batcher() is None


@pytest.fixture
def by_lane() -> Iterator[ServedTransport]:
    """The lane, whose polling thread pauses after a rejection."""
    yield from opened("lane")


@pytest.fixture
def turning_away(served: ServedTransport) -> list[float]:
    """Every call with a deadline is rejected from now on. Returns the deadlines."""
    return reject_all(served)


def reject_all(served: ServedTransport) -> list[float]:
    asked: list[float] = []

    def check(deadline: float) -> QueueFull:
        asked.append(deadline)
        return FULL

    rejection = SimpleNamespace(check=check, only_batcher=object, tracing_enabled=False)
    served.service.early_rejection = rejection  # type: ignore[assignment]
    return asked


def test_the_message_is_not_read(served: ServedTransport, turning_away: list[float]) -> None:
    for _ in range(100):
        with pytest.raises(grpc.RpcError) as caught:
            served.infer("a", timeout=PATIENCE).result()
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "come back later" in error.details()
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "250"
    assert not served.service.received
    assert len(turning_away) == 100
    assert all(deadline < math.inf for deadline in turning_away)


def test_a_call_without_a_deadline_is_read(served: ServedTransport, turning_away: list[float]) -> None:
    served.service.answer_at_once = success
    assert served.infer("a").result(PATIENCE).id == "a"
    assert not turning_away


def test_many_at_once_are_told_together_and_then_the_thread_rests(
    by_lane: ServedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert by_lane.lane is not None
    reject_all(by_lane)
    response_batcher = by_lane.lane.response_batcher
    rests: list[float] = []
    rested = threading.Event()

    def rest(seconds: float) -> None:
        assert response_batcher.is_polling
        rests.append(seconds)
        rested.set()

    monkeypatch.setattr(response_batcher, "pause", rest)
    calls = [by_lane.infer(str(number), timeout=PATIENCE) for number in range(50)]
    for call in calls:
        assert call.exception(PATIENCE).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert rested.wait(PATIENCE)
    assert set(rests) == {FULL.pause_seconds}
    assert len(rests) <= 50
    by_lane.service.answer_at_once = success
    assert by_lane.infer("a").result(PATIENCE).id == "a"


@pytest.mark.parametrize("others", [False, True])
def test_the_thread_rests_only_where_no_other_model_serves(
    by_lane: ServedTransport, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of another's may be answered in a moment, and would be late by the rest."""
    assert by_lane.lane is not None
    batcher = None if others else SimpleNamespace(fast_reject=lambda deadline: None)
    monkeypatch.setattr(by_lane.service.early_rejection, "only_batcher", lambda: batcher)
    rests: list[float] = []
    monkeypatch.setattr(by_lane.lane.response_batcher, "pause", rests.append)
    by_lane.service.answer_at_once = lambda request_id: failure(request_id, FULL)
    for _ in range(20):
        error = by_lane.infer("a", timeout=PATIENCE).exception(PATIENCE)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    by_lane.service.answer_at_once = success
    assert by_lane.infer("a").result(PATIENCE).id == "a"
    assert bool(rests) is not others


def test_what_a_call_waited_for_a_rest_to_end_is_taken_off_its_time() -> None:
    """Its client counts from when it sent the call: else it would be answered in time by the server's clock alone."""
    now = time.time()
    rests: list[float] = []
    deadlines: list[float] = []

    def admit_unary(call: Any, metadata: Any, deadline: float) -> Refusal:
        deadlines.append(deadline - time.monotonic())
        return Refusal(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, ""))

    lane = Lane.__new__(Lane)
    parts = SimpleNamespace(
        _thread_bound=True,
        response_batcher=SimpleNamespace(handovers=(), pause=rests.append),
        _core=SimpleNamespace(request=lambda *call: None, queue=SimpleNamespace(idle=True)),
        _admission=SimpleNamespace(admit_unary=admit_unary),
        _unrequested=[],
        _refusal=None,
        _final_status=None,
        _inline_runs=InlineRuns(),
        _watch_cancel_at=math.inf,
        _pause=0.5,
        _last_pause=0.0,
    )
    vars(lane).update(vars(parts))
    call = SimpleNamespace(start_server_batch=lambda operations, tag: None)

    def arrives(deadline: float) -> float:
        details = SimpleNamespace(deadline=deadline)
        event = SimpleNamespace(success=True, call=call, call_details=details, invocation_metadata=())
        lane._unary_arrived(event)
        return deadlines[-1]

    assert arrives(now + 60) == pytest.approx(60, abs=1)
    assert lane._on_wakeup(now) == 0.0, "called again once the waiting events are handled"
    assert rests == [0.5]
    lane._last_pause = 30.0
    assert arrives(now + 60) == pytest.approx(30, abs=1)
    assert arrives(1e12) == math.inf
    lane._core.queue.idle = False
    lane._on_wakeup(now)
    assert arrives(now + 60) == pytest.approx(30, abs=1), "more such calls are waiting"
    lane._core.queue.idle = True
    assert lane._on_wakeup(now) == math.inf
    assert arrives(now + 60) == pytest.approx(60, abs=1)
