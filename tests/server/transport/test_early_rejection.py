"""Calls that are rejected in an overload before their messages are read."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.server.rig import PATIENCE
from support.server.scripted_service import ServedTransport, failure, opened, success

from tensorferry.batcher import QueueFull
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.status import Status
from tensorferry.server.transport.call_admission import Refusal
from tensorferry.server.transport.inline_schedule import InlineSchedule
from tensorferry.server.transport.lane import lane as lane_module
from tensorferry.server.transport.lane.lane import Lane

FULL = QueueFull("overload: come back later; retry in 0.25 s", 0.25, 0.001)


class Model:
    """A model that is its own batcher, which rejects deadlines before 10."""

    def __init__(self) -> None:
        self.batcher = self
        self.asked: list[float] = []

    def fast_reject(self, deadline: float) -> QueueFull | None:
        self.asked.append(deadline)
        return FULL if deadline < 10 else None


def test_a_message_is_read_unless_there_is_exactly_one_model_and_no_trace() -> None:
    registry: Any = SimpleNamespace(only_model=None)
    service = InferenceService(registry)
    assert service.reject_early(9.0) is None
    registry.only_model = model = Model()
    assert service.reject_early(9.0) is FULL
    traced: Any = SimpleNamespace(sources=("file",))
    assert InferenceService(registry, tracing=traced).reject_early(9.0) is None
    assert model.asked == [9.0]


@pytest.fixture
def by_lane() -> Iterator[ServedTransport]:
    """The lane, whose polling thread pauses after a rejection."""
    yield from opened("lane")


@pytest.fixture
def rejecting(served: ServedTransport) -> list[float]:
    """Reject every call with a deadline; return the deadlines."""
    return reject_all(served)


def reject_all(served: ServedTransport) -> list[float]:
    asked: list[float] = []

    def check(deadline: float) -> QueueFull:
        asked.append(deadline)
        return FULL

    served.service.reject_early = check  # type: ignore[method-assign]
    return asked


def test_the_message_is_not_read(served: ServedTransport, rejecting: list[float]) -> None:
    for _ in range(100):
        with pytest.raises(grpc.RpcError) as caught:
            served.infer("a", timeout=PATIENCE).result()
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "come back later" in error.details()
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "250"
    assert not served.service.received
    assert len(rejecting) == 100
    assert all(deadline < math.inf for deadline in rejecting)


def test_a_call_without_a_deadline_is_read(served: ServedTransport, rejecting: list[float]) -> None:
    served.service.answer_at_once = success
    assert served.infer("a").result(PATIENCE).id == "a"
    assert not rejecting


def test_after_many_rejections_the_polling_thread_pauses(
    by_lane: ServedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert by_lane.lane is not None
    reject_all(by_lane)
    response_batcher = by_lane.lane.response_batcher
    pauses: list[float] = []
    paused = threading.Event()

    def pause(seconds: float) -> None:
        assert response_batcher.this_thread.polls
        pauses.append(seconds)
        paused.set()

    monkeypatch.setattr(response_batcher, "pause", pause)
    calls = [by_lane.infer(str(number), timeout=PATIENCE) for number in range(50)]
    for call in calls:
        assert call.exception(PATIENCE).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert paused.wait(PATIENCE)
    assert set(pauses) == {FULL.pause_seconds}
    assert len(pauses) <= 50
    by_lane.service.answer_at_once = success
    assert by_lane.infer("a").result(PATIENCE).id == "a"


@pytest.mark.parametrize("others", [False, True])
def test_the_polling_thread_pauses_only_with_a_single_model(
    by_lane: ServedTransport, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause would delay the calls of another model, which may have no queue."""
    assert by_lane.lane is not None
    model = None if others else SimpleNamespace(batcher=SimpleNamespace(fast_reject=lambda deadline: None))
    monkeypatch.setattr(by_lane.service, "_registry", SimpleNamespace(only_model=model))
    pauses: list[float] = []
    monkeypatch.setattr(by_lane.lane.response_batcher, "pause", pauses.append)
    by_lane.service.answer_at_once = lambda request_id: failure(request_id, FULL)
    for _ in range(20):
        error = by_lane.infer("a", timeout=PATIENCE).exception(PATIENCE)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    by_lane.service.answer_at_once = success
    assert by_lane.infer("a").result(PATIENCE).id == "a"
    assert bool(pauses) is not others


def test_the_deadline_of_a_call_is_reduced_by_the_pause_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client counts its time from sending the call, the server from accepting it after the pause."""
    now = 1_700_000_000.0
    monkeypatch.setattr(lane_module, "time", SimpleNamespace(time=lambda: now))
    pauses: list[float] = []
    left: list[float] = []

    def admit_unary(call: Any, metadata: Any, remaining: float) -> tuple[Refusal, float]:
        left.append(remaining)
        return Refusal(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "")), math.inf

    lane = Lane.__new__(Lane)
    parts = SimpleNamespace(
        response_batcher=SimpleNamespace(handovers=(), pause=pauses.append),
        _core=SimpleNamespace(request=list.clear, queue=SimpleNamespace(idle=True)),
        admission=SimpleNamespace(admit_unary=admit_unary),
        _refusal=None,
        _final_status=None,
        _unrequested=[],
        _inline=InlineSchedule(),
        _recent_calls=[],
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
        return left[-1]

    assert arrives(now + 60) == pytest.approx(60)
    assert lane._on_wakeup(now) == 0.0, "called again once the waiting events are handled"
    assert pauses == [0.5]
    lane._last_pause = 30.0
    assert arrives(now + 60) == pytest.approx(30)
    lane._core.queue.idle = False
    lane._on_wakeup(now)
    assert arrives(now + 60) == pytest.approx(30), "more such calls are waiting"
    lane._core.queue.idle = True
    assert lane._on_wakeup(now) == math.inf
    assert arrives(now + 60) == pytest.approx(60)
