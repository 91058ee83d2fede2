"""What the inference service and the transports share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tensorferry.server.errors import PermissionDeniedError, UnauthenticatedError
from tensorferry.server.inference.reply import InferenceReply
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
    """A batcher or a pipeline that a thread which serves all calls must run soon."""

    def run_inline(self, max_seconds: float) -> float:
        """See `Batcher.run_inline`."""
