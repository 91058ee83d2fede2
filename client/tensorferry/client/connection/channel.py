"""How a client's channels are made: TLS, limits and options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.arguments import integer, pairs, shown
from tensorferry.protos import inference_pb2_grpc

CallMetadata = tuple[tuple[str, str | bytes], ...]
ChannelOptions = Sequence[tuple[str, str | int]]

# Asks a tensorferry server to answer the requests of a stream as they finish. Other servers
# ignore it.
COMPLETION_ORDER: CallMetadata = (("tensorferry-stream-order", "completion"),)

DEFAULT_MAX_MESSAGE_BYTES = 2**31 - 1  # protobuf's own limit

_KEY = re.compile(r"[0-9a-z_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")


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
            raise InvalidInput(
                "Tls",
                "cert_file and key_file together",
                f"cert_file={self.cert_file!r} and key_file={self.key_file!r}",
                "give both or neither",
            )

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files; InvalidInput when one cannot be read."""
        ca, cert, key = (
            None if file is None else _read(name, file)
            for name, file in (
                ("ca_file", self.ca_file),
                ("cert_file", self.cert_file),
                ("key_file", self.key_file),
            )
        )
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def channel_credentials(
    tls: bool | Tls, credentials: grpc.ChannelCredentials | None
) -> grpc.ChannelCredentials | None:
    """The credentials of the channel, None for one without TLS; InvalidInput when both are given."""
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
    """The channel's options; those in `options` come last and win."""
    most = integer("max_message_bytes", max_message_bytes, 1, DEFAULT_MAX_MESSAGE_BYTES)
    ours: dict[str, str | int] = {
        "grpc.max_send_message_length": most,
        "grpc.max_receive_message_length": most,
        # Core then sends a call again that its server has not seen; retry.py decides about all others.
        "grpc.enable_retries": 1,
        # A call larger than this buffer is never sent again by core; the default is 256 KiB, less than
        # one image.
        "grpc.per_rpc_retry_buffer_size": most,
        # Each client has a connection of its own, so that more clients mean more connections.
        "grpc.use_local_subchannel_pool": 1,
        # A server that comes back is found within seconds; the default grows to two minutes.
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 5000,
    }
    for name, value in pairs("options", options, "[('grpc.keepalive_time_ms', 30000)]"):
        if isinstance(value, str):
            ours[name] = value
        else:
            ours[name] = integer(f"option {name!r}", value, -(2**31), 2**31 - 1)
    return list(ours.items())


def stream_options(options: list[tuple[str, str | int]]) -> list[tuple[str, str | int]]:
    """The options of the channel for streams.

    Core's retries are off on it, whoever asks for them: with them a stream can hang for ever, beyond its timeout, when
    its server leaves while requests are being sent.
    """
    return [*(option for option in options if option[0] != "grpc.enable_retries"), ("grpc.enable_retries", 0)]


def call_metadata(metadata: Sequence[tuple[str, str | bytes]]) -> CallMetadata:
    """The metadata sent with each call, keys in lower case as gRPC wants them.

    InvalidInput for what no header can be, and where a value's type does not fit its key: bytes
    for keys that end in "-bin", str for all others.
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
            # It is not quoted, since it may be a secret.
            change = "remove the others, or send bytes under a key that ends in '-bin'"
            raise InvalidInput(f"metadata {key!r}", "printable ASCII", "other characters", change)
        checked.append((lower, value))
    return tuple(checked)


def _read(name: str, file: str | Path) -> bytes:
    try:
        return Path(file).read_bytes()
    except (OSError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidInput(
            f"tls {name}", "a PEM file", f"{file!r} ({reason})", "name a file that can be read"
        ) from None


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
