"""What gRPC core is told: how much it takes in, of whom, and for how long."""

from __future__ import annotations

from tensorferry.server.config.server_config import ServerConfig

_MOST_PENDING = 8192

# What a client may send of a call before the server has read it, beside the message that it reads.
WINDOW_BYTES = 4 << 20

_NEVER_MS = 2**31 - 1


def core_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Options of `grpc.server`."""
    options = [
        # Off: with it a second server would share the port in silence.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # Messages are unpacked by `wire.compression`, which bounds what they may become.
        ("grpc.per_message_decompression", 0),
        # Beyond the first, core refuses a part of the calls; beyond the second, every one.
        ("grpc.max_metadata_size", config.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", config.max_metadata_bytes),
        # Left to itself, core gives every call as much room as a connection has seemed to carry in a round trip, which on
        # a fast machine is 64 MiB and more: so much memory for each stream that is sent more than it reads.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # What core counts for its own debugging service, which is not served.
        ("grpc.enable_channelz", 0),
        # Calls that wait to be taken in: beyond it core itself ends them, as CANCELLED.
        ("grpc.server.max_pending_requests", _MOST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MOST_PENDING),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        # Core takes the greatest integer for no limit.
        ("grpc.max_connection_age_ms", min(round(config.max_connection_age * 1e3) or _NEVER_MS, _NEVER_MS)),
    ]
    if config.max_calls_per_connection:
        options.append(("grpc.max_concurrent_streams", config.max_calls_per_connection))
    if config.max_connections:
        options.append(("grpc.max_allowed_incoming_connections", config.max_connections))
    return options
