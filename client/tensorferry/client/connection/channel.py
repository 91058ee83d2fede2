"""Channels of a client: TLS, limits and options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.arguments import content, integer, pairs, shown

CallMetadata = tuple[tuple[str, str | bytes], ...]
ChannelOptions = Sequence[tuple[str, str | int]]

# Asks a tensorferry server to answer the requests of a stream in order of completion. Other
# servers ignore it.
COMPLETION_ORDER: CallMetadata = (("tensorferry-stream-order", "completion"),)

DEFAULT_MAX_MESSAGE_BYTES = 2**31 - 1  # protobuf's own limit

_KEY = re.compile(r"[0-9a-z_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files for TLS.

    `ca_file` has the certificate authorities to trust, by default the system's. `cert_file` and
    `key_file`, given together, are the client's certificate for mutual TLS.

    >>> Tls(ca_file="ca.pem").ca_file
    'ca.pem'
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidInput(
                "Tls",
                "cert_file and key_file together",
                f"cert_file={self.cert_file!r} and key_file={self.key_file!r}",
                "give both or neither",
            )

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files; raise InvalidInput if one cannot be read.

        >>> type(Tls().credentials()).__name__
        'ChannelCredentials'
        """
        ca, cert, key = (
            None if (file := getattr(self, name)) is None else content(f"tls {name}", "a PEM file", file)
            for name in ("ca_file", "cert_file", "key_file")
        )
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def channel_credentials(
    tls: bool | Tls, credentials: grpc.ChannelCredentials | None
) -> grpc.ChannelCredentials | None:
    """Return the channel credentials, None without TLS; raise InvalidInput if both are given."""
    if not isinstance(tls, (bool, Tls)):
        raise InvalidInput(
            "tls", "True, False or a Tls", shown(tls), "write tls=Tls(ca_file='ca.pem'), or True"
        )
    if credentials is None:
        if tls is False:
            return None
        return (Tls() if tls is True else tls).credentials()
    if not isinstance(credentials, grpc.ChannelCredentials):
        change = "make them with grpc.ssl_channel_credentials, or use tls= with files"
        raise InvalidInput("credentials", "grpc.ChannelCredentials", shown(credentials), change)
    if tls:
        raise InvalidInput(
            "the client", "tls or credentials", f"both tls={tls!r} and credentials", "give one of them"
        )
    return credentials


def channel_options(max_message_bytes: int, options: ChannelOptions) -> list[tuple[str, str | int]]:
    """Return the channel options; `options` overrides the defaults."""
    most = integer("max_message_bytes", max_message_bytes, 1, DEFAULT_MAX_MESSAGE_BYTES)
    ours: dict[str, str | int] = {
        "grpc.max_send_message_length": most,
        "grpc.max_receive_message_length": most,
        # gRPC core retries calls that no server has seen; retry.py decides about all others.
        "grpc.enable_retries": 1,
        # Core never retries a call larger than this buffer. The default of 256 KiB is less than one image.
        "grpc.per_rpc_retry_buffer_size": most,
        # Each client has its own connection, so that more clients use more connections.
        "grpc.use_local_subchannel_pool": 1,
        # Reconnect within seconds after a restart of the server; the default grows to two minutes.
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 5000,
    }
    for name, value in pairs("options", options, "[('grpc.keepalive_time_ms', 30000)]"):
        if isinstance(value, str):
            ours[name] = value
        else:
            ours[name] = integer(f"option {name!r}", value, -(2**31), 2**31 - 1)
    return list(ours.items())


def stream_options(options: ChannelOptions) -> list[tuple[str, str | int]]:
    """Return the options of the channel for streams.

    Core's retries are always off there. With them a stream can hang beyond its timeout if the
    server ends while requests are being sent.
    """
    return [*(option for option in options if option[0] != "grpc.enable_retries"), ("grpc.enable_retries", 0)]


def call_metadata(metadata: Sequence[tuple[str, str | bytes]]) -> CallMetadata:
    """Return the metadata of each call, with lower-case keys as gRPC requires.

    Raises InvalidInput for an invalid header, and for a value of the wrong type: keys that end in
    "-bin" take bytes, all others str.
    """
    checked: list[tuple[str, str | bytes]] = []
    for key, value in pairs("metadata", metadata, "[('x-user', 'me')]"):
        lower = key.lower()
        if not _KEY.fullmatch(lower) or lower.startswith("grpc-"):
            change = "use letters, digits, '-', '_' and '.', and no name that begins with 'grpc-'"
            raise InvalidInput("each key of metadata", "the name of a header", shown(key), change)
        expected = bytes if lower.endswith("-bin") else str
        if not isinstance(value, expected):
            change = "a key that ends in '-bin' carries bytes, any other carries str"
            raise InvalidInput(f"metadata {key!r}", expected.__name__, type(value).__name__, change)
        if isinstance(value, str) and not _VALUE.fullmatch(value):
            # The message does not quote the value, because it may be a secret.
            change = "remove the others, or send bytes under a key that ends in '-bin'"
            raise InvalidInput(f"metadata {key!r}", "printable ASCII", "other characters", change)
        checked.append((lower, value))
    return tuple(checked)


def open_channel(
    api: Any, target: str, credentials: grpc.ChannelCredentials | None, options: ChannelOptions
) -> Any:
    """Return a channel: for threads with `grpc` as `api`, for the running event loop with `grpc.aio`."""
    if credentials is None:
        return api.insecure_channel(target, options=options)
    return api.secure_channel(target, credentials, options=options)
