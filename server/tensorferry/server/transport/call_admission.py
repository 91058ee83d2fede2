"""Calls of the lane's that arrive: what they say before their messages are read, and whether those are read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from tensorferry.batcher import QueueFull
from tensorferry.server.identity import ANONYMOUS, INFER, ClientIdentity
from tensorferry.server.inference.service import SHUTTING_DOWN, InferenceService
from tensorferry.server.security.access_control import AccessControl, ClientCertificate, StreamAuthorization
from tensorferry.server.status import Status
from tensorferry.server.transport.lane import cygrpc
from tensorferry.server.transport.unread_responses import UnreadResponses

# Core gives the end of its clock's range, in seconds since the epoch, to a call without a deadline.
NEVER = 1e11

# When a call that was one too many may try again: nobody knows when others end.
_CALLS_RETRY_SECONDS = 0.1

# What a call is told that begins during a drain.
_DRAINING = cygrpc.final_status(Status(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN))


def deadline_of(event: Any) -> float:
    """The deadline of a call that arrived, on the clock of `time.monotonic`; inf for none."""
    deadline: float = event.call_details.deadline
    if deadline > NEVER:
        return math.inf
    return time.monotonic() + deadline - time.time()


class CallAdmission:
    """Knows for each call that arrives whose it is, or how it ends at once. To be asked on the thread that polls.

    `turned_away` is told why a call ends because of an overload.
    """

    def __init__(
        self,
        service: InferenceService,
        access: AccessControl | None,
        max_calls: int,
        turned_away: Callable[[QueueFull], None],
        unread: UnreadResponses,
    ) -> None:
        self._unread = unread
        self._service = service
        self._access = access
        self._max_calls = max_calls
        self._too_many = cygrpc.final_status(_too_many_calls(max_calls))
        self._turned_away = turned_away
        # Why a call was last turned away unread, and how those end of which the same is said.
        self._refusal: QueueFull | None = None
        self._ending = self._too_many

    def admit_unary(self, event: Any, deadline: float, calls: int) -> ClientIdentity | cygrpc.FinalStatus:
        """Whose unary call it is, while so many are in progress."""
        if self._service.draining and not self._service.early_rejection.tracing_enabled:
            self._service.count_refused(grpc.StatusCode.UNAVAILABLE)
            return _DRAINING
        if calls >= self._max_calls:
            self._service.count_refused(grpc.StatusCode.RESOURCE_EXHAUSTED)
            return self._too_many
        if (unread := self._unread_refusal(event)) is not None:
            return cygrpc.final_status(unread)
        caller = ANONYMOUS
        if self._access is not None:
            try:
                caller = self._access.admit(INFER, *_origin_of(event))
            except Exception as error:
                return cygrpc.final_status(self._service.status_of(error))
        if deadline < math.inf and (refusal := self._service.early_rejection.check(deadline)) is not None:
            if refusal is not self._refusal:
                self._refusal, self._ending = refusal, cygrpc.final_status(self._service.status_of(refusal))
            self._turned_away(refusal)
            return self._ending
        return caller

    def admit_stream(self, event: Any) -> StreamAuthorization | Status | None:
        """Whose stream it is, and for how long; None where anybody's is served, or the status with which it ends."""
        if (unread := self._unread_refusal(event)) is not None:
            return unread
        if self._access is None:
            return None
        try:
            return StreamAuthorization(self._access, *_origin_of(event))
        except Exception as error:
            return self._service.status_of(error)

    def _unread_refusal(self, event: Any) -> Status | None:
        """The status of a call whose client, or all clients, have yet to read too many bytes of answers."""
        if not self._unread.refuses_some:
            return None
        error = self._unread.refusal(cygrpc.peer_of(event.call))
        if error is None:
            return None
        self._service.count_refused(grpc.StatusCode.RESOURCE_EXHAUSTED)
        return self._service.status_of(error)


def _origin_of(event: Any) -> tuple[Any, Callable[[], str], Callable[[], ClientCertificate]]:
    """A call's metadata, and what tells its peer and its connection's certificate."""
    call = event.call
    return (
        event.invocation_metadata,
        partial(cygrpc.peer_of, call),
        partial(cygrpc.certificate_of, call),
    )


def _too_many_calls(most: int) -> Status:
    return Status(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{most} calls are in progress, which is the most this server takes on; retry in {_CALLS_RETRY_SECONDS} s, or start it "
        "with a larger --max-calls",
        _CALLS_RETRY_SECONDS,
    )
