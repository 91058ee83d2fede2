"""Calls of other models by functions: requests to their batchers, without messages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy.typing as npt

from tensorferry.batcher import BatcherClosed, DeadlineExceeded, OutOfMemory, Request, StatefulBatcher
from tensorferry.batcher.submitter import completion_of
from tensorferry.server.errors import InvalidRequestError, LimitError, StepFailedError
from tensorferry.server.identity import ANONYMOUS, ClientIdentity
from tensorferry.server.inference.calls.array_requests import request_of_arrays
from tensorferry.server.inference.calls.call_graph import CallGraph
from tensorferry.server.inference.pending_inference import (
    NO_ORIGIN,
    PendingInference,
    RequestOrigin,
    metadata_of,
    traced_completion,
    traced_status,
)
from tensorferry.server.inference.requests.request_templates import (
    outputs_without_run,
    uncached_template,
)
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.observability.logs.trace_context import TraceContext
from tensorferry.server.observability.tracing.trace import RequestTrace, Tracer
from tensorferry.server.python.functions.call import RequestFacts, facts_of_requests
from tensorferry.server.status import INTERNAL_ERROR, StatusCode, mapped_status
from tensorferry.serving import InvalidInput, calls_through

_log = logging.getLogger("tensorferry.server")


class ModelCalls:
    """Lets the functions of models call other models. Thread-safe.

    A call is a request of its own to the other model's batcher, made for all requests of the batch that the calling function
    runs. Its deadline is the latest of theirs that are still wanted. Its client, priority and id are those of the first one.
    Its span is below that of the first one that is traced.
    """

    def __init__(self, registry: ModelRegistry, tracer: Tracer, *, triton_status_codes: bool = False) -> None:
        self.registry = registry
        self.tracer = tracer
        self.triton_status_codes = triton_status_codes
        self.graph = CallGraph(registry)

    def of_batch(self, model: str, requests: Sequence[Request]) -> AbstractContextManager[None]:
        """Let functions of this model call others in this thread, for these requests, within the block.

        Calls that have no answer at the end of the block are cancelled.
        """
        return _CallsOfBatch(self, model, requests)


class _CallsOfBatch(AbstractContextManager[None]):
    """`ModelCaller` for one run of a batch, which is the block of this context. Thread-safe."""

    def __init__(self, calls: ModelCalls, caller: str, requests: Sequence[Request]) -> None:
        self._calls = calls
        self._caller = caller
        self._requests = requests
        # Guards _over and additions to _open.
        self._lock = threading.Lock()
        self._over = False
        self._open: set[Future[dict[str, Any]]] = set()
        self._through = calls_through(self)

    def __enter__(self) -> None:
        self._through.__enter__()
        self._facts = facts_of_requests.set(self._facts_of_requests)

    def __exit__(self, *error: Any) -> None:
        facts_of_requests.reset(self._facts)
        self._through.__exit__(*error)
        with self._lock:
            self._over = True
        for future in tuple(self._open):
            future.cancel()
        # A thread of the function may keep this object.
        self._requests = ()

    def _facts_of_requests(self) -> Sequence[RequestFacts]:
        return [RequestFacts(_id_of(each), (each.owner or NO_ORIGIN).custom) for each in self._requests]

    def submit(
        self, model: str, version: str, inputs: Mapping[str, npt.ArrayLike], timeout: float | None
    ) -> Future[dict[str, Any]]:
        """See `ModelCaller`. RuntimeError after the end of the run."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._over:
                raise RuntimeError(
                    f"{model!r} was called after the function had returned; wait for calls in it"
                )
            self._open.add(future)
        future.add_done_callback(self._open.discard)
        try:
            called = self._enqueue(model, version, inputs, timeout, future)
        except Exception as error:
            # False if the run has ended meanwhile, which cancelled it.
            if future.set_running_or_notify_cancel():
                future.set_exception(_error_of_call(error, self._caller, model))
        else:
            # Only now, because a rejected request and its future would keep each other, and the arrays, alive.
            future.add_done_callback(lambda done: called.cancel() if done.cancelled() else None)
        return future

    def _enqueue(
        self,
        name: str,
        version: str,
        inputs: Mapping[str, npt.ArrayLike],
        timeout: float | None,
        future: Future[dict[str, Any]],
    ) -> PendingInference:
        registry = self._calls.registry
        # Read once, because another thread may end the run.
        requests = self._requests
        now = time.monotonic()
        deadline = self._deadline(requests, name, now)
        if timeout is not None:
            deadline = min(deadline, now + timeout)
        while True:
            # Read before the look-up, because the model may be replaced after it.
            generation = registry.generation
            model = registry.get(name, version)
            try:
                return self._enqueue_for(model, requests, inputs, deadline, now, future)
            except BatcherClosed:
                if generation == registry.generation:
                    raise

    def _deadline(self, requests: Sequence[Request], name: str, now: float) -> float:
        deadlines = [request.deadline for request in requests if request.is_wanted(now)]
        if not deadlines:
            raise DeadlineExceeded(
                f"the deadline passed, or the caller cancelled, before model {self._caller!r} called model {name!r}"
            )
        return max(deadlines)

    def _enqueue_for(
        self,
        model: Model,
        requests: Sequence[Request],
        inputs: Mapping[str, npt.ArrayLike],
        deadline: float,
        now: float,
        future: Future[dict[str, Any]],
    ) -> PendingInference:
        """Enqueue the request in a model's batcher, or answer it if it has no rows."""
        first, graph = requests[0], self._calls.graph
        triton = self._calls.triton_status_codes
        if model.streams:
            raise InvalidRequestError(
                f"model {model.name!r} answers in streams, so a function cannot call it; let it return its outputs"
            )
        if isinstance(model.batcher, StatefulBatcher):
            raise InvalidRequestError(
                f"model {model.name!r} keeps states of sequences, and a call of a function has no sequence; let clients call it"
            )
        graph.begin(self._caller, model.name)
        pending: PendingInference | None = None
        trace: RequestTrace | None = None
        try:
            decoded = request_of_arrays(inputs, model, first.priority)
            empty = outputs_without_run(model, decoded)
            template = uncached_template(model, decoded)
            finish: Callable[[Any], None] = partial(self._completed, model.name, future)
            trace = self._begin_trace(model, requests, now)
            if trace is not None:
                finish = traced_completion(trace, finish, model, triton=triton)
            pending = PendingInference(
                (template, _id_of(first), b"", decoded.tensors, template.sequence),
                min(deadline, now + template.timeout),
                first.client,
                () if trace is None else metadata_of(trace),
                finish,
                trace,
                None if trace is None else RequestOrigin(trace=trace.context),
            )
            if empty is None:
                model.batcher.enqueue(pending)
            else:
                model.batcher.answer_without_run(pending, empty)
        except BaseException as error:
            graph.end(self._caller, model.name)
            if pending is not None:
                pending.discard()
            if trace is not None:
                trace.completed(None, 0.0, error, traced_status(error, triton=triton))
                trace.sent()
            raise
        return pending

    def _begin_trace(self, model: Model, requests: Sequence[Request], now: float) -> RequestTrace | None:
        if not self._calls.tracer.sources:
            return None
        parent = next((span for request in requests if (span := _span_of(request)) is not None), None)
        if parent is None:
            return None
        first = requests[0]
        client = ClientIdentity(first.client, frozenset()) if first.client else ANONYMOUS
        return self._calls.tracer.begin(model, _id_of(first), now, parent, client, called_by=self._caller)

    def _completed(self, name: str, future: Future[dict[str, Any]], pending: PendingInference) -> None:
        """Take the outcome of a call. Runs on a thread of the called model's batcher, or the one that cancels."""
        self._calls.graph.end(self._caller, name)
        outcome = pending.outcome
        if outcome.error is not None:
            error = _error_of_call(outcome.error, self._caller, name)
            # As in `status_of`: the frames hold the batch with this request, which holds the error.
            outcome.error.__traceback__ = outcome.error.__context__ = None
            outcome = outcome._replace(error=error)
        completion_of(future, one_row=False)(outcome)
        if pending.trace is not None:
            pending.trace.sent()


def _id_of(request: Request) -> str:
    return request.tag if isinstance(request.tag, str) else ""


def _span_of(request: Request) -> TraceContext | None:
    origin: RequestOrigin | None = request.owner
    return None if origin is None else origin.trace


def _error_of_call(error: BaseException, caller: str, called: str) -> BaseException:
    """Return the exception that a function gets for a call.

    If the function does not catch it, its own requests get the same status. What would say something about the calling
    model's own instance or memory gets another type of that status.
    """
    if isinstance(error, RecursionError):
        return error
    status = mapped_status(error)
    if status is None:
        _log.error("unexpected error in a call of model %s by model %s", called, caller, exc_info=error)
        status = INTERNAL_ERROR
    if status.code is StatusCode.INVALID_ARGUMENT:
        return InvalidInput(str(error))
    if status.code is StatusCode.INTERNAL:
        failure = f"model {caller!r} called model {called!r}, which failed: {status.message}"
        return StepFailedError(failure, failure)
    if isinstance(error, OutOfMemory):
        return LimitError(f"model {caller!r} called model {called!r}: {error}")
    return error
