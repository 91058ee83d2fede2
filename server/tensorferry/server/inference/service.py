"""The inference service itself, transport-free: bytes and a deadline in, one completion out."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from tensorferry.batcher import (
    Batcher,
    BatcherClosed,
    BatcherError,
)
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import TensorError
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import (
    InvalidRequestError,
    NotReadyError,
    PermissionDeniedError,
    ServerError,
    UnauthenticatedError,
)
from tensorferry.server.identity import ANONYMOUS, ClientIdentity, Metadata
from tensorferry.server.inference.codec import decode_request
from tensorferry.server.inference.early_rejection import EarlyRejection
from tensorferry.server.inference.pending_inference import (
    PendingInference,
    SharedMemoryInference,
    TracedCall,
    TracedReply,
)
from tensorferry.server.inference.reply import FINISHED, InferenceCall, InferenceReply, error_reply
from tensorferry.server.inference.request_limits import DEFAULT
from tensorferry.server.inference.request_templates import (
    RequestTemplate,
    RequestTemplateCache,
    uncached_template,
)
from tensorferry.server.inference.response_size import check_response_size
from tensorferry.server.inference.responses import id_field_of
from tensorferry.server.models.registry import ModelRegistry
from tensorferry.server.shapes.no_rows import empty_outputs
from tensorferry.server.shared_memory.regions import RegionLease, Regions
from tensorferry.server.status import INTERNAL, Status, code_of, mapped_status, status_of
from tensorferry.server.telemetry.trace_context import TRACEPARENT
from tensorferry.server.tracing.trace import RequestTrace, Tracer
from tensorferry.server.wire import structure
from tensorferry.server.wire.compression import decompress, is_compressed
from tensorferry.server.wire.receiving import parse

_log = logging.getLogger("tensorferry.server")

SHUTTING_DOWN = "the server is shutting down and has stopped accepting new requests; retry elsewhere"


class InferenceService:
    """Takes requests from a transport and hands each to its model's batcher. Thread-safe.

    No request may hold more than `limits`. With `triton_status_codes` errors have the codes that Triton gives them, wherever ours differ.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        *,
        regions: Regions | None = None,
        tracing: Tracer | None = None,
        triton_status_codes: bool = False,
        limits: RequestLimits = DEFAULT,
    ) -> None:
        self.limits = limits
        self._registry = registry
        self._regions = regions or Regions()
        self._tracing = tracing or Tracer()
        self.early_rejection = EarlyRejection(registry, self._tracing)
        self._triton_status_codes = triton_status_codes
        self._forms = RequestTemplateCache(limits.message_bytes)
        self._draining = False
        # Guards _refused; held for an addition, or a copy.
        self._refused_lock = threading.Lock()
        self._refused: Counter[grpc.StatusCode] = Counter()
        self._lame_duck = threading.Event()

    def begin_lame_duck(self) -> None:
        """From now on the server says that it is not ready; requests are accepted all the same."""
        self._lame_duck.set()

    def begin_drain(self) -> None:
        """From now on every request is answered with NotReadyError; accepted ones go on."""
        self._lame_duck.set()
        self._draining = True

    def models_changed(self) -> None:
        """Lets go of models that are not there any more."""
        self._forms.forget(self._registry.generation)

    @property
    def ready(self) -> bool:
        """True from when all that is served from the start is loaded until the server drains, or is about to.

        A model that is loaded later, or fails to be, changes nothing while another works.
        """
        return self._registry.serving and not self.lame_duck

    @property
    def draining(self) -> bool:
        """Whether the server accepts no more requests."""
        return self._draining

    @property
    def lame_duck(self) -> bool:
        """Whether requests should go elsewhere: the server accepts no more of them, or soon will not."""
        return self._lame_duck.is_set()

    @property
    def refused(self) -> Mapping[grpc.StatusCode, int]:
        """How many requests were answered with which code before they reached a model's queue, which counts its own."""
        with self._refused_lock:
            return dict(self._refused)

    def count_refused(self, code: grpc.StatusCode) -> None:
        """A request was refused before it reached a queue."""
        with self._refused_lock:
            self._refused[code] += 1

    def status_of(self, error: BaseException, reply: InferenceReply | None = None) -> Status:
        """What a client is told of an error that was raised by a reply, or of why its call is not admitted."""
        status = status_of(
            error, triton=self._triton_status_codes, about=dict if reply is None else reply.about
        )
        if isinstance(error, (UnauthenticatedError, PermissionDeniedError)):
            # Here, where both transports bring them: `submit` never sees such a call.
            self.count_refused(status.code)
        return status

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata = (),
        needs_run: set[Batcher] | None = None,
        caller: ClientIdentity = ANONYMOUS,
    ) -> InferenceCall:
        """Serves one ModelInferRequest; `complete` is called exactly once, perhaps before this returns.

        `deadline` is on the clock of `time.monotonic`, inf for none; `metadata` is that of the
        call, which is `caller`'s. Who gives `needs_run` promises to `attend` to the batchers that are added to it, soon;
        and after responses are sent to those that then wait for it, by `InferenceReply.waiting`.
        Never blocks, never raises for what the client sent: errors arrive in the reply.
        """
        now = time.monotonic()
        trace: RequestTrace | None = None
        answer: Callable[[InferenceReply], None] | None = None
        while True:
            # Before the look-ups: what they find may be stale by the time that it is remembered.
            generation = self._registry.generation
            request_id = ""
            lease: RegionLease | None = None
            addressed = ("", "")
            found = empty = None
            try:
                found = self._forms.find(data, generation)
                if found is None and is_compressed(data):
                    data = decompress(data, self.limits.message_bytes)
                    found = self._forms.find(data, generation)
                if found is not None:
                    form, request_id, id_field, tensors = found
                else:
                    try:
                        structure.check_message(data, pb.ModelInferRequest, most_strings=self.limits.strings)
                    except InvalidRequestError:
                        request_id = structure.peek_request_id(data)
                        raise
                    request = parse(data, pb.ModelInferRequest)
                    request_id, id_field = request.id, id_field_of(request.id)
                    addressed = request.model_name, request.model_version
                if self._draining:
                    raise NotReadyError(SHUTTING_DOWN)
                if found is None:
                    model = self._registry.get(*addressed)
                    addressed = model.name, model.version
                    lease = RegionLease(self._regions)
                    decoded = decode_request(
                        request, model.name, model.signature, model.batched, lease, self.limits
                    )
                    tensors = decoded.tensors
                    check_response_size(decoded.signature, model.batched, decoded, self.limits.message_bytes)
                    if model.batched and not decoded.rows:
                        empty = empty_outputs(model.name, decoded.signature, decoded.wanted.outputs, tensors)
                    else:
                        model.empty_axes.check(model.name, decoded.signature, tensors)
                    if lease or empty is not None:
                        form = uncached_template(model, decoded, self.limits.message_bytes)
                    else:
                        form = self._forms.add(data, request, model, decoded, generation)
                answer = complete
                if self._tracing.sources or trace is not None:
                    trace = trace or self._tracing.begin(form.model, request_id, now, metadata, caller)
                    if trace is not None:
                        answer, metadata = self._traced(trace, complete, form), _metadata_of(trace)
                if lease:
                    queued: PendingInference = SharedMemoryInference(
                        form, request_id, id_field, metadata, answer, lease, decoded.wanted
                    )
                else:
                    queued = PendingInference(form, request_id, id_field, metadata, answer)
                if empty is not None:
                    queued.answer_empty(tensors, min(deadline, now + form.timeout), empty)
                else:
                    queued.enqueue(tensors, min(deadline, now + form.timeout), needs_run, caller.name)
            except Exception as error:
                if lease is not None:
                    lease.release()
                if isinstance(error, BatcherClosed) and generation != self._registry.generation:
                    # Its model was replaced, or unloaded, since it was looked up: another may serve by now.
                    continue
                if isinstance(error, (ServerError, BatcherError, TensorError)):
                    # Its traceback knows this frame, and those that called: a reply that is never sent would keep its
                    # call alive.
                    error.__traceback__ = error.__context__ = None
                if found is not None:
                    addressed = found[0].model.name, found[0].model.version
                if not isinstance(error, BatcherError):
                    self.count_refused(code_of(error, triton=self._triton_status_codes))
                if answer is None and self._tracing.sources:
                    # It was not asked yet, whether the request is to be traced.
                    trace = self._tracing.begin(None, request_id, now, metadata, caller)
                reply = error_reply(request_id, error, addressed, metadata)
                if trace is None:
                    complete(reply)
                    return FINISHED
                if not trace.addressed[1]:
                    # Else it is the model that was to serve it, and has gone since.
                    trace.addressed = addressed
                trace.completed(None, 0.0, error, self._known_status_of(error))
                complete(TracedReply(reply, trace))
                return TracedCall(FINISHED, trace)
            return queued if trace is None else TracedCall(queued, trace)

    def _traced(
        self, trace: RequestTrace, complete: Callable[[InferenceReply], None], form: RequestTemplate
    ) -> Callable[[Any], None]:
        """A completion for a request that is to be enqueued now: its trace has the outcome before the other hears of it."""
        trace.enqueued(form.model)

        def completed(queued: PendingInference) -> None:
            outcome, error = queued.outcome, queued.outcome.error
            trace.accepted, trace.rows = True, queued.request.rows
            trace.completed(
                outcome.batch,
                outcome.queue_delay,
                error,
                None if error is None else self._known_status_of(error),
            )
            complete(TracedReply(queued, trace))

        return completed

    def _known_status_of(self, error: BaseException) -> Status:
        return mapped_status(error, triton=self._triton_status_codes) or INTERNAL


def _metadata_of(trace: RequestTrace) -> Metadata:
    """What is left of a traced request's metadata: the span that lines of the log are to name."""
    return () if trace.context is None else ((TRACEPARENT, trace.context.traceparent),)
