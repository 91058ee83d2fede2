"""What a call of the lane's says when it arrives, before its message is read: whose it is, and by when it is to be answered."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from tensorferry.server import grpc_core
from tensorferry.server.access import Certificate
from tensorferry.server.status import Status

# Core gives the end of its clock's range, in seconds since the epoch, to a call without a deadline.
NEVER = 1e11

# When a call that was one too many may try again: nobody knows when others end.
_CALLS_RETRY_SECONDS = 0.1


def origin_of(event: Any) -> tuple[Any, Callable[[], str], Callable[[], Certificate]]:
    """A call's metadata, and what tells its peer and its connection's certificate."""
    call = event.call
    return (
        event.invocation_metadata,
        partial(grpc_core.peer_of, call),
        partial(grpc_core.certificate_of, call),
    )


def deadline_of(event: Any) -> float:
    """The deadline of a call that arrived, on the clock of `time.monotonic`; inf for none."""
    deadline: float = event.call_details.deadline
    if deadline > NEVER:
        return math.inf
    return time.monotonic() + deadline - time.time()


def too_many_calls(most: int) -> Status:
    """What a call is told that is one too many."""
    return Status(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{most} calls are in progress, which is the most this server takes on; retry in {_CALLS_RETRY_SECONDS} s, or start it "
        "with a larger --max-calls",
        _CALLS_RETRY_SECONDS,
    )
