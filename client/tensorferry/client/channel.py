"""How a client's channel is made: TLS, limits, and retries by gRPC's own service config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tensorferry.protos import SERVICE_NAME, inference_pb2_grpc

CallMetadata = tuple[tuple[str, str | bytes], ...]
ChannelOptions = Sequence[tuple[str, str | int]]

# Asks a tensorferry server to answer the requests of a stream as they finish. Other servers
# ignore it.
COMPLETION_ORDER: CallMetadata = (("tensorferry-stream-order", "completion"),)

DEFAULT_MAX_MESSAGE_BYTES = 2**31 - 1  # protobuf's own limit

# Inference has no side effects, so a call that met UNAVAILABLE may be sent again. The
# throttle stops retries while more than about one call in ten fails: a server in trouble is
# not made worse.
SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": SERVICE_NAME}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
    }
)


@dataclass(frozen=True, slots=True)
class Tls:
    """Where the PEM files for TLS are; without any, the system's authorities are trusted.

    `ca_file` replaces the authorities that the server's certificate is held against.
    `cert_file` and `key_file`, given together, are the client's own certificate (mutual TLS).
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError(
                f"cert_file and key_file belong together, got cert_file={self.cert_file!r} and"
                f" key_file={self.key_file!r}: give both or neither"
            )

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files; OSError when one cannot be read."""
        ca, cert, key = (
            None if file is None else Path(file).read_bytes()
            for file in (self.ca_file, self.cert_file, self.key_file)
        )
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def channel_credentials(
    tls: bool | Tls, credentials: grpc.ChannelCredentials | None
) -> grpc.ChannelCredentials | None:
    """The credentials of the channel, None for one without TLS; ValueError when both are given."""
    if credentials is not None:
        if tls:
            raise ValueError(f"got both tls={tls!r} and credentials: give one of them")
        return credentials
    if not tls:
        return None
    return (Tls() if tls is True else tls).credentials()


def channel_options(max_message_bytes: int, options: ChannelOptions) -> list[tuple[str, str | int]]:
    """The channel's options; those in `options` come last and win."""
    if max_message_bytes < 1:
        raise ValueError(f"max_message_bytes must be at least 1, got {max_message_bytes}")
    ours: dict[str, str | int] = {
        "grpc.max_send_message_length": max_message_bytes,
        "grpc.max_receive_message_length": max_message_bytes,
        "grpc.service_config": SERVICE_CONFIG,
        "grpc.enable_retries": 1,
        # A call larger than this buffer is never retried; the default is 256 KiB, less than
        # one image.
        "grpc.per_rpc_retry_buffer_size": max_message_bytes,
        # Each client has a connection of its own, so that more clients mean more connections.
        "grpc.use_local_subchannel_pool": 1,
        # A server that comes back is found within seconds; the default grows to two minutes.
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 5000,
    }
    return list((ours | dict(options)).items())


def call_metadata(metadata: Sequence[tuple[str, str | bytes]]) -> CallMetadata:
    """The metadata sent with each call, keys in lower case as gRPC wants them.

    ValueError where a value's type does not fit its key: bytes for keys that end in "-bin",
    str for all others.
    """
    checked: list[tuple[str, str | bytes]] = []
    for key, value in metadata:
        lower = key.lower()
        expected = bytes if lower.endswith("-bin") else str
        if not isinstance(value, expected):
            raise ValueError(
                f"metadata {key!r} takes {expected.__name__}, got {type(value).__name__}:"
                " a key that ends in '-bin' carries bytes, any other carries str"
            )
        checked.append((lower, value))
    return tuple(checked)


def sync_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: list[tuple[str, str | int]]
) -> grpc.Channel:
    """A channel for threads."""
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


def aio_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: list[tuple[str, str | int]]
) -> grpc.aio.Channel:
    """A channel for the running event loop."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def stub(channel: grpc.Channel | grpc.aio.Channel) -> inference_pb2_grpc.GRPCInferenceServiceStub:
    """The service's calls on that channel."""
    return inference_pb2_grpc.GRPCInferenceServiceStub(channel)
