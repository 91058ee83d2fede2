"""Options of the network: address, transport and connections; and of an orderly shutdown."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import (
    Parser,
    host_name,
    integer,
    integer_or,
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
    """Options of the network, all with the scope STANDALONE."""

    host: str = option(
        "127.0.0.1",
        host_name,
        "address to listen on; 0.0.0.0 or :: for all addresses",
    )
    port: int = option(
        8001,
        integer(0, 65535, metavar="PORT"),
        "port to listen on; 0 picks a free port and prints it",
    )
    http_port: int | None = option(
        None,
        port_or_none,
        "port of HTTP/1.1 with the same protocol, on --host; 0 picks a free port and prints it; none: no HTTP",
    )
    http_cors_origins: tuple[str, ...] = option(
        (),
        _origins,
        "origins whose web pages may call the HTTP port from a browser (CORS), such as https://example.com, * for all; not for "
        "methods that change the server; can be given several times",
        separator=",",
    )
    transport: str = option(
        "auto",
        one_of("auto", "lane", "threaded"),
        "how ModelInfer and ModelStreamInfer are served; lane is faster, threaded uses only the public API of grpcio; auto "
        "uses the lane if it works with the installed grpcio",
    )
    # None is auto.
    processes: int | None = option(
        1,
        integer_or("auto", 1, 256, unit="processes"),
        "server processes on the port, each with all models; threads, limits and quotas are divided; auto: one for each GPU, or "
        "for each four cores of a CPU, at most eight",
    )
    max_message_bytes: int = option(64 << 20, size(1, (1 << 31) - 1), "largest message received or sent")
    max_metadata_bytes: int = option(
        16384,
        integer(1024, 1 << 24, unit="bytes"),
        "largest metadata of a call, including its token",
    )
    max_connections: int = option(
        0,
        # The core of grpc takes no more than 32 bits.
        integer(0, 1 << 30, unit="connections"),
        "most open connections; further ones are closed; 0: limited only by the number of open files",
    )
    max_connection_age: float = option(
        0.0,
        seconds,
        "age, within 10 percent, at which a client is asked to reconnect while its calls continue, so that clients "
        "without health checks move to new servers; 0: never, or 60 seconds with several processes, so that connections are "
        "divided again",
        flag="max-connection-age-seconds",
    )
    reflection: bool = option(
        True,
        switch,
        "answer reflection requests, which grpcurl uses to get the protocol's descriptors",
    )


@dataclass(frozen=True, kw_only=True)
class ShutdownOptions:
    """Options of an orderly shutdown."""

    drain_seconds: float = option(
        30.0, seconds, "longest time after SIGTERM or Ctrl-C for accepted requests to finish"
    )
    drain_delay: float = option(
        0.0,
        seconds,
        "time after SIGTERM or Ctrl-C in which requests are still accepted while health is NOT_SERVING and the port is "
        "closed to new connections, so that load balancers notice and no call fails; --drain-seconds begin afterwards",
        flag="drain-delay-seconds",
        scope=OptionScope.STANDALONE,
    )
