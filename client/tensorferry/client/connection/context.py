"""Properties that all attempts of one call share: deadline, metadata with the trace context, compression."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import grpc

from tensorferry.client.connection.channel import CallMetadata, call_metadata
from tensorferry.client.errors import DeadlineExceeded, InvalidInput
from tensorferry.client.messages.arguments import shown

Compression = Literal["none", "gzip", "deflate"]
Headers = Sequence[tuple[str, str | bytes]]

# About 31 years. gRPC cannot encode much longer timeouts, so these count as no limit.
_LONGEST_SECONDS = 1e9
_ALGORITHMS = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}


def compression_of(compression: object) -> grpc.Compression:
    """Return grpcio's constant for the caller's argument; raise InvalidInput for anything else."""
    found = _ALGORITHMS.get(compression) if isinstance(compression, str) else None
    if found is None:
        change = "write compression='gzip', or leave it out"
        raise InvalidInput("compression", "'none', 'gzip' or 'deflate'", shown(compression), change)
    return found


def seconds_of(timeout: object) -> float | None:
    """Return a timeout in seconds, None for no limit; raise InvalidInput for anything else."""
    if timeout is None:
        return None
    seconds = 0.0
    if isinstance(timeout, Real) and not isinstance(timeout, bool):
        try:
            seconds = float(timeout)
        except OverflowError:  # an int larger than any float
            seconds = math.inf if timeout > 0 else 0.0  # type: ignore[operator]
    if not seconds > 0:
        raise InvalidInput(
            "timeout",
            "a positive number of seconds",
            shown(timeout),
            "give seconds above 0, or None (or infinity) for no limit",
        )
    return seconds if seconds < _LONGEST_SECONDS else None


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time on the monotonic clock, in seconds; None means never. Thread-safe."""

    at: float | None

    @classmethod
    def after(cls, timeout: float | None) -> Deadline:
        """Return the deadline `timeout` seconds from now; raise InvalidInput if it is no timeout."""
        seconds = seconds_of(timeout)
        return cls(None if seconds is None else time.monotonic() + seconds)

    def left(self) -> float | None:
        """Return the remaining seconds; None without a deadline."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())


def with_context(metadata: CallMetadata) -> CallMetadata:
    """Return a call's metadata with the current trace context, as the program's propagators write it.

    The caller's metadata takes precedence: a trace context in it is kept. OpenTelemetry is not a dependency: a
    program that has not imported it has no current span.
    """
    # None also while another thread imports the module.
    get_current = getattr(sys.modules.get("opentelemetry.context"), "get_current", None)
    if get_current is None or not get_current():
        return metadata
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    if not carrier:
        return metadata
    given = {name for name, _ in metadata}
    if "traceparent" in given:
        # The tracestate of another trace does not apply.
        given.add("tracestate")
    added = ((name.lower(), value) for name, value in carrier.items() if name.lower() not in given)
    return (*metadata, *added)


@dataclass(frozen=True, slots=True)
class CallContext:
    """Deadline, metadata and compression of one call, and the id of its request."""

    deadline: Deadline
    metadata: CallMetadata
    compression: grpc.Compression
    request_id: str = ""

    def of_request(self, request_id: str) -> CallContext:
        """Return the context with another request id."""
        return replace(self, request_id=request_id)

    def options(self, extra: CallMetadata = ()) -> dict[str, Any]:
        """Return grpcio's options of the next attempt; raise DeadlineExceeded if no time is left."""
        left = self.deadline.left()
        if left == 0:
            text = "the timeout passed before the request was sent"
            raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, text, self.request_id)
        return {
            "timeout": left,
            "metadata": with_context(self.metadata + extra),
            "compression": self.compression,
        }


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Metadata and compression, of all calls of a client or of one call."""

    metadata: CallMetadata
    compression: grpc.Compression

    def of_call(self, metadata: Headers, compression: Compression | None = None) -> CallSettings:
        """Return the settings of one call; raise InvalidInput for a wrong argument.

        Metadata of the call replaces the client's metadata of the same name.
        """
        if metadata == () and compression is None:
            return self
        own = call_metadata(metadata)
        names = {name for name, _ in own}
        kept = tuple(pair for pair in self.metadata if pair[0] not in names)
        algorithm = self.compression if compression is None else compression_of(compression)
        return CallSettings(kept + own, algorithm)

    def begin(self, timeout: float | None, request_id: str = "") -> CallContext:
        """Return the context of a call that begins now; raise InvalidInput for a wrong timeout."""
        return CallContext(Deadline.after(timeout), self.metadata, self.compression, request_id)
