"""The flags of a running server that its commands share, and the call of a command with them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tensorferry.client.cli.parser import INTERRUPTED, CommandParser
from tensorferry.client.connection.bearer import bearer
from tensorferry.client.connection.channel import CallMetadata, Tls, call_metadata
from tensorferry.client.connection.context import seconds_of
from tensorferry.client.connection.target import DEFAULT_TARGET, TARGET_VARIABLE, check_target, targets_of
from tensorferry.client.errors import InferenceError, InvalidInput, Unavailable
from tensorferry.client.messages.printable import one_line
from tensorferry.client.threads.client import InferenceClient

T = TypeVar("T")

# Not an argument, because every process of the machine can read those.
TOKEN_VARIABLE = "TENSORFERRY_TOKEN"


# Help of the flags of a server.
SERVER_HELP = {
    "--target": f"address of the server (default: the environment variable {TARGET_VARIABLE}, otherwise {DEFAULT_TARGET})",
    "--timeout": "longest wait for the answer; inf for no limit (default: %(default)s)",
    "--header": "call metadata; may be repeated",
    "--token-file": "file with a bearer token, or - for stdin "
    f"(default: the environment variable {TOKEN_VARIABLE}, if it is set)",
    "--token-over-plaintext": "send the token without TLS, though others on the network can read it",
    "--tls": "use TLS; implied by each of the files below",
    "--ca-file": "PEM file of the certificate authorities to trust (default: the system's)",
    "--cert-file": "PEM file of the client's certificate, for mutual TLS",
    "--key-file": "PEM file of the private key of --cert-file",
}


def server_parser(command: str, description: str) -> CommandParser:
    """Return the parser of a command that calls a server, with the flags that all of them have."""
    parser = CommandParser(command, description)
    add = parser.flags("server", SERVER_HELP)
    add("--target", type=target_address, metavar="HOST:PORT")
    add("--timeout", type=_seconds, default=60.0, metavar="SECONDS")
    add_connection_flags(add)
    return parser


def add_connection_flags(add: Callable[..., Any]) -> None:
    """Add the flags of metadata, token and TLS to a group of flags."""
    add("--header", metavar="NAME=VALUE", action="append", type=_header, default=[])
    add("--token-file", metavar="FILE")
    add("--token-over-plaintext", action="store_true")
    add("--tls", action="store_true")
    for flag in ("--ca-file", "--cert-file", "--key-file"):
        add(flag, metavar="FILE")


def add_model(parser: CommandParser) -> None:
    """Add MODEL and --model-version."""
    parser.add_argument("model", metavar="MODEL")
    version_help = "the model's version (default: the server's choice)"
    parser.add_argument("--model-version", default="", metavar="VERSION", help=version_help)


@dataclass(frozen=True, slots=True)
class ServerConnection:
    """The servers that the flags name, and how calls reach them. `metadata` includes the token."""

    targets: tuple[str, ...]
    tls: bool | Tls
    metadata: CallMetadata


def connection_of(parser: CommandParser, arguments: argparse.Namespace) -> ServerConnection:
    """Return the connection that the flags describe; exit with 2, or raise InvalidInput, if they do not fit together."""
    targets = targets_of(arguments.target)
    files = (arguments.ca_file, arguments.cert_file, arguments.key_file)
    tls: bool | Tls = arguments.tls if files == (None, None, None) else Tls(*files)
    token = _token(parser, arguments.token_file)
    over_plaintext = arguments.token_over_plaintext
    sent_token = bearer(token, targets, secure=bool(tls), over_plaintext=over_plaintext)
    return ServerConnection(targets, tls, call_metadata(arguments.header) + sent_token)


def call_server(
    parser: CommandParser,
    arguments: argparse.Namespace,
    command: Callable[[InferenceClient], None],
) -> int:
    """Run a command with a client of the server that the flags name; return the exit code of `with_connection`."""

    def run(connection: ServerConnection) -> int:
        with InferenceClient(connection.targets, tls=connection.tls, metadata=connection.metadata) as client:
            command(client)
        return 0

    return with_connection(parser, arguments, run)


def with_connection(
    parser: CommandParser, arguments: argparse.Namespace, command: Callable[[ServerConnection], int]
) -> int:
    """Run a command with the connection that the flags describe; return its exit code.

    InvalidInput exits with 2. Other errors of calls and of files return 1 after one line on stderr. Ctrl-C returns 130.
    """
    try:
        connection = connection_of(parser, arguments)
        return command(connection)
    except KeyboardInterrupt:
        return INTERRUPTED
    except InvalidInput as error:
        parser.error(str(error))
    except InferenceError as error:
        text = f"{','.join(connection.targets)}: {one_line(str(error))}{_hint(error, connection)}"
        print(f"{parser.prog}: {text}", file=sys.stderr)
    except BrokenPipeError:
        # The reader of the output has exited, as `head` does. `tensorferry` then ends without an error.
        raise
    except OSError as error:
        print(f"{parser.prog}: {one_line(str(error))}", file=sys.stderr)
    return 1


def _hint(error: InferenceError, connection: ServerConnection) -> str:
    """Return what to look at if a call has reached no server that speaks the protocol; "" for other errors."""
    if not isinstance(error, Unavailable):
        return ""
    if "Connection refused" in error.message:
        return "; is `tensorferry serve` running there?"
    if "Failed parsing HTTP/2" in error.message:
        return "; this port speaks another protocol, such as HTTP/1.1: give the port of gRPC"
    if not connection.tls and any(text in error.message for text in ("Socket closed", "recvmsg", "GOAWAY")):
        return "; if the server has TLS, give --tls or --ca-file"
    return ""


def _token(parser: CommandParser, file: str | None) -> str | None:
    if file is None:
        # An empty variable counts as unset.
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        return (sys.stdin.read() if file == "-" else Path(file).read_text()).strip()
    except (OSError, UnicodeDecodeError):
        parser.error(f"argument --token-file: {file!r} cannot be read: name a file with nothing but a token")


def unique(parser: CommandParser, option: str, pairs: Sequence[tuple[str, T]]) -> Mapping[str, T]:
    """Return the pairs of a repeated option as a mapping; exit with 2 if a name is repeated."""
    for name, _ in pairs:
        if [n for n, _ in pairs].count(name) > 1:
            parser.error(f"argument {option}: {name!r} is given more than once: give it once")
    return dict(pairs)


def pair(text: str, form: str) -> tuple[str, str]:
    """Split NAME=VALUE; raise ArgumentTypeError with the expected form if it has no name or no "="."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected {form}, got {text!r}")
    return name, value


def _header(text: str) -> tuple[str, str | bytes]:
    name, value = pair(text, "NAME=VALUE")
    return name, value.encode() if name.lower().endswith("-bin") else value


def target_address(text: str) -> str:
    """Return a target; raise ArgumentTypeError if gRPC could never reach it."""
    try:
        return check_target(text)
    except InvalidInput as error:
        refusal = f"expected {error.expected}, got {error.received}: {error.change}"
        raise argparse.ArgumentTypeError(refusal) from None


def _seconds(text: str) -> float | None:
    try:
        return seconds_of(float(text))
    except ValueError:  # InvalidInput is a ValueError
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}") from None
