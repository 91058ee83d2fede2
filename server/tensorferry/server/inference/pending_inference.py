"""Requests between their transport and the batcher: each is also the reply to itself, once it has an outcome."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorferry.batcher import Batcher, BatchInfo, ModelRowsError, Outcome, Request, Tensor
from tensorferry.server.errors import ModelFailedError
from tensorferry.server.identity import Metadata
from tensorferry.server.inference.codec import ResponseSpec, write_outputs
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.inference.request_templates import RequestTemplate
from tensorferry.server.inference.responses import Piece
from tensorferry.server.shapes.shared_axes import explain_axis_mismatch
from tensorferry.server.shared_memory.regions import RegionLease
from tensorferry.server.telemetry import logs
from tensorferry.server.telemetry.trace_context import TRACEPARENT
from tensorferry.server.tracing.trace import RequestTrace

_log = logging.getLogger("tensorferry.server")


class PendingInference(InferenceCall, InferenceReply):
    """A request that the batcher has, and the reply to it once there is an outcome: one object for all."""

    __slots__ = ("_complete", "_form", "_id_field", "outcome", "request")

    def __init__(
        self,
        form: RequestTemplate,
        request_id: str,
        id_field: bytes,
        metadata: Metadata,
        complete: Callable[[InferenceReply], None],
    ) -> None:
        self._form = form
        self.request_id = request_id
        self._id_field = id_field
        self._metadata = metadata
        self._complete = complete

    def enqueue(
        self, tensors: tuple[Tensor, ...], deadline: float, needs_run: set[Batcher] | None, client: str
    ) -> None:
        """Hands a client's request to its model's batcher, which may refuse it by an error."""
        form = self._form
        batcher = form.model.batcher
        self.request = form.request(tensors, self.completed, deadline, client, self.request_id)
        try:
            if needs_run is None:
                batcher.enqueue(self.request)
            elif batcher.enqueue_quietly(self.request):
                needs_run.add(batcher)
        except BaseException:
            # Refused: they would keep each other, and the call, alive.
            del self.request
            raise

    def answer_empty(self, tensors: tuple[Tensor, ...], deadline: float, outputs: Mapping[str, Any]) -> None:
        """Answers a request of no rows at once, unless the model's batcher refuses it by an error."""
        form = self._form
        self.request = form.request(tensors, self.completed, deadline, "", self.request_id)
        try:
            form.model.batcher.answer_empty(self.request, outputs)
        except BaseException:
            # Refused: they would keep each other, and the call, alive.
            del self.request
            raise

    def cancel(self) -> None:
        """See `InferenceCall`."""
        self._form.model.batcher.cancel(self.request)

    @property
    def addressed(self) -> tuple[str, str]:
        """See `InferenceReply`."""
        return self._form.model.name, self._form.model.version

    @property
    def needs_run(self) -> Batcher | None:
        """See `InferenceReply`."""
        batcher = self._form.model.batcher
        return batcher if batcher.awaits_attendance else None

    def completed(self, outcome: Outcome) -> None:
        """What the batcher calls, once."""
        if isinstance(outcome.error, (ModelFailedError, ModelRowsError)):
            form = self._form
            error = explain_axis_mismatch(outcome.error, form.signature, form.shapes)
            outcome = outcome._replace(error=error)
        self.outcome = outcome
        if isinstance(outcome.error, (ModelFailedError, ModelRowsError)):
            about = self.about()
            _log.warning(
                "model %s failed on request %s%s: %s",
                self._form.model.name,
                logs.quote(self.request_id),
                f" (trace {about['trace_id']})" if "trace_id" in about else "",
                outcome.error.__cause__ or outcome.error,
                extra=about,
            )
        exemplars = self._form.model.exemplars
        if exemplars is not None:
            for name, value in self._metadata:
                if name == TRACEPARENT and outcome.batch is not None and outcome.error is None:
                    exemplars.note(value, _latency(self.request, outcome.batch))
        complete = self._complete
        # It knows the call's place in a stream, which knows this.
        del self._complete
        complete(self)

    @property
    def nbytes(self) -> int:
        """See `InferenceReply`."""
        outputs = self.outcome.outputs
        return 0 if outputs is None else sum(map(_nbytes, outputs.values()))

    def replace_with_error(self, error: Exception) -> None:
        """See `InferenceReply`."""
        self.outcome = Outcome(error=error)

    def pieces(self) -> Sequence[Piece]:
        """See `InferenceReply`."""
        outcome = self.outcome
        if outcome.error is not None:
            raise outcome.error
        return self._form.response.pieces(self._id_field, outcome)


def _nbytes(array: Any) -> int:
    # Of strings, numpy counts the references.
    return sum(map(len, array.flat)) if array.dtype == object else int(array.nbytes)


def _latency(request: Request, batch: BatchInfo) -> float:
    """From the arrival of a request until its answer was handed out, in seconds, as the batcher counts it."""
    arrived = request.split_parts[0] if request.split_parts else request
    return batch.ended + batch.output_time - arrived.arrival


class SharedMemoryInference(PendingInference):
    """A request with tensors in shared memory. Its outputs are written there, and its regions released, before it is answered."""

    __slots__ = ("_lease", "_wanted")

    def __init__(
        self,
        form: RequestTemplate,
        request_id: str,
        id_field: bytes,
        metadata: Metadata,
        complete: Callable[[InferenceReply], None],
        lease: RegionLease,
        wanted: ResponseSpec,
    ) -> None:
        super().__init__(form, request_id, id_field, metadata, complete)
        self._lease = lease
        self._wanted = wanted

    def completed(self, outcome: Outcome) -> None:
        """See `PendingInference`."""
        if outcome.error is None:
            try:
                write_outputs(self._wanted, outcome)
            except Exception as error:
                outcome = outcome._replace(outputs=None, error=error)
        self._lease.release()
        super().completed(outcome)


class TracedReply(InferenceReply):
    """Another reply, of a request that is traced."""

    __slots__ = ("_reply", "trace")

    trace: RequestTrace

    def __init__(self, reply: InferenceReply, trace: RequestTrace) -> None:
        self.request_id = reply.request_id
        self._metadata = reply._metadata
        self._reply = reply
        self.trace = trace

    @property
    def addressed(self) -> tuple[str, str]:
        """See `InferenceReply`."""
        return self._reply.addressed

    @property
    def needs_run(self) -> Batcher | None:
        """See `InferenceReply`."""
        return self._reply.needs_run

    @property
    def nbytes(self) -> int:
        """See `InferenceReply`."""
        return self._reply.nbytes

    def replace_with_error(self, error: Exception) -> None:
        """See `InferenceReply`."""
        self._reply.replace_with_error(error)

    def pieces(self) -> Sequence[Piece]:
        """See `InferenceReply`."""
        return self._reply.pieces()

    def stream_message(self) -> bytes:
        """See `InferenceReply`."""
        self.trace.streamed = True
        return super().stream_message()


class TracedCall(InferenceCall):
    """Another call, of a request that is traced."""

    __slots__ = ("_call", "_trace")

    def __init__(self, call: InferenceCall, trace: RequestTrace) -> None:
        self._call = call
        self._trace = trace

    def cancel(self) -> None:
        """See `InferenceCall`."""
        self._call.cancel()

    def abandon(self) -> None:
        """See `InferenceCall`."""
        self._call.abandon()
        self._trace.abandoned()
