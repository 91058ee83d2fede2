"""Shell commands that call a running server: `infer`, `ready`, `models` and `describe`.

Each returns its exit status: 0, or 1 after one line on stderr if the server cannot be reached or
refuses. A bad argument exits with 2, as argparse does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import grpc

from tensorferry.client.cli.array_files import read_array, write_array
from tensorferry.client.cli.server_flags import add_version, call_server, pair, server_parser, unique
from tensorferry.client.client import InferenceClient
from tensorferry.client.errors import Unavailable
from tensorferry.client.messages.codec import InferenceResult, Parameter
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

_OUTPUT_DIR_HELP = """write each output to DIR instead of printing it, as NAME.npy: BYTES as fixed-width
strings, BF16 as float32 (both lose nothing). BYTES that numpy's fixed-width strings cannot hold, because an
element ends with a zero byte, are written to NAME.jsonl: first {"datatype", "shape"}, then one base64 string
per element in row-major order. Characters other than letters, digits, '.', '_' and '-' in a name become '_'"""


def infer(argv: Sequence[str]) -> int:
    """Run one request with inputs from .npy files; print the outputs or write them to files."""
    parser = server_parser("infer", "Run one request on a model of a running server.")
    parser.add_argument("model", metavar="MODEL")
    add_version(parser)
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
            unique(parser, "--input", arguments.input),
            version=arguments.model_version,
            timeout=arguments.timeout,
            outputs=arguments.output,
            request_id=arguments.request_id,
            parameters=unique(parser, "--parameter", arguments.parameter),
        )
        _show(result, arguments.output_dir)

    return call_server(parser, arguments, run)


def ready(argv: Sequence[str]) -> int:
    """Return 0 if the server takes requests, 1 if it does not or cannot be reached."""
    parser = server_parser("ready", "Check that a server is running and ready: exit code 0 if so, else 1.")
    arguments = parser.parse(argv)

    def run(client: InferenceClient) -> None:
        if not client.is_ready(timeout=arguments.timeout):
            raise Unavailable(grpc.StatusCode.UNAVAILABLE, "not reachable or not ready")

    return call_server(parser, arguments, run)


def models(argv: Sequence[str]) -> int:
    """List the models of the server."""
    parser = server_parser("models", "List the models of a running server.")
    arguments = parser.parse(argv)

    def run(client: InferenceClient) -> None:
        rows = [("NAME", "VERSION", "STATE", "REASON")]
        rows += [
            (m.name, m.version or "-", m.state or "-", m.reason)
            for m in client.models(timeout=arguments.timeout)
        ]
        _print_table(rows)

    return call_server(parser, arguments, run)


def describe(argv: Sequence[str]) -> int:
    """Show the inputs and outputs of a model."""
    parser = server_parser("describe", "Show the inputs and outputs of a model of a running server.")
    parser.add_argument("model", metavar="MODEL")
    add_version(parser)
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

    return call_server(parser, arguments, run)


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


def _input(text: str) -> tuple[str, Array]:
    name, file = pair(text, "NAME=FILE.npy")
    try:
        return name, read_array(Path(file))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{file!r} cannot be read as an array: {error}: name a file that numpy.save wrote"
        ) from None


def _parameter(text: str) -> tuple[str, Parameter]:
    name, value = pair(text, "NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            pass
    return name, value
