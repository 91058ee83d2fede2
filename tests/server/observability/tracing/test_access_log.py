"""Access log: content of lines, and limits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support.server.rig import PATIENCE

from tensorferry.batcher import (
    BatchInfo,
    Cancelled,
    DeadlineExceeded,
    QueueFull,
    RunTimedOut,
    Shed,
    StageOutcome,
)
from tensorferry.server.errors import ModelFailedError
from tensorferry.server.identity import ClientIdentity
from tensorferry.server.observability.logs.trace_context import TraceContext
from tensorferry.server.observability.tracing.access_log import AccessLog, access_log_fields
from tensorferry.server.observability.tracing.trace import RequestTrace
from tensorferry.server.status import mapped_status

INFO = BatchInfo(7, 3, 5, compute_time=0.5)


class Lines(logging.Handler):
    """Handler that collects the lines of the access log. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("tensorferry.access"), Lines()
    logger.addHandler(handler)
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate


def ended(
    log: AccessLog | None = None,
    error: BaseException | None = None,
    *,
    accepted: bool = True,
    request_id: str = "r",
    **more: Any,
) -> RequestTrace:
    trace = RequestTrace([] if log is None else [log], request_id, 1.0, **more)
    trace.accepted = accepted
    trace.addressed = ("m", "2")
    status = None if error is None else mapped_status(error)
    trace.completed(INFO if error is None else None, 0.25, error, status)
    trace.sent()
    return trace


@pytest.mark.parametrize(
    ("error", "accepted", "outcome", "code"),
    [
        (None, True, "answered", "OK"),
        (Cancelled(""), True, "cancelled", "CANCELLED"),
        (DeadlineExceeded(""), True, "expired", "DEADLINE_EXCEEDED"),
        (DeadlineExceeded(""), False, "refused", "DEADLINE_EXCEEDED"),
        (RunTimedOut(""), True, "failed", "DEADLINE_EXCEEDED"),
        (Shed("", 1.0), True, "shed", "RESOURCE_EXHAUSTED"),
        (QueueFull("", 1.0), False, "refused", "RESOURCE_EXHAUSTED"),
        (ModelFailedError(""), True, "failed", "INTERNAL"),
    ],
)
def test_the_outcome_of_a_request_is_logged(
    error: BaseException | None, accepted: bool, outcome: str, code: str
) -> None:
    fields = access_log_fields(ended(error=error, accepted=accepted))
    assert (fields["outcome"], fields["code"]) == (outcome, code)


def test_a_line_names_client_request_and_batch() -> None:
    context = TraceContext("a" * 32, "b" * 16, True)
    trace = ended(context=context, caller=ClientIdentity("team", frozenset()))
    trace.rows, trace.sent_at = 2, 3.5
    assert access_log_fields(trace) == {
        "method": "ModelInfer",
        "request_id": "r",
        "model": "m",
        "model_version": "2",
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "outcome": "answered",
        "code": "OK",
        "duration_seconds": 2.5,
        "caller": "team",
        "rows": 2,
        "queue_seconds": 0.25,
        "batch": 7,
        "batch_requests": 3,
        "batch_rows": 5,
    }


def test_a_line_has_the_times_of_the_stages_of_a_pipeline() -> None:
    trace = ended()
    ran = BatchInfo(1, 1, 1, 0.5, input_time=0.25, output_time=0.125)
    trace.stages = (StageOutcome("clean+split", 1.0, 0.000399, ran), StageOutcome("encode", 2.0, 0.5, None))
    assert access_log_fields(trace)["stages"] == "clean+split:0.000399+0.875000,encode:0.500000"


def test_lines_per_second_are_limited_separately_for_errors(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AccessLog(2)
    log.start()
    now = [100.0]
    monkeypatch.setattr("tensorferry.server.observability.tracing.access_log.time.monotonic", lambda: now[0])
    for number in range(5):
        ended(log, request_id=f"good {number}")
    ended(log, Cancelled(""), request_id="bad")
    now[0] = 101.0
    ended(log, request_id="next")
    assert log.stop(PATIENCE)
    found: Any = [vars(record) for record in lines.kept]
    assert [line["request_id"] for line in found] == ["good 0", "good 1", "bad", "next"]
    assert [line.get("left_out") for line in found] == [None, None, None, 3]


def test_lines_below_the_log_level_are_not_formatted(lines: Lines) -> None:
    log = AccessLog(9)
    assert log.sample(None, None) is log
    logging.getLogger("tensorferry.access").setLevel(logging.WARNING)
    assert log.sample(None, None) is None
