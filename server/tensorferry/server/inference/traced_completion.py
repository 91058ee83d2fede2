"""Completions of requests that are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorferry.server.identity import Metadata
from tensorferry.server.inference.pending_inference import PendingInference
from tensorferry.server.models.lifecycle.registry import Model
from tensorferry.server.observability.logs.trace_context import TRACEPARENT
from tensorferry.server.observability.tracing.trace import RequestTrace
from tensorferry.server.status import INTERNAL_ERROR, Status, mapped_status


def traced_completion(
    trace: RequestTrace, complete: Callable[[Any], None], model: Model, *, triton: bool
) -> Callable[[PendingInference], None]:
    """Return a completion that records the outcome in the trace, then calls `complete`."""
    trace.enqueued(model)

    def completed(pending: PendingInference) -> None:
        outcome, error = pending.outcome, pending.outcome.error
        status = None if error is None else traced_status(error, triton=triton)
        trace.completed(
            outcome.batch, outcome.queue_delay, error, status, rows=pending.rows, stages=outcome.stages
        )
        complete(pending)

    return completed


def traced_status(error: BaseException, *, triton: bool) -> Status:
    """Return the status of a request's error, for its trace."""
    return mapped_status(error, triton=triton) or INTERNAL_ERROR


def metadata_of(trace: RequestTrace) -> Metadata:
    """Return what a traced request needs of its metadata: the span that log lines name."""
    return () if trace.context is None else ((TRACEPARENT, trace.context.traceparent),)
