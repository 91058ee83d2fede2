"""Options of the network: address, transport and connections."""

from __future__ import annotations

from dataclasses import dataclass

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import Parser, host_name, integer, one_of, seconds, size, switch


def _parse_front_ends(text: str) -> int | None:
    return None if text.lower() == "auto" else integer(0, 256).parse(text)


_front_ends = Parser(
    _parse_front_ends,
    "auto or an integer from 0 to 256",
    "integer, or auto",
    "N|auto",
    "processes",
    lambda value: "auto" if value is None else str(value),
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
    transport: str = option(
        "auto",
        one_of("auto", "lane", "threaded"),
        "how ModelInfer and ModelStreamInfer are served; lane is faster, threaded uses only the public API of grpcio; auto "
        "uses the lane if it works with the installed grpcio",
        scope=OptionScope.STANDALONE,
    )
    # None is auto.
    front_ends: int | None = option(
        0,
        _front_ends,
        "processes that serve HTTP/2, TLS and identity for one engine, which runs the models; auto: by the number of cores "
        "and the device; 0: one process does all",
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
        "without health checks move to new servers; 0: never",
        flag="max-connection-age-seconds",
        scope=OptionScope.STANDALONE,
    )
    reflection: bool = option(
        True,
        switch,
        "answer reflection requests, which grpcurl uses to get the protocol's descriptors",
        scope=OptionScope.STANDALONE,
    )
