"""Properties that all attempts of one call share: deadline, metadata, compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import grpc

from tensorferry.client.connection.channel import CallMetadata, call_metadata
from tensorferry.client.connection.deadline import Deadline
from tensorferry.client.connection.propagation import with_context
from tensorferry.client.errors import DeadlineExceeded, InvalidInput
from tensorferry.client.messages.arguments import shown

Compression = Literal["none", "gzip", "deflate"]
Headers = Sequence[tuple[str, str | bytes]]

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
