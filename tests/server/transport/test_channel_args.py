"""Options of gRPC core."""

from __future__ import annotations

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.transport.channel_args import core_options


def test_connections_are_limited() -> None:
    options = dict(core_options(ServerConfig((), max_connections=5, max_calls_per_connection=7)))
    assert options["grpc.max_allowed_incoming_connections"] == 5
    assert options["grpc.max_concurrent_streams"] == 7


def test_only_processes_of_one_server_share_a_port() -> None:
    assert dict(core_options(ServerConfig(())))["grpc.so_reuseport"] == 0
    assert dict(core_options(ServerConfig(()), reuse_port=True))["grpc.so_reuseport"] == 1
