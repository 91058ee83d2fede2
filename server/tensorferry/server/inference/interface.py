"""What a transport needs of the service behind it: the inference service itself, or a front-end's way to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tensorferry.batcher import QueueFull
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import PermissionDeniedError, UnauthenticatedError
from tensorferry.server.identity import ClientIdentity, Metadata
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.inference.unpacking import Unpacker
from tensorferry.server.status import Status, StatusCode, status_of

SHUTTING_DOWN = "the server is shutting down and has stopped accepting new requests; retry elsewhere"

# Seconds that a batch may take on a thread which serves all calls. Waking a worker takes about as long, and the two threads
# would contend for the GIL.
MAX_INLINE_SECONDS = 200e-6


def status_of_reply(
    error: BaseException,
    reply: InferenceReply | None,
    *,
    triton: bool,
    count_refused: Callable[[StatusCode], None],
) -> Status:
    """Return the status of an error that a reply raised, or that kept a call from being admitted."""
    status = status_of(error, triton=triton, about=dict if reply is None else reply.log_fields)
    if isinstance(error, (UnauthenticatedError, PermissionDeniedError)):
        # Counted here for both transports, because `submit` never gets such a call.
        count_refused(status.code)
    return status


class InlineRunner(Protocol):
    """A batcher, or what stands in for it: something that a thread which serves all calls must run soon."""

    def run_inline(self, max_seconds: float) -> float:
        """See `Batcher.run_inline`."""


class EarlyRejecter(Protocol):
    """See `EarlyRejection`."""

    @property
    def tracing_enabled(self) -> bool:
        """Whether calls are traced; rejected calls are then traced too."""

    def check(self, deadline: float) -> QueueFull | None:
        """Return why a call with this deadline is rejected; None if its message is to be read."""

    @property
    def one_model(self) -> bool:
        """Whether exactly one model is loaded, so that every call is for it."""


class RequestService(Protocol):
    """`InferenceService`, as the transports use it."""

    @property
    def limits(self) -> RequestLimits:
        """The bounds of requests."""

    @property
    def draining(self) -> bool:
        """Whether the server has stopped accepting requests."""

    @property
    def early_rejection(self) -> EarlyRejecter:
        """Rejection of calls before their message is read."""

    def count_refused(self, code: StatusCode) -> None:
        """Count a request that was refused before it reached a queue."""

    def status_of(self, error: BaseException, reply: InferenceReply | None = None) -> Status:
        """Return the status of an error that a reply raised, or that kept a call from being admitted."""

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata = ...,
        caller: ClientIdentity = ...,
        *,
        streamed: bool = False,
        run_soon: Callable[[InlineRunner], None] | None = None,
        unpacker: Unpacker | None = None,
    ) -> InferenceCall:
        """See `InferenceService.submit`."""
