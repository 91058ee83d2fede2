"""Traces of the inference service: each sampled request once, for every outcome."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.server.rig import Replies, fp32, request, response_of, signature, spec

from tensorferry.batcher import Batcher, Request
from tensorferry.server.identity import ANONYMOUS
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.observability.tracing.trace import RequestTrace, Tracer

SIGNATURE = signature(spec("x", "FP32", "batch", "n"), outputs=(spec("y", "FP32", "batch", "n"),))


class Collector:
    """Source that traces every request, and its own sink."""

    context = None
    traces_calls = False

    def __init__(self) -> None:
        self.completed_traces: list[RequestTrace] = []

    def sample(self, model: Any, parent: Any) -> Collector:
        return self

    def completed(self, trace: RequestTrace) -> None:
        self.completed_traces.append(trace)

    def ended(self, trace: RequestTrace) -> None:
        pass


class Desk:
    """Service that traces every request, and collects the replies."""

    def __init__(self, collector: Any = None) -> None:
        self.collector = collector or Collector()
        self.registry = ModelRegistry()
        self.service = InferenceService(self.registry, tracing=Tracer([self.collector]))

    def unload(self) -> None:
        self.registry.mark_unloading(self.registry.get("m"))

    def serve(self, version: str) -> Batcher:
        batcher = Batcher(lambda inputs: {"y": inputs["x"]}, 4)
        self.registry.mark_ready(Model("m", version, SIGNATURE, 4, "", batcher))
        return batcher

    def ask(self, request_id: str, deadline: float = math.inf, **options: Any) -> Replies:
        replies = Replies()
        data = request({"x": fp32(1, 2)}, id=request_id).SerializeToString()
        self.service.submit(data, deadline, replies, **options)
        return replies

    def traced(self) -> list[tuple[str, str, bool]]:
        """Return request, version, and whether the request ran, for each trace."""
        return [
            (trace.request_id, trace.addressed[1], trace.batch is not None)
            for trace in self.collector.completed_traces
        ]


def test_each_request_has_one_trace_even_if_its_model_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    first = desk.serve("1")
    assert response_of(desk.ask("answered").first()).id == "answered"
    assert desk.traced() == [("answered", "1", True)]
    with pytest.raises(Exception, match="deadline"):
        response_of(desk.ask("too late", deadline=0.0).first())
    assert desk.traced()[1:] == [("too late", "1", False)]
    assert first.close()
    # The batcher was closed, so the model is looked up again. It is still one request with one trace.
    second: list[Batcher] = []

    enqueue = first.enqueue

    def replace(taken: Request, *, notify: bool) -> bool:
        second.append(desk.serve("2"))
        return enqueue(taken, notify=notify)

    monkeypatch.setattr(first, "enqueue", replace)
    assert response_of(desk.ask("moved").first()).model_version == "2"
    assert desk.traced()[2:] == [("moved", "2", True)]
    assert second[0].close()


def test_an_exception_of_a_sink_does_not_affect_the_response(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        context = None
        traces_calls = False

        def sample(self, model: Any, parent: Any) -> Any:
            return self

        def completed(self, trace: Any) -> None:
            raise RuntimeError("broken")

        ended = completed

    desk = Desk(Broken())
    batcher = desk.serve("1")
    reply = desk.ask("1").first()
    assert response_of(reply).id == "1"
    assert reply.trace is not None
    reply.trace.sent()
    assert caplog.text.count("a request could not be traced") == 2
    assert batcher.close()


def test_a_request_of_a_function_is_traced_only_by_sources_of_such_requests() -> None:
    tracer = Tracer([Collector()])
    assert tracer.begin(None, "1", 0.0, None, ANONYMOUS) is not None
    assert tracer.begin(None, "1", 0.0, None, ANONYMOUS, called_by="outer") is None
