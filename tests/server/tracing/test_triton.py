"""Sampling by Triton's rules: settings of models and of the server, rate and count."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest
from support.server.rig import signature, spec

from tensorferry.batcher import BatchInfo, StageOutcome
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.models.registry import Model
from tensorferry.server.tracing.trace import RequestTrace, Tracer
from tensorferry.server.tracing.triton import TraceOptions, TritonTraceRecord, TritonTracing
from tensorferry.server.tracing.triton_file import TraceFile


class CollectingTraceFile(TraceFile):
    """Trace file that collects traces in memory."""

    def __init__(self) -> None:
        super().__init__(Path("traces.json"))
        self.kept: list[tuple[Any, Any]] = []

    def write(self, sheet: Any, *trace: Any) -> None:
        self.kept += [(sheet, one) for one in trace]


def model(name: str = "m", version: str = "1") -> Model:
    return Model(name, version, signature(spec("x", "FP32", "batch")), 8, "batched", cast(Any, None))


def sampled(tracing: TritonTracing, count: int, name: str = "m") -> list[int]:
    """Return the numbers, from 1, of those requests that are traced."""
    return [at for at in range(1, count + 1) if tracing.sample(model(name)) is not None]


def traced(record: TritonTraceRecord, of: Model, request_id: str) -> RequestTrace:
    """Return a trace of a request that arrived at 1 and was queued at 1.5."""
    trace = RequestTrace([record], request_id, 1.0)
    trace.enqueued(of)
    trace.queued = 1.5
    return trace


@pytest.fixture
def tracing() -> TritonTracing:
    return TritonTracing(CollectingTraceFile())


def test_tracing_is_off_by_default(tracing: TritonTracing) -> None:
    assert tracing.options("") == tracing.options("m") == TraceOptions(False, 1000, -1, 0)
    assert not tracing.active
    assert sampled(tracing, 3000) == []
    tracing.change("", {"timestamps": True})
    assert tracing.active
    assert sampled(tracing, 3000) == [1000, 2000, 3000]


def test_rate_and_count_limit_the_traced_requests(tracing: TritonTracing) -> None:
    tracing.change("", {"timestamps": True, "rate": 3, "count": 2})
    assert sampled(tracing, 5) == [3]
    assert tracing.options("").count == 1
    assert tracing.active
    assert sampled(tracing, 5) == [1]
    # The count is used up, and the source disabled.
    assert tracing.options("").count == 0
    assert not tracing.active
    assert sampled(tracing, 5) == []
    # A change restarts the count of requests.
    tracing.change("", {"count": 1})
    assert tracing.active
    assert sampled(tracing, 5) == [3]


def test_a_model_s_options_override_the_server_s(tracing: TritonTracing) -> None:
    tracing.change("m", {"timestamps": True, "rate": 2})
    assert tracing.options("m") == TraceOptions(True, 2, -1, 0)
    assert tracing.options("other") == tracing.options("") == TraceOptions()
    assert sampled(tracing, 4) == [2, 4]
    assert sampled(tracing, 4, "other") == []
    tracing.change("", {"rate": 5, "log_frequency": 7})
    assert tracing.options("m") == TraceOptions(True, 2, -1, 7)
    tracing.change("m", {"rate": None})
    assert tracing.options("m") == TraceOptions(True, 5, -1, 7)
    tracing.change("m", {"timestamps": None})
    assert tracing.options("m") == TraceOptions(False, 5, -1, 7)
    assert not tracing.active
    # The model has no options of its own now, so it shares the server's count.
    tracing.change("", {"timestamps": True})
    assert sampled(tracing, 3) == []
    assert sampled(tracing, 3, "other") == [2]


def test_tracing_can_be_off_for_one_model(tracing: TritonTracing) -> None:
    tracing.change("", {"timestamps": True, "rate": 1})
    tracing.change("m", {"timestamps": False})
    assert sampled(tracing, 2) == []
    assert sampled(tracing, 2, "other") == [1, 2]
    assert tracing.active


def test_clearing_an_option_of_the_server_restores_its_default(tracing: TritonTracing) -> None:
    tracing.change("", {"timestamps": True, "rate": 1, "count": 9, "log_frequency": 3})
    tracing.change("", {"timestamps": None, "rate": None, "count": None})
    assert tracing.options("") == TraceOptions(log_frequency=3)
    assert not tracing.active


@pytest.mark.parametrize("name", ["", "m"])
def test_invalid_options_are_refused_without_a_change(tracing: TritonTracing, name: str) -> None:
    tracing.change("", {"timestamps": True, "rate": 4})
    tracing.change("m", {"count": 3})
    with pytest.raises(InvalidRequestError, match="invalid trace setting :sample rate must be non-zero"):
        tracing.change(name, {"rate": 0, "log_frequency": 5})
    assert tracing.options("") == TraceOptions(True, 4, -1, 0)
    assert tracing.options("m") == TraceOptions(True, 4, 3, 0)


def test_a_change_of_the_server_that_is_invalid_for_a_model_is_refused(tracing: TritonTracing) -> None:
    tracing.change("", {"rate": 0})
    tracing.change("m", {"timestamps": True, "rate": 1})
    tracing.change("n", {"timestamps": False})
    with pytest.raises(InvalidRequestError, match="sample rate must be non-zero"):
        tracing.change("m", {"rate": None})
    with pytest.raises(InvalidRequestError, match="sample rate must be non-zero"):
        tracing.change("", {"timestamps": True})
    assert tracing.options("") == TraceOptions(rate=0)
    assert tracing.options("m") == TraceOptions(True, 1, -1, 0)


def test_tracing_cannot_be_enabled_without_a_file() -> None:
    tracing = TritonTracing()
    tracing.change("", {"rate": 1})
    with pytest.raises(InvalidRequestError, match=r"trace file name is not given; .* by --trace-file"):
        tracing.change("", {"timestamps": True})
    assert (tracing.options(""), tracing.active, tracing.file) == (TraceOptions(rate=1), False, "")


def test_timestamps_are_in_order() -> None:
    file = CollectingTraceFile()
    tracing = TritonTracing(file)
    tracing.change("", {"timestamps": True, "rate": 1})
    record = tracing.sample(model("digits", "3"))
    assert record is not None
    trace = traced(record, model("digits", "3"), "seven")
    batch = BatchInfo(1, 1, 1, compute_time=0.5, input_time=0.25, output_time=0.125, ended=3.0)
    trace.completed(batch, 0.5, None, None)
    ((_, written),) = file.kept
    times = {time["name"]: time["ns"] for time in written["timestamps"]}
    assert times.pop("REQUEST_END") > 3_125_000_000
    assert times == {
        "GRPC_WAITREAD_START": 1_000_000_000,
        "GRPC_WAITREAD_END": 1_000_000_000,
        "REQUEST_START": 1_000_000_000,
        "QUEUE_START": 1_500_000_000,
        "COMPUTE_START": 2_250_000_000,
        "COMPUTE_INPUT_END": 2_500_000_000,
        "COMPUTE_OUTPUT_START": 3_000_000_000,
        "COMPUTE_END": 3_125_000_000,
    }
    del written["timestamps"]
    assert written == {"id": 1, "model_name": "digits", "model_version": 3, "request_id": "seven"}


def test_the_stages_of_a_pipeline_are_traces_with_a_parent() -> None:
    file = CollectingTraceFile()
    tracing = TritonTracing(file)
    tracing.change("", {"timestamps": True, "rate": 1})
    record, later = tracing.sample(model("p", "3")), tracing.sample(model())
    assert record is not None
    assert later is not None
    trace = traced(record, model("p", "3"), "seven")
    batch = BatchInfo(1, 1, 1, compute_time=0.5, input_time=0.25, output_time=0.125, ended=3.0)
    stages = (
        StageOutcome("tokenize", 1.5, 0.75, batch),
        StageOutcome("encode", 3.125, 0.5, None),
        StageOutcome("refused", float("nan"), 0.0, None),
        StageOutcome("other", 2.0, 0.25, batch, (StageOutcome("inner", 2.0, 0.25, batch),)),
    )
    trace.completed(batch, 0.5, None, None, stages=stages)
    whole, first, failed, refused, *nested = [written for _, written in file.kept]
    assert [(one["id"], one["parent_id"], one["model_name"]) for one in nested] == [
        (6, 1, "other"),
        (7, 6, "inner"),
    ]
    computes = [any(time["name"] == "COMPUTE_START" for time in one["timestamps"]) for one in nested]
    assert computes == [False, True]
    assert [
        (one["id"], one.get("parent_id"), one["model_name"]) for one in (whole, first, failed, refused)
    ] == [
        (1, None, "p"),
        (3, 1, "tokenize"),
        (4, 1, "encode"),
        (5, 1, "refused"),
    ]
    assert {(one["request_id"], one["model_version"]) for one in (whole, first, failed)} == {("seven", 3)}
    names = [
        {time["name"]: time["ns"] for time in one["timestamps"]} for one in (whole, first, failed, refused)
    ]
    end = names[0]["REQUEST_END"]
    assert "COMPUTE_START" not in names[0], "as in Triton, only the models of an ensemble compute"
    assert names[1] == {
        "REQUEST_START": 1_500_000_000,
        "QUEUE_START": 1_500_000_000,
        "COMPUTE_START": 2_250_000_000,
        "COMPUTE_INPUT_END": 2_500_000_000,
        "COMPUTE_OUTPUT_START": 3_000_000_000,
        "COMPUTE_END": 3_125_000_000,
        "REQUEST_END": 3_125_000_000,
    }
    assert names[2] == {"REQUEST_START": 3_125_000_000, "QUEUE_START": 3_125_000_000, "REQUEST_END": end}
    assert names[3] == {"REQUEST_START": end, "QUEUE_START": end, "REQUEST_END": end}


def test_a_request_that_did_not_run_has_no_compute_times() -> None:
    file = CollectingTraceFile()
    tracing = TritonTracing(file)
    tracing.change("", {"timestamps": True, "rate": 1})
    for _ in range(2):
        record = tracing.sample(model())
        assert record is not None
        traced(record, model(), "").completed(None, 0.0, None, None)
    names = [[time["name"] for time in record["timestamps"]] for _, record in file.kept]
    assert (
        names
        == [["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START", "QUEUE_START", "REQUEST_END"]] * 2
    )
    assert [record["id"] for _, record in file.kept] == [1, 2]


def test_concurrent_requests_are_counted_exactly_once(tracing: TritonTracing) -> None:
    tracing.change("", {"timestamps": True, "rate": 2, "count": 1000})
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.extend(sampled(tracing, 1000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1000
    assert not tracing.active


def test_the_source_is_enabled_only_while_requests_can_be_traced() -> None:
    desk = Tracer()
    tracing = TritonTracing(CollectingTraceFile(), desk)
    assert not desk.sources
    tracing.change("", {"timestamps": True, "rate": 1, "count": 1})
    assert list(desk.sources) == [tracing]
    tracing.change("", {"rate": 2})
    assert list(desk.sources) == [tracing]
    # Settings apply only to known models: a request for an unknown one is not counted.
    assert desk.begin(None, "", 0.0) is None
    assert [desk.begin(model(), "", 0.0) is not None for _ in range(2)] == [False, True]
    assert not desk.sources
