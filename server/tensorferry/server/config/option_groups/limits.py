"""Options that limit requests, all clients together, and each client."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import Parser, integer, number, size, switch


def _parse_weights(text: str) -> tuple[tuple[str, int], ...]:
    weights: dict[str, int] = {}
    for part in text.split(","):
        client, equals, weight = part.rpartition("=")
        if not client or not equals or client in weights or not re.fullmatch(r"[1-9]\d{0,5}", weight):
            raise ValueError
        weights[client] = int(weight)
    return tuple(weights.items())


_weights = Parser(
    _parse_weights,
    "names with weights from 1 to 999999, such as alice=4,bob=1, each name once",
    "list of names with weights",
    "NAME=N,...",
)


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
        integer(0, 1 << 30, unit="calls"),
        "most open calls and streams of a connection; clients delay further ones themselves; 0: no limit",
        scope=OptionScope.STANDALONE,
    )


@dataclass(frozen=True, kw_only=True)
class ClientLimitOptions:
    """Options that limit each client, and share the server between clients: all per model, with the scope STANDALONE."""

    client_max_requests: int = option(
        0,
        integer(0, unit="requests"),
        "most accepted, unanswered requests of one client, for each model; 0: no limit",
    )
    client_max_rows: int = option(
        0,
        integer(0, unit="rows"),
        "most rows of accepted, unanswered requests of one client, for each model; 0: no limit",
    )
    client_max_bytes: int = option(
        0,
        size(0),
        "most bytes of accepted, unanswered requests of one client, for each model; 0: no limit",
    )
    client_rate: float = option(
        0.0,
        number("rows per second"),
        "rate that one client may send in the long run, for each model; 0: no limit",
    )
    fair_share: bool = option(
        False,
        switch,
        "share the rows of batches and the places in a full queue between competing clients by weight",
    )
    client_weights: tuple[tuple[str, int], ...] = option(
        (),
        _weights,
        "with --fair-share: the weight of each named client; all others have weight 1; can be given several times",
        separator=",",
    )
