"""The inference service, without a transport: bytes and a deadline in, one completion out."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tensorferry.batcher import AloneKey, BatcherClosed, BatcherError, QueueFull, StatefulBatcher
from tensorferry.protos.tensors import TensorError
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import (
    NotReadyError,
    PermissionDeniedError,
    ServerError,
    SuspectError,
    UnauthenticatedError,
)
from tensorferry.server.identity import ANONYMOUS, ClientIdentity, Metadata
from tensorferry.server.inference.pending_inference import (
    NO_ORIGIN,
    PendingInference,
    RequestOrigin,
    metadata_of,
    traced_completion,
    traced_status,
)
from tensorferry.server.inference.reply import (
    SHUTTING_DOWN,
    FinishedCall,
    InferenceCall,
    InferenceReply,
    InlineRunner,
    TakeAnswer,
    error_reply,
)
from tensorferry.server.inference.requests.input_contents import DEFAULT_LIMITS
from tensorferry.server.inference.requests.request_templates import Match, RequestTemplateCache
from tensorferry.server.inference.requests.unmatched_request import UnmatchedRequest
from tensorferry.server.inference.shared_memory.regions import Regions
from tensorferry.server.inference.streamed_inference import (
    StreamedInference,
    shared_memory_error,
    unary_call_error,
)
from tensorferry.server.inference.suspects.crash_watch import CrashWatch, WatchedRequest
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.observability.logs.trace_context import parse_trace_context
from tensorferry.server.observability.tracing.trace import RequestTrace, Tracer
from tensorferry.server.status import Status, StatusCode, code_of, status_of
from tensorferry.server.wire.receiving import decompress, is_compressed


class InferenceService:
    """Takes requests from a transport and hands each to its model's batcher. Thread-safe.

    A request above `limits` is refused. With `triton_status_codes` errors have Triton's codes where ours differ.
    `crash_watch` is that of one of several server processes.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        *,
        regions: Regions | None = None,
        tracing: Tracer | None = None,
        triton_status_codes: bool = False,
        limits: RequestLimits = DEFAULT_LIMITS,
        crash_watch: CrashWatch | None = None,
    ) -> None:
        self.limits = limits
        self._registry = registry
        self._regions = regions or Regions()
        self._tracer = tracing or Tracer()
        self._triton_status_codes = triton_status_codes
        self._templates = RequestTemplateCache(limits.message_bytes)
        self._crash_watch = crash_watch
        # Whether the server has stopped accepting requests, and whether clients should go elsewhere, because it soon will.
        self.draining = self.lame_duck = False
        # Guards _refused; held for an addition or a copy only.
        self._refused_lock = threading.Lock()
        self._refused: Counter[StatusCode] = Counter()

    def begin_lame_duck(self) -> None:
        """Report the server as not ready from now on. Requests are still accepted."""
        self.lame_duck = True

    def begin_drain(self) -> None:
        """Answer every further request with NotReadyError. Accepted requests continue."""
        self.lame_duck = True
        self.draining = True
        if self._crash_watch is not None:
            self._crash_watch.waiting.close()

    def end_stream(self, stream: object) -> None:
        """End the sequences of a stream that is over."""
        for model in (*self._registry.models(), *self._registry.retired):
            if isinstance(model.batcher, StatefulBatcher):
                model.batcher.end_stream(stream)

    def models_changed(self) -> None:
        """Release models that are no longer served."""
        self._templates.forget(self._registry.generation)

    @property
    def ready(self) -> bool:
        """Whether every model of the start is loaded and the server is neither lame duck nor draining.

        A model that is loaded later, or fails to load, changes nothing while another is served.
        """
        return self._registry.serving and not self.lame_duck

    @property
    def generation(self) -> int:
        """Number that increases when a model is loaded, replaced or unloaded."""
        return self._registry.generation

    @property
    def tracing_enabled(self) -> bool:
        """Whether calls are traced; rejected calls are then traced too."""
        return bool(self._tracer.sources)

    @property
    def one_model(self) -> bool:
        """Whether exactly one model is loaded, so that every call is for it."""
        return self._registry.only_model is not None

    def reject_early(self, deadline: float) -> QueueFull | None:
        """Return, and count, why a call with this deadline is rejected before its message is read; None if it is to be read.

        Reading is most of a rejected call's cost. It is read if the queue has room, if several models are loaded, because
        its model is unknown, and if calls are traced, because a trace needs the message.
        """
        model = self._registry.only_model
        if model is None or self._tracer.sources:
            return None
        return model.batcher.fast_reject(deadline)

    @property
    def refused(self) -> Mapping[StatusCode, int]:
        """Requests refused before they reached a model's queue, by status code. Queues count their own."""
        with self._refused_lock:
            return dict(self._refused)

    def count_refused(self, code: StatusCode) -> None:
        """Count a request that was refused before it reached a queue."""
        with self._refused_lock:
            self._refused[code] += 1

    def status_of(self, error: BaseException, reply: InferenceReply | None = None) -> Status:
        """Return the status of an error that a reply raised, or that kept a call from being admitted."""
        about = dict if reply is None else reply.log_fields
        status = status_of(error, triton=self._triton_status_codes, about=about)
        if isinstance(error, (UnauthenticatedError, PermissionDeniedError)):
            # Counted here, because `submit` never gets such a call.
            self.count_refused(status.code)
        return status

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata = (),
        caller: ClientIdentity = ANONYMOUS,
        *,
        stream: object = None,
        answers: TakeAnswer | None = None,
        run_soon: Callable[[InlineRunner], None] | None = None,
    ) -> InferenceCall:
        """Serve one serialised ModelInferRequest. Call `complete` exactly once, perhaps before this returns.

        `deadline` is on the clock of `time.monotonic`, inf for none.
        `metadata` and `caller` are those of the call. `stream` is any object that stands for the stream of the message, for
        which `end_stream` is called at its end; None for a message that came alone. `answers` takes what comes before the last
        reply, of a model that answers in streams; without it such a model is refused.
        A caller that runs short batches itself gives `run_soon`, which gets the batcher if its `run_inline` must be
        called soon; no worker is woken then. Never blocks, except to decompress the message; every error arrives in the reply.
        """
        now, latest = time.monotonic(), deadline
        trace: RequestTrace | None = None
        origin: RequestOrigin | None = None
        sampled = False
        while True:
            # Read before the look-ups, because a model may be replaced during them.
            generation = self._registry.generation
            match: Match | None = None
            unmatched: UnmatchedRequest | None = None
            pending: PendingInference | None = None
            watched: WatchedRequest | None = None
            try:
                # Templates are those of the models that serve.
                retired = self._registry.retired
                match = None if retired else self._templates.find(data, generation)
                if match is None:
                    message = data
                    if is_compressed(data):
                        message = decompress(data, self.limits.message_bytes)
                        match = None if retired else self._templates.find(message, generation)
                if match is None:
                    unmatched = UnmatchedRequest(message, self._regions, self.limits)
                    unmatched.parse()
                if self.draining:
                    raise NotReadyError(SHUTTING_DOWN)
                if match is None:
                    assert unmatched is not None
                    model = unmatched.model(self._registry, retired, caller.name, stream)
                    serves = all(model is not each for each in retired)
                    match = unmatched.match(model, self._templates if serves else None, generation)
                template = match[0]
                latest = min(deadline, now + template.timeout)
                finish: Callable[[Any], None] = complete
                if self._crash_watch is not None:
                    # Where clients are not identified, none may be refused for another.
                    watched = self._crash_watch.admit(match, "" if caller is ANONYMOUS else caller.name)
                    finish = watched.completion(complete)
                    origin = RequestOrigin(watched)
                    if watched.alone:
                        template = replace(template, key=AloneKey())
                        match = (template, *match[1:])
                if template.custom:
                    origin = (origin or NO_ORIGIN)._replace(custom=template.custom)
                sampled = True
                if self._tracer.sources or trace is not None:
                    parent = parse_trace_context(metadata)
                    trace = trace or self._tracer.begin(
                        template.model, match[1], now, parent, caller, streamed=stream is not None
                    )
                    if trace is not None:
                        finish = traced_completion(
                            trace, finish, template.model, triton=self._triton_status_codes
                        )
                        metadata = metadata_of(trace)
                        if trace.context is not None:
                            origin = (origin or NO_ORIGIN)._replace(trace=trace.context)
                if template.model.streams:
                    if answers is None:
                        raise unary_call_error(template.model.name)
                    if unmatched is not None and unmatched.lease:
                        raise shared_memory_error(template.model.name)
                    pending = StreamedInference(
                        answers, match, latest, caller.name, metadata, finish, trace, origin, stream
                    )
                elif unmatched is None:
                    pending = PendingInference(
                        match, latest, caller.name, metadata, finish, trace, origin, stream
                    )
                else:
                    pending = unmatched.pending(
                        match, latest, caller.name, metadata, finish, trace, origin, stream
                    )
                if unmatched is None or unmatched.empty_outputs is None:
                    model = template.model
                    if model.enqueue(pending, notify=run_soon is None) and run_soon is not None:
                        run_soon(model.batcher)
                else:
                    template.model.batcher.answer_without_run(pending, unmatched.empty_outputs)
                if unmatched is not None:
                    unmatched.accepted()
                return pending
            except Exception as error:
                if pending is not None:
                    pending.discard()
                if watched is not None:
                    watched.end()
                if unmatched is not None:
                    unmatched.lease.release()
                if isinstance(error, BatcherClosed) and generation != self._registry.generation:
                    # The model was replaced or unloaded since the look-up; another version may serve now.
                    continue
                request_id, addressed = _identity_of(match, unmatched)
                fail = partial(self._fail, complete, request_id, addressed, metadata)
                sequence = None if match is None else match[4]
                # One of a sequence is refused, because the next one would overtake it.
                waits = sequence is None or sequence.id is None
                if isinstance(error, SuspectError) and waits and self._crash_watch is not None:
                    again = partial(
                        self.submit,
                        *(data, latest, complete, metadata, caller),
                        stream=stream,
                        answers=answers,
                    )
                    waiting = self._crash_watch.waiting.put(again, fail, latest, error.until)
                    if waiting is not None:
                        return waiting
                if not sampled and self._tracer.sources:
                    parent = parse_trace_context(metadata)
                    trace = self._tracer.begin(
                        None, request_id, now, parent, caller, streamed=stream is not None
                    )
                fail(error, trace)
                return FinishedCall(trace)

    def _fail(
        self,
        complete: Callable[[InferenceReply], None],
        request_id: str,
        addressed: tuple[str, str],
        metadata: Metadata,
        error: Exception,
        trace: RequestTrace | None = None,
    ) -> None:
        """Count, trace and answer a request that no batcher accepted."""
        if isinstance(error, (ServerError, BatcherError, TensorError)):
            # The traceback refers to the caller's frames; a reply that is never sent would keep its call alive.
            error.__traceback__ = error.__context__ = None
        if not isinstance(error, BatcherError):
            self.count_refused(code_of(error, triton=self._triton_status_codes))
        if trace is not None:
            trace.set_model(addressed)
            status = traced_status(error, triton=self._triton_status_codes)
            trace.completed(None, 0.0, error, status)
        complete(error_reply(request_id, error, addressed, metadata, trace))


def _identity_of(match: Match | None, unmatched: UnmatchedRequest | None) -> tuple[str, tuple[str, str]]:
    """Return a failed request's id and its model's name and version, as far as they are known."""
    if unmatched is not None:
        return unmatched.request_id, unmatched.addressed
    if match is not None:
        model = match[0].model
        return match[1], (model.name, model.version)
    return "", ("", "")
