"""Shell commands that call a running server: `infer`, `ready`, `models` and `describe`.

Each returns its exit status: 0, or 1 after one line on stderr if the server cannot be reached or
refuses. A bad argument exits with 2, as argparse does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import grpc

from tensorferry.client.cli.array_files import read_array, write_array
from tensorferry.client.cli.parser import CommandParser
from tensorferry.client.client import InferenceClient
from tensorferry.client.connection.channel import Tls
from tensorferry.client.connection.deadline import seconds_of
from tensorferry.client.connection.target import check_target
from tensorferry.client.errors import InferenceError, InvalidInput, Unavailable
from tensorferry.client.messages.codec import InferenceResult, Parameter
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

T = TypeVar("T")

# Not an argument, because every process of the machine can read those.
_TOKEN_VARIABLE = "TENSORFERRY_TOKEN"

_OUTPUT_DIR_HELP = """write each output to DIR instead of printing it, as NAME.npy: BYTES as fixed-width
strings, BF16 as float32 (both lose nothing). BYTES that numpy's fixed-width strings cannot hold, because an
element ends with a zero byte, are written to NAME.jsonl: first {"datatype", "shape"}, then one base64 string
per element in row-major order. Characters other than letters, digits, '.', '_' and '-' in a name become '_'"""


def infer(argv: Sequence[str]) -> int:
    """Run one request with inputs from .npy files; print the outputs or write them to files."""
    parser = _parser("infer", "Run one request on a model of a running server.")
    parser.add_argument("model", metavar="MODEL")
    _add_version(parser)
    parser.add_argument(
        "--input",
        metavar="NAME=FILE.npy",
        action="append",
        type=_input,
        default=[],
        help="name of an input and the file with its array; once per input",
    )
    parser.add_argument(
        "--output",
        metavar="NAME",
        action="append",
        help="name of an output to return; may be repeated (default: all)",
    )
    parser.add_argument(
        "--parameter",
        metavar="NAME=VALUE",
        action="append",
        type=_parameter,
        default=[],
        help="request parameter; true, false and numbers are sent as such, all other values as strings",
    )
    parser.add_argument(
        "--request-id", default="", help="id of the request, which the server writes to its logs"
    )
    parser.add_argument("--output-dir", metavar="DIR", type=Path, help=_OUTPUT_DIR_HELP)
    arguments = parser.parse(argv)

    def run(client: InferenceClient) -> None:
        result = client.infer(
            arguments.model,
            _unique(parser, "--input", arguments.input),
            version=arguments.model_version,
            timeout=arguments.timeout,
            outputs=arguments.output,
            request_id=arguments.request_id,
            parameters=_unique(parser, "--parameter", arguments.parameter),
        )
        _show(result, arguments.output_dir)

    return _run(parser, arguments, run)


def ready(argv: Sequence[str]) -> int:
    """Return 0 if the server takes requests, 1 if it does not or cannot be reached."""
    parser = _parser("ready", "Check that a server is running and ready: exit code 0 if so, else 1.")
    arguments = parser.parse(argv)

    def run(client: InferenceClient) -> None:
        if not client.is_ready(timeout=arguments.timeout):
            raise Unavailable(grpc.StatusCode.UNAVAILABLE, "not reachable or not ready")

    return _run(parser, arguments, run)


def models(argv: Sequence[str]) -> int:
    """List the models of the server."""
    parser = _parser("models", "List the models of a running server.")
    arguments = parser.parse(argv)

    def run(client: InferenceClient) -> None:
        rows = [("NAME", "VERSION", "STATE", "REASON")]
        rows += [
            (m.name, m.version or "-", m.state or "-", m.reason)
            for m in client.models(timeout=arguments.timeout)
        ]
        _print_table(rows)

    return _run(parser, arguments, run)


def describe(argv: Sequence[str]) -> int:
    """Show the inputs and outputs of a model."""
    parser = _parser("describe", "Show the inputs and outputs of a model of a running server.")
    parser.add_argument("model", metavar="MODEL")
    _add_version(parser)
    arguments = parser.parse(argv)

    def run(client: InferenceClient) -> None:
        model = client.metadata(arguments.model, arguments.model_version, timeout=arguments.timeout)
        print(f"{model.name}: {model.platform or 'unknown platform'}, versions {', '.join(model.versions)}")
        rows = [("", "NAME", "DATATYPE", "SHAPE")]
        rows += [
            ("optional input" if t.optional else "input", t.name, t.datatype, str(list(t.shape)))
            for t in model.inputs
        ]
        rows += [("output", t.name, t.datatype, str(list(t.shape))) for t in model.outputs]
        _print_table(rows)
        if "batching" in model.properties:
            print(f"batching: {model.properties['batching']}")

    return _run(parser, arguments, run)


def _parser(command: str, description: str) -> CommandParser:
    parser = CommandParser(prog=f"tensorferry {command}", description=description, allow_abbrev=False)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--target",
        type=_target,
        default="127.0.0.1:8001",
        metavar="HOST:PORT",
        help="address of the server (default: %(default)s)",
    )
    server.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="longest wait for the answer; inf for no limit (default: %(default)s)",
    )
    server.add_argument(
        "--header",
        metavar="NAME=VALUE",
        action="append",
        type=_header,
        default=[],
        help="call metadata; may be repeated",
    )
    server.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"file with a bearer token, or - for stdin (default: the environment variable {_TOKEN_VARIABLE}, if it is set)",
    )
    server.add_argument(
        "--token-over-plaintext",
        action="store_true",
        help="send the token without TLS, though others on the network can read it",
    )
    server.add_argument("--tls", action="store_true", help="use TLS; implied by each of the files below")
    server.add_argument(
        "--ca-file",
        metavar="FILE",
        help="PEM file of the certificate authorities to trust (default: the system's)",
    )
    server.add_argument(
        "--cert-file", metavar="FILE", help="PEM file of the client's certificate, for mutual TLS"
    )
    server.add_argument("--key-file", metavar="FILE", help="PEM file of the private key of --cert-file")
    return parser


def _add_version(parser: CommandParser) -> None:
    parser.add_argument(
        "--model-version",
        default="",
        metavar="VERSION",
        help="the model's version (default: the server's choice)",
    )


def _run(
    parser: CommandParser,
    arguments: argparse.Namespace,
    command: Callable[[InferenceClient], None],
) -> int:
    files = {f"--{name}-file": getattr(arguments, f"{name}_file") for name in ("ca", "cert", "key")}
    if (arguments.cert_file is None) != (arguments.key_file is None):
        given, missing = (
            ("--cert-file", "--key-file") if arguments.cert_file else ("--key-file", "--cert-file")
        )
        parser.error(f"argument {given}: got {files[given]!r} without {missing}: give both or neither")
    for option, file in files.items():
        if file is not None and not Path(file).is_file():
            parser.error(f"argument {option}: {file!r} is not a file: name a PEM file")
    tls: bool | Tls = arguments.tls
    if any(files.values()):
        tls = Tls(arguments.ca_file, arguments.cert_file, arguments.key_file)
    token = _token(parser, arguments.token_file)
    try:
        client = InferenceClient(
            arguments.target,
            tls=tls,
            metadata=arguments.header,
            token=token,
            token_over_plaintext=arguments.token_over_plaintext,
        )
    except InvalidInput as error:
        parser.error(str(error))
    try:
        with client:
            command(client)
    except InvalidInput as error:
        parser.error(str(error))
    except InferenceError as error:
        print(f"{parser.prog}: {arguments.target}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _token(parser: CommandParser, file: str | None) -> str | None:
    if file is None:
        # An empty variable counts as unset.
        return os.environ.get(_TOKEN_VARIABLE) or None
    try:
        return (sys.stdin.read() if file == "-" else Path(file).read_text()).strip()
    except (OSError, UnicodeDecodeError):
        parser.error(f"argument --token-file: {file!r} cannot be read: name a file with nothing but a token")


def _show(result: InferenceResult, directory: Path | None) -> None:
    print(f"model {result.model_name}, version {result.model_version or '-'}")
    taken: set[Path] = set()
    for name, array in result.items():
        print(f"{name}  {tensors.datatype_of(array)} {list(array.shape)}")
        if directory is None:
            print(array)
        else:
            directory.mkdir(parents=True, exist_ok=True)
            print(f"  {write_array(directory, name, array, taken)}")
    for key, value in result.parameters.items():
        print(f"{key} = {value!r}")


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _unique(parser: CommandParser, option: str, pairs: Sequence[tuple[str, T]]) -> Mapping[str, T]:
    for name, _ in pairs:
        if [n for n, _ in pairs].count(name) > 1:
            parser.error(f"argument {option}: {name!r} is given more than once: give it once")
    return dict(pairs)


def _pair(text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected {form}, got {text!r}")
    return name, value


def _input(text: str) -> tuple[str, Array]:
    name, file = _pair(text, "NAME=FILE.npy")
    try:
        return name, read_array(Path(file))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{file!r} cannot be read as an array: {error}: name a file that numpy.save wrote"
        ) from None


def _header(text: str) -> tuple[str, str | bytes]:
    name, value = _pair(text, "NAME=VALUE")
    return name, value.encode() if name.lower().endswith("-bin") else value


def _parameter(text: str) -> tuple[str, Parameter]:
    name, value = _pair(text, "NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            pass
    return name, value


def _target(text: str) -> str:
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
