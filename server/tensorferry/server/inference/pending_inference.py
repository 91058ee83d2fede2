"""Requests that the batcher has. Each is its own call and, once it has an outcome, its own reply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tensorferry.batcher import BatchInfo, ModelRowsError, Outcome, Request
from tensorferry.server.errors import ModelFailedError, StepFailedError
from tensorferry.server.identity import Metadata
from tensorferry.server.inference.reply import InferenceCall, InferenceReply, Piece
from tensorferry.server.inference.requests.codec import write_outputs
from tensorferry.server.inference.requests.request_templates import Match
from tensorferry.server.inference.shared_memory.regions import RegionLease
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.observability.logs import logs
from tensorferry.server.observability.logs.log_format import EXCEPTION
from tensorferry.server.observability.logs.trace_context import TRACEPARENT, TraceContext
from tensorferry.server.observability.tracing.trace import RequestTrace
from tensorferry.server.runtime.axes import explain_axis_mismatch
from tensorferry.server.status import INTERNAL_ERROR, Status, mapped_status

if TYPE_CHECKING:
    from tensorferry.server.inference.suspects.crash_watch import WatchedRequest

_log = logging.getLogger("tensorferry.server")

# The arguments of `PendingInference`, for the classes that have more.
PendingArguments: TypeAlias = tuple[
    Match, float, str, Metadata, Callable[[Any], None], RequestTrace | None, object, object
]


class RequestOrigin(NamedTuple):
    """The `owner` of a batcher's request, and of its parts in a pipeline's stages; None if there is nothing to say.

    `watched` is the request for the process's page, None in a server of one process. `trace` is the request's span, None if
    it is not traced. `custom` are the parameters that only the model may know.
    """

    watched: WatchedRequest | None = None
    trace: TraceContext | None = None
    custom: Mapping[str, Any] = MappingProxyType({})


NO_ORIGIN = RequestOrigin()


class PendingInference(Request, InferenceCall, InferenceReply):
    """A request of a client: the batcher's `Request`, the transport's `InferenceCall`, and at the end its `InferenceReply`.

    One object is all three, because each object more costs time for every request. The batcher calls `completed`, which sets
    `outcome` and calls the transport's completion with this object. The object refers to that completion only until then,
    because the completion may refer to the object.
    """

    __slots__ = ("_finish", "_id_field", "_template", "metadata", "outcome", "request_id", "trace")

    def __init__(
        self,
        match: Match,
        deadline: float,
        client: str,
        metadata: Metadata,
        finish: Callable[[Any], None],
        trace: RequestTrace | None = None,
        owner: object = None,
        stream: object = None,
    ) -> None:
        template, self.request_id, self._id_field, tensors, sequence = match
        if sequence is not None:
            sequence = sequence._replace(owner=client, stream=stream)
        super().__init__(
            tensors,
            self.completed,
            names=template.names,
            rows=template.rows,
            nbytes=template.nbytes,
            key=template.key,
            deadline=deadline,
            priority=template.priority,
            padding=template.padding,
            max_queue_time=template.max_queue_time,
            tag=self.request_id,
            client=client,
            shared=template.shared,
            owner=owner,
            sequence=sequence,
        )
        self._template = template
        self.metadata = metadata
        self._finish = finish
        self.trace = trace

    def discard(self) -> None:
        """Release a request that the batcher did not accept: `complete` is its own method."""
        del self.complete

    def cancel(self) -> None:
        """See `InferenceCall`."""
        self._template.model.cancel(self)

    def abandon(self) -> None:
        """See `InferenceCall`."""
        self.cancel()
        if self.trace is not None:
            self.trace.abandoned()

    @property
    def addressed(self) -> tuple[str, str]:
        """See `InferenceReply`."""
        return self._template.model.name, self._template.model.version

    def completed(self, outcome: Outcome) -> None:
        """Take the outcome and call the completion. The batcher calls this once."""
        template = self._template
        outcome = self._for_client(outcome)
        failure = outcome.error
        if isinstance(failure, (ModelFailedError, ModelRowsError)):
            error = explain_axis_mismatch(failure, template.signature, template.shapes)
            outcome = outcome._replace(error=error)
            if error is failure or isinstance(failure, StepFailedError):
                self._log_failure(failure)
        self.outcome = outcome
        exemplars = template.model.exemplars
        if exemplars is not None:
            for name, value in self.metadata:
                if name == TRACEPARENT and outcome.batch is not None and outcome.error is None:
                    exemplars.record(value, _latency(self, outcome.batch))
        finish = self._finish
        del self._finish
        finish(self)

    def _for_client(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the outputs as clients expect them, or with an error."""
        outputs, axes = outcome.outputs, self._template.batch_axes
        if outputs is None:
            return outcome
        try:
            for output in outputs.values():
                if type(output) is not np.ndarray:
                    # Rows of different lengths are padded to the longest.
                    outputs = {name: np.asarray(each) for name, each in outputs.items()}
                    break
            if axes:
                outputs = {
                    name: np.moveaxis(array, 0, axes[name]) if name in axes else array
                    for name, array in outputs.items()
                }
        except Exception as error:
            return outcome._replace(outputs=None, error=error)
        return outcome if outputs is outcome.outputs else outcome._replace(outputs=outputs)

    def _log_failure(self, failure: ModelFailedError | ModelRowsError) -> None:
        """Log why the model failed; the client gets less."""
        fields = dict(self.log_fields())
        trace = f" (trace {fields['trace_id']})" if "trace_id" in fields else ""
        reason: object = failure.__cause__ or failure
        if isinstance(failure, StepFailedError):
            reason = failure.reason
            if failure.details:
                fields[EXCEPTION] = failure.details
        _log.warning(
            "model %s failed on %s%s: %s",
            self._template.model.name,
            f"request {logs.quote(self.request_id)}" if self.request_id else "a request without an id",
            trace,
            reason,
            extra=fields,
        )

    @property
    def output_bytes(self) -> int:
        """See `InferenceReply`."""
        nbytes = 0
        for array in (self.outcome.outputs or {}).values():
            # numpy's nbytes of an object array counts references only.
            nbytes += _string_bytes(array) if array.dtype == object else array.nbytes
        return nbytes

    def replace_with_error(self, error: Exception) -> None:
        """See `InferenceReply`."""
        self.outcome = Outcome(error=error)

    def pieces(self) -> Sequence[Piece]:
        """See `InferenceReply`."""
        outcome = self.outcome
        if outcome.error is not None:
            raise outcome.error
        return self._template.response.pieces(self._id_field, outcome)


def _string_bytes(array: Any) -> int:
    try:
        return sum(map(len, array.flat))
    except TypeError:
        # An element is no string, which the response's encoding reports.
        return 0


def _latency(request: Request, batch: BatchInfo) -> float:
    """Return the seconds from the request's arrival to its answer, as the batcher counts them."""
    arrived = request.split_parts[0] if request.split_parts else request
    return batch.ended + batch.output_time - arrived.arrival


class SharedMemoryInference(PendingInference):
    """A request with tensors in shared memory.

    Its outputs are written and its regions released before the completion is called.
    """

    __slots__ = ("_lease",)

    def __init__(self, lease: RegionLease, *request: *PendingArguments) -> None:
        super().__init__(*request)
        self._lease = lease

    def _for_client(self, outcome: Outcome) -> Outcome:
        outcome = super()._for_client(outcome)
        if outcome.error is None:
            try:
                write_outputs(self._template.response.spec, outcome)
            except Exception as error:
                outcome = outcome._replace(outputs=None, error=error)
        self._lease.release()
        return outcome


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
