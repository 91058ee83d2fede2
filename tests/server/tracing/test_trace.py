"""What the service has traced: each sampled request once, whatever becomes of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.server.rig import Replies, fp32, request, response_of, signature, spec

from tensorferry.batcher import Batcher
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.registry import Model, ModelRegistry
from tensorferry.server.tracing.trace import Tracer
from tensorferry.server.tracing.triton import TritonTracing
from tensorferry.server.tracing.triton_file import TraceFile

SIGNATURE = signature(spec("x", "FP32", "batch", "n"), outputs=(spec("y", "FP32", "batch", "n"),))


class Kept(TraceFile):
    """Keeps traces instead of writing them."""

    def __init__(self) -> None:
        super().__init__(Path("traces.json"))
        self.kept: list[Any] = []

    def write(self, sheet: Any, trace: Any) -> None:
        self.kept.append(trace)


class Desk:
    """A service whose every request is traced, and what became of each."""

    def __init__(self) -> None:
        self.file = Kept()
        tracing = Tracer()
        self.tracing = TritonTracing(self.file, tracing)
        self.tracing.change("", {"timestamps": True, "rate": 1})
        self.registry = ModelRegistry()
        self.service = InferenceService(self.registry, tracing=tracing)

    def unload(self) -> None:
        self.registry.mark_unloading(self.registry.get("m"))

    def serve(self, version: str) -> Batcher:
        batcher = Batcher(lambda inputs: {"y": inputs["x"]}, 4)
        self.registry.mark_ready(Model("m", version, SIGNATURE, 4, "", batcher))
        return batcher

    def ask(self, request_id: str, deadline: float = math.inf) -> Replies:
        replies = Replies()
        self.service.submit(request({"x": fp32(1, 2)}, id=request_id).SerializeToString(), deadline, replies)
        return replies

    def traced(self) -> list[tuple[str, int, bool]]:
        """Of each trace the request, the version, and whether it ran."""
        return [
            (trace["request_id"], trace["model_version"], len(trace["timestamps"]) == 9)
            for trace in self.file.kept
        ]


def test_answered_refused_and_those_of_a_model_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    first = desk.serve("1")
    assert response_of(desk.ask("answered").first()).id == "answered"
    assert desk.traced() == [("answered", 1, True)]
    with pytest.raises(Exception, match="deadline"):
        response_of(desk.ask("too late", deadline=0.0).first())
    assert desk.traced()[1:] == [("too late", 1, False)]
    assert first.close()
    # Found closed, looked up again, and served by what came meanwhile: one request, one trace.
    enqueue = first.enqueue
    second: list[Batcher] = []

    def replace(taken: Any) -> None:
        second.append(desk.serve("2"))
        enqueue(taken)

    monkeypatch.setattr(first, "enqueue", replace)
    assert response_of(desk.ask("moved").first()).model_version == "2"
    assert desk.traced()[2:] == [("moved", 2, True)]
    desk.tracing.change("", {"timestamps": False})
    assert response_of(desk.ask("off").first()).id == "off"
    assert [trace["id"] for trace in desk.file.kept] == [1, 2, 3]
    assert second[0].close()


def test_one_whose_model_is_unloaded_under_its_hands_is_answered_and_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()
    batcher = desk.serve("1")
    assert batcher.close()
    enqueue = batcher.enqueue

    def unload(taken: Any) -> None:
        desk.unload()
        enqueue(taken)

    monkeypatch.setattr(batcher, "enqueue", unload)
    with pytest.raises(Exception, match="m"):
        response_of(desk.ask("gone").first())
    assert desk.traced() == [("gone", 1, False)]


def test_a_sink_that_raises_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        context = None

        def sample(self, model: Any, parent: Any) -> Any:
            return self

        def completed(self, trace: Any) -> None:
            raise RuntimeError("broken")

        ended = completed

    registry = ModelRegistry()
    batcher = Batcher(lambda inputs: {"y": inputs["x"]}, 4)
    registry.mark_ready(Model("m", "1", SIGNATURE, 4, "", batcher))
    service = InferenceService(registry, tracing=Tracer([Broken()]))
    replies = Replies()
    service.submit(request({"x": fp32(1, 2)}, id="1").SerializeToString(), math.inf, replies)
    reply = replies.first()
    assert response_of(reply).id == "1"
    assert reply.trace is not None
    reply.trace.sent()
    assert caplog.text.count("a request could not be traced") == 2
    assert batcher.close()
