"""Where a batcher's request comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tensorferry.server.observability.logs.trace_context import TraceContext

if TYPE_CHECKING:
    from tensorferry.server.inference.suspects.crash_watch import WatchedRequest


class RequestOrigin(NamedTuple):
    """The `owner` of a batcher's request, and of its parts in a pipeline's stages; None if there is nothing to say.

    `watched` is the request for the process's page, None in a server of one process. `trace` is the request's span, None if
    it is not traced.
    """

    watched: WatchedRequest | None = None
    trace: TraceContext | None = None


NO_ORIGIN = RequestOrigin()
