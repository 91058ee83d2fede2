"""Options of gRPC core."""

from __future__ import annotations

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.transport.channel_args import core_options

LIMITS = {
    "grpc.max_connection_age_ms",
    "grpc.max_concurrent_streams",
    "grpc.max_allowed_incoming_connections",
}


def test_the_connections_of_front_ends_to_the_engine_are_not_limited() -> None:
    """One of them carries the calls of many clients, which the front-end has limited."""
    config = ServerConfig((), max_connections=1, max_calls_per_connection=1, max_connection_age=1.0)
    assert set(dict(core_options(config))) >= LIMITS
    assert not LIMITS & set(dict(core_options(config, limits_connections=False)))
