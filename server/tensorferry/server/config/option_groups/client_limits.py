"""Options that limit each client, and share the server between clients."""

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
    format=lambda value: ",".join(f"{name}={weight}" for name, weight in value) or None,
)


@dataclass(frozen=True, kw_only=True)
class ClientLimitOptions:
    """Options that limit each client, and share the server between clients."""

    client_max_requests: int = option(
        0,
        integer(0, unit="requests"),
        "most accepted, unanswered requests of one client, for each model; 0: no limit",
        scope=OptionScope.STANDALONE,
        per_model=True,
    )
    client_max_rows: int = option(
        0,
        integer(0, unit="rows"),
        "most rows of accepted, unanswered requests of one client, for each model; 0: no limit",
        scope=OptionScope.STANDALONE,
        per_model=True,
    )
    client_max_bytes: int = option(
        0,
        size(0),
        "most bytes of accepted, unanswered requests of one client, for each model; 0: no limit",
        scope=OptionScope.STANDALONE,
        per_model=True,
    )
    client_rate: float = option(
        0.0,
        number("rows per second"),
        "rate that one client may send in the long run, for each model; 0: no limit",
        scope=OptionScope.STANDALONE,
        per_model=True,
    )
    fair_share: bool = option(
        False,
        switch,
        "share the rows of batches and the places in a full queue between competing clients by weight",
        scope=OptionScope.STANDALONE,
        per_model=True,
    )
    client_weights: tuple[tuple[str, int], ...] = option(
        (),
        _weights,
        "with --fair-share: the weight of each named client; all others have weight 1; can be given several times",
        separator=",",
        scope=OptionScope.STANDALONE,
        per_model=True,
    )
