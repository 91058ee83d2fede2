"""Admission of calls, for both transports: limits, identity and early rejection, decided before a message is read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from tensorferry.batcher import QueueFull
from tensorferry.server.identity import ANONYMOUS, INFER, ClientIdentity, Metadata
from tensorferry.server.inference.reply import SHUTTING_DOWN
from tensorferry.server.inference.responses.stream_responses import StreamOptions, parse_stream_options
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.security.access_control import ClientCertificate, StreamAuthorization
from tensorferry.server.status import Status, StatusCode
from tensorferry.server.transport.transport_state import TransportState

# gRPC reports a call without a deadline as one whose deadline is very far away.
_MAX_DEADLINE_SECONDS = 365 * 86400.0

# The retry hint of a call above the limit. The end of the calls in progress cannot be predicted.
_CALLS_RETRY_SECONDS = 0.1

CallT = TypeVar("CallT")


def deadline_after(remaining: float | None) -> float:
    """Return the deadline in `remaining` seconds on the clock of `time.monotonic`; inf for None or above a year."""
    if remaining is None or remaining > _MAX_DEADLINE_SECONDS:
        return math.inf
    return time.monotonic() + remaining


class Refusal(NamedTuple):
    """Status of a call that is not admitted; with the queue's error if the queue is full."""

    status: Status
    queue_full: QueueFull | None = None


class StreamAdmission(NamedTuple):
    """Options of an admitted stream, and its authorization; None if clients are not identified."""

    options: StreamOptions
    authorization: StreamAuthorization | None = None


_DRAINING = Refusal(Status(StatusCode.UNAVAILABLE, SHUTTING_DOWN))


class CallAdmission(Generic[CallT]):
    """Accepts or refuses the inference calls of one transport. Thread-safe.

    `shared` is that of all transports. `peer_of` and `certificate_of` read a call of the transport; they are called only if
    clients are identified, because both are slow. Refused calls are counted by the service.
    """

    def __init__(
        self,
        service: InferenceService,
        shared: TransportState,
        *,
        peer_of: Callable[[CallT], str],
        certificate_of: Callable[[CallT], ClientCertificate],
    ) -> None:
        self._service = service
        self._access, self._unread, self.calls = shared.access, shared.unread, shared.calls
        self._peer_of = peer_of
        self._certificate_of = certificate_of
        self._too_many = Refusal(
            Status(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{self.calls.most} calls are in progress, which is the most this server takes on; retry in "
                f"{_CALLS_RETRY_SECONDS} s, or start it with a larger --max-calls",
                _CALLS_RETRY_SECONDS,
            )
        )
        # The last refusal of an overload; most have the same reason, so their status is built once.
        self._overload = self._too_many

    def admit_unary(
        self, call: CallT, metadata: Metadata, remaining: float | None
    ) -> tuple[ClientIdentity | Refusal, float]:
        """Return the caller of a unary call, or why it is refused; and its deadline, which is in `remaining` seconds.

        An admitted call is open until the transport calls `calls.end_unary`.
        """
        # As `deadline_after` does.
        deadline = math.inf
        if remaining is not None and remaining <= _MAX_DEADLINE_SECONDS:
            deadline = time.monotonic() + remaining
        # The trace of a refused call needs its message.
        if self._service.draining and not self._service.tracing_enabled:
            return self._counted(_DRAINING), deadline
        if not self.calls.begin_unary():
            return self._counted(self._too_many), deadline
        try:
            refusal, caller = None, ANONYMOUS
            if self._unread.refuses_some:
                refusal = self._check_unread(call)
            if refusal is None and self._access is not None:
                try:
                    caller = self._access.admit(
                        INFER, metadata, partial(self._peer_of, call), partial(self._certificate_of, call)
                    )
                except Exception as error:
                    refusal = Refusal(self._service.status_of(error))
            if refusal is None and deadline < math.inf:
                queue_full = self._service.reject_early(deadline)
                if queue_full is not None:
                    refusal = self._overloaded(queue_full)
        except BaseException:
            self.calls.end_unary()
            raise
        if refusal is not None:
            self.calls.end_unary()
            return refusal, deadline
        return caller, deadline

    def admit_stream(self, call: CallT, metadata: Metadata) -> StreamAdmission | Refusal:
        """Return the options and the authorization of a stream, or why it is refused."""
        if self._unread.refuses_some and (refusal := self._check_unread(call)) is not None:
            return refusal
        authorization = None
        if self._access is not None:
            try:
                authorization = StreamAuthorization(
                    self._access, metadata, partial(self._peer_of, call), partial(self._certificate_of, call)
                )
            except Exception as error:
                return Refusal(self._service.status_of(error))
        options = parse_stream_options(metadata)
        if isinstance(options, Status):
            return Refusal(options)
        return StreamAdmission(options, authorization)

    def _check_unread(self, call: CallT) -> Refusal | None:
        error = self._unread.refusal(self._peer_of(call))
        return None if error is None else self._counted(Refusal(self._service.status_of(error)))

    def _overloaded(self, queue_full: QueueFull) -> Refusal:
        refusal = self._overload
        if refusal.queue_full is not queue_full:
            self._overload = refusal = Refusal(self._service.status_of(queue_full), queue_full)
        return refusal

    def _counted(self, refusal: Refusal) -> Refusal:
        self._service.count_refused(refusal.status.code)
        return refusal
