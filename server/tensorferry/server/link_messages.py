"""What travels over the link beside messages: callers and traces, statuses of failed requests, and a front-end's gauges."""

from __future__ import annotations

import enum
import json
from functools import lru_cache
from typing import Any, NamedTuple

from tensorferry.server.identity import ANONYMOUS, ClientIdentity, Metadata
from tensorferry.server.status import INTERNAL_ERROR, Status, StatusCode
from tensorferry.server.telemetry.trace_context import TRACEPARENT, TRACESTATE

# Codes of the link's responses: a serialised ModelInferResponse, or what `encode_failure` returns.
ANSWERED, FAILED = 0, 1

# What the engine reads of a call's metadata.
_KEPT = frozenset({TRACEPARENT, TRACESTATE})

_CODES = {code.value[0]: code for code in StatusCode}


class Gauge(enum.IntEnum):
    """What a front-end counts at the moment. The value is its place in the link's counters.

    The places below 17 are the status codes of requests that the front-end refused.
    """

    OPEN_STREAMS = 32
    CALL_THREADS = 33
    UNSENT_BYTES = 34
    # 1 if the front-end serves by this transport, else 0.
    LANE = 35
    THREADED = 36


class FailedRequest(NamedTuple):
    """The status of a request, its id, and the name and version of the model, as far as they are known."""

    status: Status
    request_id: str
    addressed: tuple[str, str]


class Origin(NamedTuple):
    """Who sent a request, what the engine needs of the call's metadata, and whether it came in a stream."""

    caller: ClientIdentity
    metadata: Metadata
    streamed: bool


def encode_origin(caller: ClientIdentity, metadata: Metadata, streamed: bool) -> bytes:
    """Return the origin of a request; empty for a unary call of anyone without a trace."""
    kept = tuple([pair for pair in metadata if pair[0] in _KEPT])
    return _encoded(caller, kept, streamed)


# Cached, because most calls are of few callers and without a trace.
@lru_cache(maxsize=1024)
def _encoded(caller: ClientIdentity, kept: Metadata, streamed: bool) -> bytes:
    if caller == ANONYMOUS and not kept and not streamed:
        return b""
    return json.dumps([caller.name, sorted(caller.roles), kept, streamed]).encode()


@lru_cache(maxsize=1024)
def decode_origin(data: bytes) -> Origin:
    """Return the origin of a request. An exception for anything that `encode_origin` does not return."""
    if not data:
        return Origin(ANONYMOUS, (), False)
    decoded: Any = json.loads(data)
    match decoded:
        case [str(name), list(roles), list(kept), bool(streamed)]:
            pairs = tuple([(str(key), str(value)) for key, value in kept if key in _KEPT])
            return Origin(ClientIdentity(name, frozenset(map(str, roles))), pairs, streamed)
    raise ValueError(f"no origin of a request: {data[:100]!r}")


def encode_failure(status: Status, request_id: str, addressed: tuple[str, str]) -> bytes:
    """Return a failed request in bytes."""
    fields = [status.code.value[0], status.message, status.retry_after, request_id, *addressed]
    return json.dumps(fields).encode()


def decode_failure(data: bytes) -> FailedRequest:
    """Return what `encode_failure` was given."""
    code, message, retry_after, request_id, name, version = json.loads(data)
    status = Status(_CODES.get(code, INTERNAL_ERROR.code), message, retry_after)
    return FailedRequest(status, request_id, (name, version))
