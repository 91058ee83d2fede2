"""Where a batcher's request comes from."""

from __future__ import annotations

from typing import Any, NamedTuple

from tensorferry.server.telemetry.trace_context import TraceContext


class RequestOrigin(NamedTuple):
    """The `owner` of a batcher's request, and of its parts in a pipeline's stages; None if there is nothing to say.

    `port` is the `FrontEndPort` that received the request, None in a server of one process, and `ticket` its number there.
    `trace` is the request's span, None if it is not traced.
    """

    port: Any = None
    ticket: int = 0
    trace: TraceContext | None = None


NO_ORIGIN = RequestOrigin()
