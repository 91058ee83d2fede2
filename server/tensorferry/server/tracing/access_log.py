"""The access log: a line for each request, as many a second as are allowed, written by a thread of its own.

A line costs as much as a small request, and the reader of the log may stop reading. So lines are counted before they
are made, and no request waits for one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.server.identity import ANONYMOUS
from tensorferry.server.models.registry import Model
from tensorferry.server.telemetry import logs
from tensorferry.server.telemetry.log_writer import BackgroundWriter
from tensorferry.server.telemetry.trace_context import TraceContext
from tensorferry.server.tracing.trace import RequestTrace

_log = logging.getLogger("tensorferry.access")
_errors = logging.getLogger("tensorferry.server")

# What became of a request that was accepted, by its error; what is not here failed.
_OUTCOMES = {
    "Cancelled": "cancelled",
    "DeadlineExceeded": "expired",
    "RunTimedOut": "expired",
    "Shed": "shed",
    "BatcherClosed": "abandoned",
}

# Lines that wait to be written, in seconds of all that are allowed.
_WAITING_SECONDS = 2


class _RateLimit:
    """So many lines in each second of the clock; how many were left out is for the next that is not."""

    __slots__ = ("_count", "_left_out", "_most", "_second")

    def __init__(self, most: int) -> None:
        self._most = most
        self._second = -1
        self._count = self._left_out = 0

    def take(self, now: float) -> int | None:
        """How many lines were left out since the last that was not; None if this one is to be, too."""
        second = int(now)
        if second != self._second:
            self._second, self._count = second, 0
        if self._count == self._most:
            self._left_out += 1
            return None
        self._count += 1
        left_out, self._left_out = self._left_out, 0
        return left_out

    def left_out(self, count: int) -> None:
        """So many lines that were taken could not be written after all."""
        self._left_out += count


class AccessLog:
    """Writes at most `most` lines a second about requests that were answered, and as many about others.

    Implements `Source`, and `Sink` for all requests alike. Thread-safe.
    """

    # What is logged is no span.
    context = None

    def __init__(self, most: int, backoff: RestartBackoff | None = None) -> None:
        # Guards both. Nothing is called while it is held, but for the queue, which has room or refuses.
        self._lock = threading.Lock()
        self._answered, self._others = _RateLimit(most), _RateLimit(most)
        self._writer: BackgroundWriter[tuple[RequestTrace, int]] = BackgroundWriter(
            "access-log", self._write, _failed, most=2 * most * _WAITING_SECONDS, backoff=backoff
        )

    def start(self) -> None:
        """Starts the writer."""
        self._writer.start()

    def stop(self, timeout: float) -> bool:
        """Whether all lines are written, for which it waits at most so long. Idempotent."""
        return self._writer.stop(timeout)

    def sample(self, model: Model | None, parent: TraceContext | None) -> AccessLog | None:
        """Every request, since nobody knows yet what becomes of it; where lines of this level are written."""
        return self if _log.isEnabledFor(logging.INFO) else None

    def completed(self, trace: RequestTrace) -> None:
        """There is more to come."""

    def ended(self, trace: RequestTrace) -> None:
        """Has a line written soon, if it is allowed. Never waits."""
        with self._lock:
            allowance = self._allowance(trace)
            left_out = allowance.take(time.monotonic())
            if left_out is None:
                return
            if not self._writer.put((trace, left_out)):
                allowance.left_out(left_out + 1)

    def _allowance(self, trace: RequestTrace) -> _RateLimit:
        return self._answered if trace.status is None else self._others

    def _write(self, items: Sequence[tuple[RequestTrace, int]]) -> None:
        for trace, left_out in items:
            fields = access_log_fields(trace)
            if left_out:
                fields["left_out"] = left_out
            _log.info("%s", _text(fields), extra=fields)


def _failed(fault: BaseException) -> None:
    _errors.error("the thread of the access log ended unexpectedly; lines are lost", exc_info=fault)


def access_log_fields(trace: RequestTrace) -> dict[str, Any]:
    """What a line tells of a request; what a client has chosen is cut to a bounded length."""
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
    return fields


def _text(fields: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={logs.quote(value) if name in _CHOSEN else value}" for name, value in fields.items()
    )


# What clients, or who names them, have chosen.
_CHOSEN = frozenset({"request_id", "model", "model_version", "caller"})
