"""What the inference service and the transports share: a call while a request is in flight, then a reply to send."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tensorferry.server.identity import Metadata
from tensorferry.server.observability.logs import logs
from tensorferry.server.observability.logs.trace_context import parse_trace_context

if TYPE_CHECKING:
    from tensorferry.server.observability.tracing.trace import RequestTrace

SHUTTING_DOWN = "the server is shutting down and has stopped accepting new requests; retry elsewhere"

# Seconds that a batch may take on a thread which serves all calls. Waking a worker takes about as long, and the two threads
# would contend for the GIL.
MAX_INLINE_SECONDS = 200e-6


class InlineRunner(Protocol):
    """A batcher or a pipeline that a thread which serves all calls must run soon."""

    def run_inline(self, max_seconds: float) -> float:
        """See `Batcher.run_inline`."""


class InferenceCall:
    """One request in flight. Both methods may be called at any time, from any thread, repeatedly."""

    __slots__ = ()

    def cancel(self) -> None:
        """Withdraw the request unless it is done; its completion then gets the reason."""

    def abandon(self) -> None:
        """Cancel the request and record in its trace that no response will be sent."""
        self.cancel()


class FinishedCall(InferenceCall):
    """The call of a request that was answered at once."""

    __slots__ = ("_trace",)

    def __init__(self, trace: RequestTrace | None) -> None:
        self._trace = trace

    def abandon(self) -> None:
        """See `InferenceCall`."""
        if self._trace is not None:
            self._trace.abandoned()


class LaterCall(InferenceCall):
    """The call of a request that is not submitted yet, and may be withdrawn before. Thread-safe."""

    __slots__ = ("_call", "_lock", "_withdraw")

    def __init__(self) -> None:
        # Guards the fields below. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._call: InferenceCall | None = None
        # How to withdraw the call once there is one; None unless the request was withdrawn.
        self._withdraw: Callable[[InferenceCall], None] | None = None

    @property
    def withdrawn(self) -> bool:
        """Whether the request was withdrawn."""
        with self._lock:
            return self._withdraw is not None

    def submitted(self, call: InferenceCall) -> None:
        """Set the call, and withdraw it if the request was withdrawn."""
        with self._lock:
            self._call, withdraw = call, self._withdraw
        if withdraw is not None:
            withdraw(call)

    def cancel(self) -> None:
        """See `InferenceCall`."""
        self._withdraw_by(lambda call: call.cancel())

    def abandon(self) -> None:
        """See `InferenceCall`."""
        self._withdraw_by(lambda call: call.abandon())

    def _withdraw_by(self, withdraw: Callable[[InferenceCall], None]) -> None:
        with self._lock:
            self._withdraw, call = withdraw, self._call
        if call is not None:
            withdraw(call)


# Takes an answer before the last reply. Returns why it cannot be kept, None if it is kept or no longer wanted.
TakeAnswer: TypeAlias = "Callable[[InferenceReply], Exception | None]"


# A piece of a serialised message: bytes, or a row-major array that stands for its bytes.
Piece = Any


class InferenceReply(ABC):
    """The outcome of one ModelInfer. The transport builds the response when it sends it.

    `request_id` and `metadata` are those of the request. The transport calls `sent` once the response is sent. If the reply
    is `silent`, there is no response to send. It is the `last` one to its request, unless the model answers in streams. Not
    thread-safe.
    """

    __slots__ = ()

    silent = False
    last = True

    request_id: str
    metadata: Metadata
    trace: RequestTrace | None

    @property
    @abstractmethod
    def addressed(self) -> tuple[str, str]:
        """Name and version of the model that answered, or as the request gave them; "" if unknown."""

    @property
    def output_bytes(self) -> int:
        """Bytes of the tensors that the reply holds."""
        return 0

    @abstractmethod
    def replace_with_error(self, error: Exception) -> None:
        """Drop the tensors and answer with this error. Must not be called while a message is built."""

    @abstractmethod
    def pieces(self) -> Sequence[Piece]:
        """Return the serialised ModelInferResponse in pieces, or raise the request's error."""

    def message(self) -> bytes:
        """Return the serialised ModelInferResponse, or raise the request's error."""
        return b"".join(self.pieces())

    def sent(self) -> None:
        """Record that the response was sent, or that none will be."""
        if self.trace is not None:
            self.trace.sent()

    def log_fields(self) -> Mapping[str, str]:
        """Return the fields by which a log line names the request."""
        return logs.request_fields(self.request_id, self.addressed, parse_trace_context(self.metadata))


class BuiltReply(InferenceReply):
    """A reply whose response the function `build` makes; the function may raise."""

    __slots__ = ("_addressed", "_build", "metadata", "request_id", "trace")

    def __init__(
        self,
        request_id: str,
        build: Callable[[], Sequence[Piece]],
        addressed: tuple[str, str] = ("", ""),
        metadata: Metadata = (),
        trace: RequestTrace | None = None,
    ) -> None:
        self.request_id = request_id
        self.metadata = metadata
        self.trace = trace
        self._addressed = addressed
        self._build = build

    @property
    def addressed(self) -> tuple[str, str]:
        """See `InferenceReply`."""
        return self._addressed

    def replace_with_error(self, error: Exception) -> None:
        """See `InferenceReply`."""
        self._build = _raising(error)

    def pieces(self) -> Sequence[Piece]:
        """See `InferenceReply`."""
        return self._build()


def error_reply(
    request_id: str,
    error: BaseException,
    addressed: tuple[str, str],
    metadata: Metadata,
    trace: RequestTrace | None = None,
) -> InferenceReply:
    """Return the reply to a request that failed."""
    return BuiltReply(request_id, _raising(error), addressed, metadata, trace)


def _raising(error: BaseException) -> Callable[[], Sequence[Piece]]:
    def build() -> Sequence[Piece]:
        raise error

    return build
