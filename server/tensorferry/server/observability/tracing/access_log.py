"""Access log: a line for each request, with a limit per second, written by a background thread.

A line costs as much as a small request, and the reader of the log may stop reading. So the limit is applied before a
line is formatted, and no request waits for a line.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from tensorferry.batcher import StageOutcome
from tensorferry.server.identity import ANONYMOUS
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.observability.logs import logs
from tensorferry.server.observability.logs.log_writer import BackgroundWriter
from tensorferry.server.observability.logs.trace_context import TraceContext
from tensorferry.server.observability.tracing.trace import RequestTrace

_log = logging.getLogger("tensorferry.access")

# Outcome of an accepted request by its error, as metrics name it. Other errors count as failed.
_OUTCOMES = {
    "Cancelled": "cancelled",
    "DeadlineExceeded": "expired",
    "Shed": "shed",
    "BatcherClosed": "abandoned",
}

# Size of the queue, in seconds of the allowed number of lines.
_QUEUE_SECONDS = 2


class _RateLimit:
    """Limit of lines per second of the clock, and a count of the lines that were left out."""

    __slots__ = ("_count", "_left_out", "_max_lines", "_second")

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._second = -1
        self._count = self._left_out = 0

    def take(self, now: float) -> int | None:
        """Permit a line and return the number left out since the last one; None if this one must be left out."""
        second = int(now)
        if second != self._second:
            self._second, self._count = second, 0
        if self._count == self._max_lines:
            self._left_out += 1
            return None
        self._count += 1
        left_out, self._left_out = self._left_out, 0
        return left_out

    def add_left_out(self, count: int) -> None:
        """Count permitted lines that could not be queued."""
        self._left_out += count


class AccessLog:
    """Log with at most `max_lines` lines per second for answered requests, and as many for others. Thread-safe.

    Implements `TraceSource`, and `TraceSink` for all requests.
    """

    # A log line is not a span.
    context = None
    # It has a line for each request of a client.
    traces_calls = False

    def __init__(self, max_lines: int) -> None:
        # Guards both limits. Only the queue's `put` is called while it is held, which never waits.
        self._lock = threading.Lock()
        self._answered, self._others = _RateLimit(max_lines), _RateLimit(max_lines)
        self._writer: BackgroundWriter[tuple[RequestTrace, int]] = BackgroundWriter(
            "access-log", self._write, max_items=2 * max_lines * _QUEUE_SECONDS
        )

    def start(self) -> None:
        """Start the writer."""
        self._writer.start()

    def stop(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for all lines to be written. Return whether they are. Idempotent."""
        return self._writer.stop(timeout)

    def sample(self, model: Model | None, parent: TraceContext | None) -> AccessLog | None:
        """Return this sink for every request, because its outcome is unknown; None if the log is switched off."""
        return self if _log.isEnabledFor(logging.INFO) else None

    def completed(self, trace: RequestTrace) -> None:
        """Do nothing: the line is written when the request has ended."""

    def ended(self, trace: RequestTrace) -> None:
        """Queue a line if the limit permits it. Never waits."""
        with self._lock:
            limit = self._answered if trace.status is None else self._others
            left_out = limit.take(time.monotonic())
            if left_out is None:
                return
            if not self._writer.put((trace, left_out)):
                limit.add_left_out(left_out + 1)

    def _write(self, items: Sequence[tuple[RequestTrace, int]]) -> None:
        for trace, left_out in items:
            fields = access_log_fields(trace)
            if left_out:
                fields["left_out"] = left_out
            _log.info("%s", _line_text(fields), extra=fields)


def access_log_fields(trace: RequestTrace) -> dict[str, Any]:
    """Return the fields of a request's line. Text of clients is cut to a bounded length."""
    outcome = "answered"
    if trace.error is not None:
        outcome = _OUTCOMES.get(trace.error.__name__, "failed") if trace.accepted else "refused"
    ended = trace.sent_at if trace.sent_at == trace.sent_at else trace.completed_at
    fields: dict[str, Any] = {
        "method": "ModelStreamInfer" if trace.streamed else "ModelInfer",
        **logs.request_fields(trace.request_id, trace.addressed, trace.context),
        "outcome": outcome,
        "code": "OK" if trace.status is None else trace.status.code.name,
        "duration_seconds": round(ended - trace.started, 6),
    }
    if trace.caller is not ANONYMOUS:
        fields["caller"] = trace.caller.name
    if trace.rows:
        fields["rows"] = trace.rows
    if trace.batch is not None:
        fields["queue_seconds"] = round(trace.queue_delay, 6)
        fields["batch"] = trace.batch.number
        fields["batch_requests"] = trace.batch.requests
        fields["batch_rows"] = trace.batch.rows
    if trace.stages:
        fields["stages"] = ",".join([_stage_text(stage) for stage in trace.stages])
    return fields


def _stage_text(stage: StageOutcome) -> str:
    """Return a stage's name, and the seconds in its queue and in its batch; only the former if it gave no outputs."""
    batch = stage.batch
    if batch is None:
        return f"{stage.stage}:{stage.queue_delay:.6f}"
    return f"{stage.stage}:{stage.queue_delay:.6f}+{batch.input_time + batch.compute_time + batch.output_time:.6f}"


def _line_text(fields: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={logs.quote(value) if name in _QUOTED else value}" for name, value in fields.items()
    )


# Fields with text of clients or operators, which are quoted.
_QUOTED = frozenset({"request_id", "model", "model_version", "caller"})
