"""Channel arguments of gRPC core: message sizes, flow control, connections."""

from __future__ import annotations

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.transport.unread_responses import SMALL_BYTES

_MAX_PENDING_CALLS = 8192

# Bytes that a client may send of a call before the server reads them, in addition to the message being read.
WINDOW_BYTES = 4 << 20

_UNLIMITED_MS = 2**31 - 1


def core_options(config: ServerConfig, *, reuse_port: bool = False) -> list[tuple[str, int]]:
    """Return the options of `grpc.server`. With `reuse_port`, several processes may listen on its port."""
    options = [
        # Off, because a second server could otherwise share the port unnoticed. The processes of one server share it on purpose.
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # `wire.receiving` decompresses messages, because it limits their decompressed size.
        ("grpc.per_message_decompression", 0),
        # Above the first, core refuses a share of the calls; above the second, all.
        ("grpc.max_metadata_size", config.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", config.max_metadata_bytes),
        # The probe gives every call a window of the connection's bandwidth times its round-trip time. On a fast machine
        # that is 64 MiB and more for each stream that is sent more than it reads.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # Of a stream, the most bytes of responses that core collects when the lane says that more follow. The lane
        # regards them as sent.
        ("grpc.http2.write_buffer_size", SMALL_BYTES),
        # Counters of core's debugging service, which is not served.
        ("grpc.enable_channelz", 0),
        # Calls that are not accepted yet. Core ends those above the limit with CANCELLED.
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING_CALLS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]
    # Core takes the greatest integer as unlimited.
    age = min(round(config.max_connection_age * 1e3) or _UNLIMITED_MS, _UNLIMITED_MS)
    options.append(("grpc.max_connection_age_ms", age))
    if config.max_calls_per_connection:
        options.append(("grpc.max_concurrent_streams", config.max_calls_per_connection))
    if config.max_connections:
        options.append(("grpc.max_allowed_incoming_connections", config.max_connections))
    return options
