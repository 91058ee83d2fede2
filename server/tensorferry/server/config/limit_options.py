"""The options that bound what clients may send and have, each and all together, and how they share."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tensorferry.batcher import ClientPolicy
from tensorferry.server.config.option_types import Option, integer, number, size, switch
from tensorferry.server.config.request_limits import RequestLimits
from tensorferry.server.config.server_config import ConfigError, ServerConfig

_BYTES = "a number of bytes of at least 1, or one with KiB, MiB or GiB"


def _weights(text: str) -> tuple[tuple[str, int], ...]:
    weights: dict[str, int] = {}
    for part in text.split(","):
        client, equals, weight = part.rpartition("=")
        if not client or not equals or client in weights or not re.fullmatch(r"[1-9]\d{0,5}", weight):
            raise ValueError
        weights[client] = int(weight)
    return tuple(weights.items())


LIMIT_OPTIONS: tuple[Option, ...] = (
    Option(
        "max-request-rows",
        "max_request_rows",
        integer(0),
        "an integer of at least 0",
        "most rows of one request; 0: as many as --max-queue-size",
    ),
    Option(
        "max-strings",
        "max_strings",
        integer(1),
        "an integer of at least 1",
        "most strings in a BYTES tensor: unlike numbers, each is decoded on its own",
    ),
    Option("max-string-bytes", "max_string_bytes", size, _BYTES, "longest string in a BYTES tensor"),
    Option(
        "max-unsent-bytes",
        "max_unsent_bytes",
        size,
        _BYTES,
        "most bytes of answers that clients have yet to read; one connection may hold a quarter of it; beyond it calls are "
        "refused",
    ),
    Option(
        "max-calls",
        "max_calls",
        integer(1),
        "an integer of at least 1",
        "most calls in progress, of all clients; beyond it calls are refused before their message is read",
    ),
    Option(
        "max-streams",
        "max_streams",
        integer(1),
        "an integer of at least 1",
        "most streams open, of all clients; without it 10000 in the lane, 256 where each takes two threads",
    ),
    Option(
        "max-in-flight-per-stream",
        "max_in_flight_per_stream",
        integer(1),
        "an integer of at least 1",
        "most requests of a stream read and not answered; beyond it no more is read until some are",
    ),
    Option(
        "max-connections",
        "max_connections",
        integer(0),
        "an integer of at least 0",
        "most connections; beyond it new ones are closed; 0: no bound but the open files",
    ),
    Option(
        "max-calls-per-connection",
        "max_calls_per_connection",
        integer(0),
        "an integer of at least 0",
        "most calls and streams open on one connection; clients hold further ones back themselves; 0: no bound",
    ),
    Option(
        "max-metadata-bytes",
        "max_metadata_bytes",
        integer(1024, 1 << 24),
        "an integer from 1024 to 16777216",
        "largest metadata of a call, its token included",
    ),
    Option(
        "client-max-requests",
        "client_max_requests",
        integer(0),
        "an integer of at least 0",
        "most requests of one client accepted and not answered, for each model; 0: no bound",
    ),
    Option(
        "client-max-rows",
        "client_max_rows",
        integer(0),
        "an integer of at least 0",
        "the same in rows",
    ),
    Option(
        "client-max-bytes",
        "client_max_bytes",
        lambda text: 0 if text.strip() == "0" else size(text),
        "a number of bytes, or one with KiB, MiB or GiB; 0 for no bound",
        "the same in bytes",
    ),
    Option(
        "client-rate",
        "client_rate",
        number,
        "a number of at least 0",
        "rows a second that one client may send in the long run, for each model; 0: no bound",
    ),
    Option(
        "client-burst",
        "client_burst",
        integer(0),
        "an integer of at least 0",
        "with --client-rate: rows that a client that was quiet may send at once; 0: those of a second",
    ),
    switch(
        "fair-share",
        "fair_share",
        "when clients compete, share the rows of batches and the room of a full queue among them by weight",
    ),
    Option(
        "client-weights",
        "client_weights",
        _weights,
        "names with weights from 1 to 999999, such as alice=4,bob=1, each name once",
        "with --fair-share: clients whose weight is not 1",
        form="NAME=N,...",
    ),
)


def check_limits(config: ServerConfig) -> None:
    """ConfigError for options that contradict each other."""
    if config.client_weights and not config.fair_share:
        raise ConfigError("client-weights is given, but clients do not share by weight; give --fair-share")
    if config.client_burst and not config.client_rate:
        raise ConfigError(
            f"client-burst is {config.client_burst}, but clients may send at any rate; give --client-rate"
        )


def tells_clients_apart(config: ServerConfig) -> bool:
    """Whether anything depends on whose a request is."""
    return config.fair_share or clients_of(config) is not None


def clients_of(config: ServerConfig) -> ClientPolicy | None:
    """What each client may have in the queue of a model; None where nothing is said of that."""
    weights: Mapping[str, int] = dict(config.client_weights)
    policy = ClientPolicy(
        max_requests=config.client_max_requests,
        max_rows=config.client_max_rows,
        max_bytes=config.client_max_bytes,
        rate=config.client_rate,
        burst=config.client_burst,
        fair=config.fair_share,
        weights=weights,
    )
    return policy if policy.fair or policy.bounds else None


def limits_of(config: ServerConfig) -> RequestLimits:
    """What one request may hold."""
    return RequestLimits(
        config.max_request_rows, config.max_strings, config.max_string_bytes, config.max_message_bytes
    )
