"""OpenTelemetry spans of requests and batches, for both transports and every outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.trace import StatusCode
from support.server.pipelines import BranchedModel
from support.server.rig import PATIENCE, fp32, request
from support.server.scripted_service import ServedTransport
from support.server.spans import ROUNDING_NS, SAMPLED, SPAN, TRACE, UNSAMPLED, TracedService, ids_of, of

from tensorferry.server.errors import ModelFailedError
from tensorferry.server.observability.tracing import otel

UNARY = "inference.GRPCInferenceService/ModelInfer"


@pytest.fixture
def traced(
    served: ServedTransport, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., TracedService]]:
    # Each span reads two clocks one after the other, and a busy machine may suspend the thread in between.
    monkeypatch.setattr(otel, "time", SimpleNamespace(time=lambda: 2e9, monotonic=lambda: 1e6))
    made: list[TracedService] = []

    def make(**options: Any) -> TracedService:
        made.append(TracedService(served, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_request_s_span_has_the_callers_as_parent_and_a_child_for_each_stage(
    traced: Callable[..., TracedService],
) -> None:
    at = traced()
    at.runner.open()
    assert at.infer("one", rows=3).result(PATIENCE).id == "one"
    spans = at.spans(1, 1)
    span = spans.requests["one"]
    assert (span.name, span.status.status_code) == (UNARY, StatusCode.UNSET)
    assert span.parent is not None
    assert span.context is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert span.parent.is_remote
    assert span.context.trace_id == span.parent.trace_id
    attributes = of(span)
    assert attributes.pop("tensorferry.queue.delay_seconds") >= 0
    assert attributes == {
        "rpc.system": "grpc",
        "rpc.service": "inference.GRPCInferenceService",
        "rpc.method": "ModelInfer",
        "rpc.grpc.status_code": 0,
        "tensorferry.model.name": "m",
        "tensorferry.model.version": "1",
        "tensorferry.request.id": "one",
        "tensorferry.request.rows": 3,
        "tensorferry.batch.number": 1,
        "tensorferry.batch.requests": 1,
        "tensorferry.batch.rows": 3,
        "tensorferry.batch.close_reason": "idle",
    }
    assert list(spans.stages("one")) == ["decode", "queue", "batch", "respond"]
    (link,) = spans.stages("one")["batch"].links
    assert link.context == spans.batches[1].context
    assert spans.batches[1].name == "batch"
    assert spans.batches[1].context is not None
    assert spans.batches[1].context.trace_id != span.context.trace_id
    assert span.instrumentation_scope is not None
    assert (span.instrumentation_scope.name, span.instrumentation_scope.version) == ("tensorferry", "1.2.3")


def test_a_batch_and_its_sampled_requests_link_to_each_other(traced: Callable[..., TracedService]) -> None:
    at = traced()
    calls = [at.infer("first")]
    at.runner.await_batches(1)
    calls += [at.infer("a"), at.infer("b", ""), at.infer("unsampled", UNSAMPLED)]
    at.await_queued(3)
    at.runner.open()
    assert [call.result(PATIENCE).id for call in calls] == ["first", "a", "b", "unsampled"]
    spans = at.spans(3, 2)
    batch = spans.batches[2]
    members = [spans.requests["a"], spans.requests["b"]]
    assert ids_of([link.context for link in batch.links]) == ids_of([member.context for member in members])
    assert batch.context is not None
    # All links were there when the span was exported.
    assert at.exporter.links[batch.context.span_id] == 2
    assert of(batch)["tensorferry.batch.requests"] == of(batch)["tensorferry.batch.rows"] == 3
    assert of(batch)["tensorferry.batch.compute_seconds"] > 0
    for member in ("a", "b"):
        (link,) = spans.stages(member)["batch"].links
        assert link.context == batch.context
        assert of(spans.requests[member])["tensorferry.queue.delay_seconds"] > 0
    # A request without a parent span is the root of a trace.
    assert members[1].parent is None


def test_a_burst_within_another_leaves_the_outer_one_its_batch(
    traced: Callable[..., TracedService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of a pipeline's stage becomes a request of the next stage, which drops queued requests for it."""
    at = traced()
    add = at.source.add_to_batch

    def add_and_drop(*arguments: Any) -> Any:
        span = add(*arguments)
        at.source.begin(2)
        at.source.end()
        return span

    monkeypatch.setattr(at.source, "add_to_batch", add_and_drop)
    calls = [at.infer("first")]
    at.runner.await_batches(1)
    calls += [at.infer("a"), at.infer("b")]
    at.await_queued(2)
    at.runner.open()
    assert [call.result(PATIENCE).id for call in calls] == ["first", "a", "b"]
    batch = at.spans(3, 2).batches[2].context
    assert batch is not None
    assert at.exporter.links[batch.span_id] == 2


def test_the_links_of_a_batch_are_bounded(traced: Callable[..., TracedService]) -> None:
    at = traced(max_links=2)
    calls = [at.infer("first")]
    at.runner.await_batches(1)
    calls += [at.infer(str(number)) for number in range(4)]
    at.await_queued(4)
    at.runner.open()
    for call in calls:
        call.result(PATIENCE)
    batch = at.spans(5, 2).batches[2]
    assert (len(batch.links), batch.dropped_links) == (2, 2)


@pytest.fixture
def branched() -> Iterator[BranchedModel]:
    made = BranchedModel()
    yield made
    made.close()


def call_pipeline(at: TracedService, branched: BranchedModel, request_id: str) -> Any:
    at.served.registry.mark_ready(branched.model)
    message = request({"x": np.zeros(2)}, id=request_id, model="p")
    return at.served.stub.ModelInfer.future(message, metadata=[("traceparent", SAMPLED)], timeout=PATIENCE)


def test_each_stage_and_step_of_a_pipeline_has_a_span(
    traced: Callable[..., TracedService], branched: BranchedModel
) -> None:
    at = traced()
    branched.encode.open()
    assert call_pipeline(at, branched, "one").result(PATIENCE).id == "one"
    spans = at.spans(1, 1)
    whole = spans.requests["one"]

    def children(span: Any) -> dict[str, Any]:
        found = [one for one in spans.all if one.parent == span.context]
        return {one.name: one for one in sorted(found, key=lambda one: one.start_time or 0)}

    parts = children(whole)
    assert set(parts) == {"decode", "stage clean+split", "stage encode", "stage count", "respond"}
    assert list(parts)[:2] == ["decode", "stage clean+split"]
    steps = {"clean+split": ["step clean", "step split"], "encode": ["step encode"], "count": ["step count"]}
    for name, of_stage in steps.items():
        stage = parts[f"stage {name}"]
        assert list(children(stage)) == ["queue", "batch"]
        queue, batch = children(stage).values()
        assert queue.start_time == stage.start_time
        assert abs(queue.end_time - batch.start_time) < ROUNDING_NS
        assert batch.end_time == stage.end_time <= whole.end_time
        assert list(children(batch)) == of_stage
        at_time = batch.start_time
        for step in children(batch).values():
            assert at_time <= step.start_time + ROUNDING_NS
            at_time = step.end_time
        assert at_time <= batch.end_time + ROUNDING_NS
        # Its batch has a span in a trace of its own.
        (link,) = batch.links
        (of_batch,) = [one for one in spans.all if one.context == link.context]
        assert of_batch.parent is None
        assert of(of_batch)["tensorferry.stage.name"] == name
        assert ids_of([one.context for one in of_batch.links]) == ids_of([whole.context])


def test_a_request_without_a_batch_has_no_batch_span(traced: Callable[..., TracedService]) -> None:
    at = traced()
    with pytest.raises(grpc.RpcError):
        at.served.unary("ModelInfer")(b"\xff", metadata=[("traceparent", SAMPLED)])
    with pytest.raises(grpc.RpcError):
        at.served.stub.ModelInfer(
            request({"x": fp32(1, 2)}, id="unknown", model="x" * 128), metadata=[("traceparent", SAMPLED)]
        )
    spans = at.spans(2)
    malformed, unknown = spans.requests[""], spans.requests["unknown"]
    assert of(malformed)["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert of(unknown)["error.type"] == "NOT_FOUND"
    assert of(unknown)["tensorferry.model.name"] == "x" * 128
    # By the conventions this is an error of the client.
    assert malformed.status.status_code is unknown.status.status_code is StatusCode.UNSET
    assert list(spans.stages("unknown")) == ["decode", "respond"]


def test_an_error_of_the_model_is_an_error_of_the_server(traced: Callable[..., TracedService]) -> None:
    def fail(inputs: Any) -> Any:
        raise ModelFailedError("the model failed") from ValueError("what only the log is to know")

    at = traced(fn=fail)
    at.runner.open()
    assert at.infer("bad").code() is grpc.StatusCode.INTERNAL
    spans = at.spans(1)
    span = spans.requests["bad"]
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "the model failed")
    assert of(span)["tensorferry.error"] == "ModelFailedError"
    assert list(spans.stages("bad")) == ["decode", "queue", "batch", "respond"]


def test_requests_cancelled_and_expired_in_the_queue_have_spans(traced: Callable[..., TracedService]) -> None:
    at = traced()
    first = at.infer("first")
    at.runner.await_batches(1)
    gone = at.infer("gone")
    at.await_queued(1)
    allowed = request({"x": fp32(1, 2)}, id="allowed")
    # The server's own clock decides here. With a gRPC deadline, the client would cancel at about the same time.
    allowed.parameters["timeout"].int64_param = 1_000_000
    late = at.served.stub.ModelInfer.future(allowed, timeout=PATIENCE)
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert gone.cancel()
    spans = at.spans(2)
    errors = {
        name: (of(span)["error.type"], span.status.status_code) for name, span in spans.requests.items()
    }
    assert errors == {
        "gone": ("CANCELLED", StatusCode.UNSET),
        "allowed": ("DEADLINE_EXCEEDED", StatusCode.ERROR),
    }
    for request_id in ("gone", "allowed"):
        assert list(spans.stages(request_id))[:2] == ["decode", "queue"]
        assert "batch" not in spans.stages(request_id)
    at.runner.open()
    first.result(PATIENCE)


def test_a_cancelled_stream_ends_the_spans_of_its_requests(traced: Callable[..., TracedService]) -> None:
    """One request runs, one is queued, and one has a response that must wait for theirs."""
    at = traced()
    stream = at.served.stream(metadata=[("traceparent", SAMPLED)])
    stream.send_bytes(request({"x": fp32(1, 2)}, id="running").SerializeToString())
    at.runner.await_batches(1)
    stream.send_bytes(request({"x": fp32(1, 2)}, id="queued").SerializeToString())
    at.await_queued(1)
    stream.send_bytes(request({"x": fp32(1, 2)}, id="done", model="other").SerializeToString())
    stream.send_bytes(request({"x": fp32(1, 2)}, id="last").SerializeToString())
    at.await_queued(2)
    stream.cancel()
    spans = at.spans(4)
    errors = {name: of(span)["error.type"] for name, span in spans.requests.items()}
    assert errors == {"running": "CANCELLED", "queued": "CANCELLED", "done": "NOT_FOUND", "last": "CANCELLED"}
    for name, span in spans.requests.items():
        assert of(span)["rpc.method"] == "ModelStreamInfer"
        assert "respond" not in spans.stages(name)
    assert "batch" in spans.stages("running")


def test_spans_carry_the_callers_trace_state(traced: Callable[..., TracedService]) -> None:
    at = traced()
    at.runner.open()
    at.served.stub.ModelInfer(
        request({"x": fp32(1, 2)}, id="1"), metadata=[("traceparent", SAMPLED), ("tracestate", "a=1,b=2")]
    )
    span = at.spans(1, 1).requests["1"]
    assert span.context is not None
    assert dict(span.context.trace_state) == {"a": "1", "b": "2"}


def test_few_batches_are_kept(traced: Callable[..., TracedService], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "_MAX_BATCHES", 2)
    at = traced()
    at.runner.open()
    for number in range(5):
        at.infer(str(number)).result(PATIENCE)
    at.spans(5, 5)
    assert len(at.source._batches) == 2
