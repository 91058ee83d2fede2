"""Options that limit requests, and all clients together."""

from __future__ import annotations

from dataclasses import dataclass

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import integer, size


@dataclass(frozen=True, kw_only=True)
class RequestLimitOptions:
    """Options that limit requests, and all clients together."""

    max_queue_size: int = option(
        4096,
        integer(1, unit="rows"),
        "most queued rows of each model; further requests are rejected",
        per_model=True,
    )
    max_queue_bytes: int = option(
        1 << 30,
        size(),
        "most bytes of accepted, unanswered requests of each model; further ones are rejected",
        per_model=True,
    )
    max_request_rows: int = option(
        0, integer(0, unit="rows"), "most rows of one request; 0: the value of --max-queue-size"
    )
    max_string_bytes: int = option(16 << 20, size(), "longest string in a BYTES tensor")
    max_calls: int = option(
        16384,
        integer(1, unit="calls"),
        "most calls in progress; further calls are rejected before their message is read",
        scope=OptionScope.STANDALONE,
    )
    max_streams: int | None = option(
        None,
        integer(1, unit="streams"),
        "most open streams; without it 10000 with the lane, and 256 with the threaded transport, where each stream uses "
        "two threads",
        scope=OptionScope.STANDALONE,
    )
    max_in_flight_per_stream: int = option(
        64,
        integer(1, unit="requests"),
        "most unanswered requests of a stream; the server reads the next one only after a response",
    )
    max_unsent_bytes: int = option(
        1 << 30,
        size(),
        "most bytes of responses that clients have not read, a quarter of them for one connection; further calls are "
        "rejected",
        scope=OptionScope.STANDALONE,
    )
    max_calls_per_connection: int = option(
        0,
        integer(0, unit="calls"),
        "most open calls and streams of a connection; clients delay further ones themselves; 0: no limit",
        scope=OptionScope.STANDALONE,
    )
