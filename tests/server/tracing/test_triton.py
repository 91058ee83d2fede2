"""Which requests are traced: Triton's rules of a model's settings and the server's, of rate and count."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest
from support.server.rig import signature, spec

from tensorferry.batcher import BatchInfo
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.models.registry import Model
from tensorferry.server.tracing.trace import RequestTrace, Tracer
from tensorferry.server.tracing.triton import TraceOptions, TritonTraceRecord, TritonTracing
from tensorferry.server.tracing.triton_file import TraceFile


class Kept(TraceFile):
    """Keeps traces instead of writing them."""

    def __init__(self) -> None:
        super().__init__(Path("traces.json"))
        self.kept: list[tuple[Any, Any]] = []

    def write(self, sheet: Any, trace: Any) -> None:
        self.kept.append((sheet, trace))


def model(name: str = "m", version: str = "1") -> Model:
    return Model(name, version, signature(spec("x", "FP32", "batch")), 8, "batched", cast(Any, None))


def sampled(tracing: TritonTracing, count: int, name: str = "m") -> list[int]:
    """Of so many requests, counted from 1, those that are traced."""
    return [at for at in range(1, count + 1) if tracing.sample(model(name)) is not None]


def traced(record: TritonTraceRecord, of: Model, request_id: str) -> RequestTrace:
    """A request that arrived at 1 and was queued at 1.5."""
    trace = RequestTrace([record], request_id, 1.0)
    trace.enqueued(of)
    trace.queued = 1.5
    return trace


@pytest.fixture
def tracing() -> TritonTracing:
    return TritonTracing(Kept())


def test_nothing_is_traced_until_it_is_switched_on(tracing: TritonTracing) -> None:
    assert tracing.options("") == tracing.options("m") == TraceOptions(False, 1000, -1, 0)
    assert not tracing.active
    assert sampled(tracing, 3000) == []
    tracing.change("", {"timestamps": True})
    assert tracing.active
    assert sampled(tracing, 3000) == [1000, 2000, 3000]


def test_every_so_many_th_and_so_many_of_them(tracing: TritonTracing) -> None:
    tracing.change("", {"timestamps": True, "rate": 3, "count": 2})
    assert sampled(tracing, 5) == [3]
    assert tracing.options("").count == 1
    assert tracing.active
    assert sampled(tracing, 5) == [1]
    # Nothing is left, and requests no more asked of it.
    assert tracing.options("").count == 0
    assert not tracing.active
    assert sampled(tracing, 5) == []
    # A change counts requests anew.
    tracing.change("", {"count": 1})
    assert tracing.active
    assert sampled(tracing, 5) == [3]


def test_a_models_own_values_and_the_servers_for_the_rest(tracing: TritonTracing) -> None:
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
    # It has nothing of its own any more, so it counts with the others.
    tracing.change("", {"timestamps": True})
    assert sampled(tracing, 3) == []
    assert sampled(tracing, 3, "other") == [2]


def test_a_model_can_be_off_while_others_are_traced(tracing: TritonTracing) -> None:
    tracing.change("", {"timestamps": True, "rate": 1})
    tracing.change("m", {"timestamps": False})
    assert sampled(tracing, 2) == []
    assert sampled(tracing, 2, "other") == [1, 2]
    assert tracing.active


def test_what_is_cleared_of_the_servers_is_as_at_the_start(tracing: TritonTracing) -> None:
    tracing.change("", {"timestamps": True, "rate": 1, "count": 9, "log_frequency": 3})
    tracing.change("", {"timestamps": None, "rate": None, "count": None})
    assert tracing.options("") == TraceOptions(log_frequency=3)
    assert not tracing.active


@pytest.mark.parametrize("name", ["", "m"])
def test_what_cannot_be_traced_by_is_refused_and_nothing_changed(tracing: TritonTracing, name: str) -> None:
    tracing.change("", {"timestamps": True, "rate": 4})
    tracing.change("m", {"count": 3})
    with pytest.raises(InvalidRequestError, match="invalid trace setting :sample rate must be non-zero"):
        tracing.change(name, {"rate": 0, "log_frequency": 5})
    assert tracing.options("") == TraceOptions(True, 4, -1, 0)
    assert tracing.options("m") == TraceOptions(True, 4, 3, 0)


def test_the_servers_change_is_refused_where_it_is_wrong_for_a_model(tracing: TritonTracing) -> None:
    tracing.change("", {"rate": 0})
    tracing.change("m", {"timestamps": True, "rate": 1})
    tracing.change("n", {"timestamps": False})
    with pytest.raises(InvalidRequestError, match="sample rate must be non-zero"):
        tracing.change("m", {"rate": None})
    with pytest.raises(InvalidRequestError, match="sample rate must be non-zero"):
        tracing.change("", {"timestamps": True})
    assert tracing.options("") == TraceOptions(rate=0)
    assert tracing.options("m") == TraceOptions(True, 1, -1, 0)


def test_without_a_file_there_is_nothing_to_switch_on() -> None:
    tracing = TritonTracing()
    tracing.change("", {"rate": 1})
    with pytest.raises(InvalidRequestError, match=r"trace file name is not given; .* by --trace-file"):
        tracing.change("", {"timestamps": True})
    assert (tracing.options(""), tracing.active, tracing.file) == (TraceOptions(rate=1), False, "")


def test_a_timeline_in_order() -> None:
    file = Kept()
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


def test_what_never_ran_has_no_compute_times() -> None:
    file = Kept()
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


def test_no_trace_is_lost_or_doubled_by_threads(tracing: TritonTracing) -> None:
    tracing.change("", {"timestamps": True, "rate": 2, "count": 1000})
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.extend(sampled(tracing, 1000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1000
    assert not tracing.active


def test_requests_are_asked_about_only_while_one_may_be_traced() -> None:
    desk = Tracer()
    tracing = TritonTracing(Kept(), desk)
    assert not desk.sources
    tracing.change("", {"timestamps": True, "rate": 1, "count": 1})
    assert list(desk.sources) == [tracing]
    tracing.change("", {"rate": 2})
    assert list(desk.sources) == [tracing]
    # Settings are of models that there are: a request that names none is not counted.
    assert desk.begin(None, "", 0.0) is None
    assert [desk.begin(model(), "", 0.0) is not None for _ in range(2)] == [False, True]
    assert not desk.sources
