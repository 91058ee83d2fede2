"""Options of the network: address, transport and connections."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import (
    Parser,
    host_name,
    integer,
    integer_or_auto,
    one_of,
    port_or_none,
    seconds,
    size,
    switch,
)

# Means the pages of every origin.
ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._~:\[\]-]+")
# Ports that browsers leave out of an origin.
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def _parse_origins(text: str) -> tuple[str, ...]:
    parts = [part.strip().lower() for part in text.split(",")]
    origins = tuple(part.removesuffix(_DEFAULT_PORTS.get(part.partition("://")[0], "")) for part in parts)
    if origins != (ANY_ORIGIN,) and not all(map(_ORIGIN.fullmatch, origins)):
        raise ValueError
    return origins


_origins = Parser(
    _parse_origins,
    "* or origins such as https://example.com, without a path, separated by commas",
    "list of origins",
    "ORIGIN|*",
)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Options of the network."""

    host: str = option(
        "127.0.0.1",
        host_name,
        "address to listen on; 0.0.0.0 or :: for all addresses",
        scope=OptionScope.STANDALONE,
    )
    port: int = option(
        8001,
        integer(0, 65535, metavar="PORT"),
        "port to listen on; 0 picks a free port and prints it",
        scope=OptionScope.STANDALONE,
    )
    http_port: int | None = option(
        None,
        port_or_none,
        "port of HTTP/1.1 with the same protocol, on --host; 0 picks a free port and prints it; none: no HTTP",
        scope=OptionScope.STANDALONE,
    )
    http_cors_origins: tuple[str, ...] = option(
        (),
        _origins,
        "origins whose web pages may call the HTTP port from a browser (CORS), such as https://example.com, * for all; not for "
        "methods that change the server; can be given several times",
        scope=OptionScope.STANDALONE,
        separator=",",
    )
    transport: str = option(
        "auto",
        one_of("auto", "lane", "threaded"),
        "how ModelInfer and ModelStreamInfer are served; lane is faster, threaded uses only the public API of grpcio; auto "
        "uses the lane if it works with the installed grpcio",
        scope=OptionScope.STANDALONE,
    )
    # None is auto.
    processes: int | None = option(
        1,
        integer_or_auto(1, 256, "processes"),
        "server processes on the port, each with all models; threads, limits and quotas are divided; auto: one for each GPU, or "
        "for each four cores of a CPU, at most eight",
        scope=OptionScope.STANDALONE,
    )
    max_message_bytes: int = option(
        64 << 20, size(1, (1 << 31) - 1), "largest message received or sent", scope=OptionScope.STANDALONE
    )
    max_metadata_bytes: int = option(
        16384,
        integer(1024, 1 << 24, unit="bytes"),
        "largest metadata of a call, including its token",
        scope=OptionScope.STANDALONE,
    )
    max_connections: int = option(
        0,
        integer(0, unit="connections"),
        "most open connections; further ones are closed; 0: limited only by the number of open files",
        scope=OptionScope.STANDALONE,
    )
    max_connection_age: float = option(
        0.0,
        seconds,
        "age, within 10 percent, at which a client is asked to reconnect while its calls continue, so that clients "
        "without health checks move to new servers; 0: never, or 60 seconds with several processes, so that connections are "
        "divided again",
        flag="max-connection-age-seconds",
        scope=OptionScope.STANDALONE,
    )
    reflection: bool = option(
        True,
        switch,
        "answer reflection requests, which grpcurl uses to get the protocol's descriptors",
        scope=OptionScope.STANDALONE,
    )
