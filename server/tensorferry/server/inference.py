"""The inference service itself, transport-free: bytes and a deadline in, one completion out."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import grpc

from tensorferry.batcher import (
    Batcher,
    BatcherClosed,
    BatcherError,
    BatchInfo,
    ModelRowsError,
    Outcome,
    Request,
    Tensor,
)
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.caller import ANYONE, Caller
from tensorferry.server.codec import Wanted, decode, parse, place
from tensorferry.server.errors import (
    ModelFailedError,
    NotReadyError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from tensorferry.server.forms import Form, FormCache, unremembered
from tensorferry.server.models import ModelRegistry
from tensorferry.server.responses import Piece, id_field_of, stream_response
from tensorferry.server.shared_memory import Lease, Regions
from tensorferry.server.status import Status, code_of, status_of
from tensorferry.server.tracing import Trace, Tracing

_log = logging.getLogger("tensorferry.server")

# What a call brought along with its message: names in lower case, text or bytes (names in -bin).
Metadata = Sequence[tuple[str, str | bytes]]

# By which an operator finds a request's trace (W3C Trace Context).
_TRACE = "traceparent"


class Reply:
    """What became of one ModelInfer. Whoever sends the response builds it, by one of the methods."""

    __slots__ = ("_addressed", "_build", "request_id")

    @property
    def addressed(self) -> tuple[str, str]:
        """Name and version of the model that it is from, or as the request had them; "" for what is not known."""
        return self._addressed

    @property
    def waiting(self) -> Batcher | None:
        """The batcher that answered, if it now waits for `attend`."""
        return None

    @property
    def batch(self) -> BatchInfo | None:
        """The batch that the request was answered from; None if it was in none."""
        return None

    def __init__(
        self, request_id: str, build: Callable[[], Sequence[Piece]], addressed: tuple[str, str] = ("", "")
    ) -> None:
        self.request_id = request_id
        self._build = build
        self._addressed = addressed

    def pieces(self) -> Sequence[Piece]:
        """The serialised ModelInferResponse, in pieces; or what went wrong, raised."""
        return self._build()

    def message(self) -> bytes:
        """The serialised ModelInferResponse; or what went wrong, raised."""
        return b"".join(self.pieces())

    def stream_message(self) -> bytes:
        """The serialised ModelStreamInferResponse; or what went wrong, raised."""
        return b"".join(stream_response(self.pieces()))


def _failed(request_id: str, error: BaseException, addressed: tuple[str, str]) -> Reply:
    def build() -> Sequence[Piece]:
        raise error

    return Reply(request_id, build, addressed)


class Call:
    """One request in flight. `cancel` may be called at any time, from any thread, repeatedly."""

    __slots__ = ()

    def cancel(self) -> None:
        """Withdraws the request if it is not done; its completion is then called with the reason."""


# Of a request that was answered at once.
_OVER = Call()


class _Queued(Call, Reply):
    """A request that the batcher has, and the reply to it once there is an outcome: one object for all."""

    __slots__ = ("_complete", "_form", "_id_field", "_metadata", "_outcome", "_request")

    def __init__(
        self,
        form: Form,
        request_id: str,
        id_field: bytes,
        metadata: Metadata,
        complete: Callable[[Reply], None],
    ) -> None:
        self._form = form
        self.request_id = request_id
        self._id_field = id_field
        self._metadata = metadata
        self._complete = complete

    def enqueue(self, tensors: tuple[Tensor, ...], deadline: float, unattended: set[Batcher] | None) -> None:
        """Hands the request to its model's batcher, which may refuse it by an error."""
        form = self._form
        batcher = form.model.batcher
        self._request = form.request(tensors, self.completed, deadline, self.request_id)
        if unattended is None:
            batcher.enqueue(self._request)
        elif batcher.enqueue_quietly(self._request):
            unattended.add(batcher)

    def cancel(self) -> None:
        self._form.model.batcher.cancel(self._request)

    @property
    def addressed(self) -> tuple[str, str]:
        return self._form.model.name, self._form.model.version

    @property
    def waiting(self) -> Batcher | None:
        batcher = self._form.model.batcher
        return batcher if batcher.awaits_attendance else None

    @property
    def batch(self) -> BatchInfo | None:
        return self._outcome.batch

    def completed(self, outcome: Outcome) -> None:
        """What the batcher calls, once."""
        self._outcome = outcome
        if isinstance(outcome.error, (ModelFailedError, ModelRowsError)):
            trace = [str(value) for name, value in self._metadata if name == _TRACE]
            _log.warning(
                "model %s failed on request %r%s: %s",
                self._form.model.name,
                self.request_id,
                f" ({_TRACE} {trace[0]})" if trace else "",
                outcome.error.__cause__ or outcome.error,
            )
        exemplars = self._form.model.exemplars
        if exemplars is not None:
            for name, value in self._metadata:
                if name == _TRACE and outcome.batch is not None and outcome.error is None:
                    exemplars.note(value, _latency(self._request, outcome.batch))
        complete = self._complete
        # It knows the call's place in a stream, which knows this.
        del self._complete
        complete(self)

    def pieces(self) -> Sequence[Piece]:
        outcome = self._outcome
        if outcome.error is not None:
            raise outcome.error
        return self._form.response.pieces(self._id_field, outcome)


def _latency(request: Request, batch: BatchInfo) -> float:
    """From the arrival of a request until its answer was handed out, in seconds, as the batcher counts it."""
    arrived = request.parts[0] if request.parts else request
    return batch.ended + batch.output_time - arrived.arrival


def _traced(trace: Trace, complete: Callable[[Reply], None]) -> Callable[[Reply], None]:
    """A completion that ends the trace of a request, which is to be enqueued now, before the other hears of it."""
    queued = time.monotonic()

    def end(reply: Reply) -> None:
        # Whoever has the answer finds it traced.
        trace.end(queued, reply.batch)
        complete(reply)

    return end


class _Leased(_Queued):
    """One with tensors in shared memory: its outputs go there, and its regions are let go, before it is answered."""

    __slots__ = ("_lease", "_wanted")

    def __init__(
        self,
        form: Form,
        request_id: str,
        id_field: bytes,
        metadata: Metadata,
        complete: Callable[[Reply], None],
        lease: Lease,
        wanted: Wanted,
    ) -> None:
        super().__init__(form, request_id, id_field, metadata, complete)
        self._lease = lease
        self._wanted = wanted

    def completed(self, outcome: Outcome) -> None:
        if outcome.error is None:
            try:
                place(self._wanted, outcome)
            except Exception as error:
                outcome = outcome._replace(outputs=None, error=error)
        self._lease.release()
        super().completed(outcome)


class InferenceService:
    """Takes requests from a transport and hands each to its model's batcher. Thread-safe.

    With `triton_status_codes` errors have the codes that Triton gives them, wherever ours differ.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        *,
        regions: Regions | None = None,
        tracing: Tracing | None = None,
        triton_status_codes: bool = False,
    ) -> None:
        self._registry = registry
        self._regions = regions or Regions()
        self._tracing = tracing or Tracing()
        self._triton_status_codes = triton_status_codes
        self._forms = FormCache()
        self._draining = threading.Event()
        # Guards _refused; held for an addition, or a copy.
        self._refused_lock = threading.Lock()
        self._refused: Counter[grpc.StatusCode] = Counter()

    def begin_drain(self) -> None:
        """From now on every request is answered with NotReadyError; accepted ones go on."""
        self._draining.set()

    def models_changed(self) -> None:
        """Lets go of models that are not there any more."""
        self._forms.forget(self._registry.generation)

    @property
    def ready(self) -> bool:
        """True from when all that is served from the start is loaded until the server drains.

        A model that is loaded later, or fails to be, changes nothing: others go on.
        """
        return self._registry.serving and not self.draining

    @property
    def draining(self) -> bool:
        """Whether the server accepts no more requests."""
        return self._draining.is_set()

    @property
    def refused(self) -> Mapping[grpc.StatusCode, int]:
        """How many requests were answered with which code before they reached a model's queue, which counts its own."""
        with self._refused_lock:
            return dict(self._refused)

    def count_refused(self, code: grpc.StatusCode) -> None:
        """A request was refused before it reached a queue."""
        with self._refused_lock:
            self._refused[code] += 1

    def status_of(self, error: BaseException) -> Status:
        """What a client is told of an error that was raised by a reply, or of why its call is not admitted."""
        status = status_of(error, triton=self._triton_status_codes)
        if isinstance(error, (UnauthenticatedError, PermissionDeniedError)):
            # Here, where both transports bring them: `infer` never sees such a call.
            self.count_refused(status.code)
        return status

    def infer(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[Reply], None],
        metadata: Metadata = (),
        unattended: set[Batcher] | None = None,
        caller: Caller = ANYONE,
    ) -> Call:
        """Serves one ModelInferRequest; `complete` is called exactly once, perhaps before this returns.

        `deadline` is on the clock of `time.monotonic`, inf for none; `metadata` is that of the
        call, which is `caller`'s. Who gives `unattended` promises to `attend` to the batchers that are added to it, soon;
        and after responses are sent to those that then wait for it, by `Reply.waiting`.
        Never blocks, never raises for what the client sent: errors arrive in the reply.
        """
        now = time.monotonic()
        trace: Trace | None = None
        while True:
            # Before the look-ups: what they find may be stale by the time that it is remembered.
            generation = self._registry.generation
            request_id = ""
            lease: Lease | None = None
            addressed = ("", "")
            found = None
            try:
                found = self._forms.find(data, generation)
                if found is not None:
                    form, request_id, id_field, tensors = found
                else:
                    request = parse(data, pb.ModelInferRequest)
                    request_id, id_field = request.id, id_field_of(request.id)
                    addressed = request.model_name, request.model_version
                if self._draining.is_set():
                    raise NotReadyError(
                        "the server is shutting down and has stopped accepting new requests; retry elsewhere"
                    )
                if found is None:
                    model = self._registry.get(*addressed)
                    addressed = model.name, model.version
                    lease = Lease(self._regions)
                    decoded = decode(request, model.name, model.signature, model.batched, lease)
                    tensors = decoded.tensors
                    if lease:
                        form = unremembered(model, decoded)
                    else:
                        form = self._forms.add(data, request, model, decoded, generation)
                answer = complete
                if self._tracing.active or trace is not None:
                    trace = trace or self._tracing.sample(form.model, request_id, now)
                    if trace is not None:
                        trace.model = form.model
                        answer = _traced(trace, complete)
                if lease:
                    queued: _Queued = _Leased(
                        form, request_id, id_field, metadata, answer, lease, decoded.wanted
                    )
                else:
                    queued = _Queued(form, request_id, id_field, metadata, answer)
                queued.enqueue(tensors, min(deadline, now + form.timeout), unattended)
            except Exception as error:
                if lease is not None:
                    lease.release()
                if isinstance(error, BatcherClosed) and generation != self._registry.generation:
                    # Its model was replaced, or unloaded, since it was looked up: another may serve by now.
                    continue
                if trace is not None:
                    trace.end(time.monotonic(), None)
                if found is not None:
                    addressed = found[0].model.name, found[0].model.version
                if not isinstance(error, BatcherError):
                    self.count_refused(code_of(error, triton=self._triton_status_codes))
                complete(_failed(request_id, error, addressed))
                return _OVER
            return queued
