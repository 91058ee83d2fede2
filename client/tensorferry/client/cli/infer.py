"""The command `tensorferry infer`: one request on a model of a running server."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from tensorferry.client.cli import printing
from tensorferry.client.cli.array_files import write_archive, write_array
from tensorferry.client.cli.inputs import (
    add_once,
    dimensions,
    random_inputs,
    read_inputs,
    read_json,
    shapes_of,
    without_inputs,
)
from tensorferry.client.cli.parser import CommandParser, whole
from tensorferry.client.cli.server_flags import add_model, call_server, pair, server_parser, unique
from tensorferry.client.errors import InferenceError, InvalidInput
from tensorferry.client.messages.codec import StreamRequest
from tensorferry.client.messages.printable import printable
from tensorferry.client.messages.results import Classification, InferenceResult, Parameter
from tensorferry.client.messages.several_answers import gives_several
from tensorferry.client.threads.client import InferenceClient
from tensorferry.protos.tensors import Array

_DESCRIPTION = """Run one request on a model of a running server. Values become the datatype of the model's input,
if that loses no more than a float's last digits; missing leading axes are added with length 1. Of a model that answers in
streams, each answer is shown when it arrives."""

_HELP = {
    "--input": """an input; may be repeated. VALUE is JSON (x=[[1, 2]]), FILE.npy, or @FILE (@- for stdin). For
BYTES it is a text (text=hello), JSON strings (text=["a", "b"]), or @FILE for the content of a file as one
element; for other datatypes a file after @ has JSON or a .npy array. FILE.npz has arrays with the names of
the inputs. NAME= may be left out for a model with one input""",
    "--json": """the inputs, or a whole request, as JSON, a file with it, or - for stdin: {"x": [[1, 2]]}, or the
protocol's {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}, which may also have
"outputs", "parameters" and "id". {"b64": "..."} is an element of BYTES in base64""",
    "--random": """fill the inputs that are not given with random values: floats from 0 to 1, all values of UINT8
and INT8, 0 or 1 for other integers, words of eight letters for BYTES""",
    "--seed": "seed of --random; a seed has always the same values (default: 0)",
    "--rows": "length of an open first axis, with --random (default: 1)",
    "--shape": "shape of an input with --random, such as x:2,16, or x:16 without the rows; needed if an axis other than the first is "
    "open",
    "--output": "name of an output to return; may be repeated (default: all)",
    "--classes": "return the N classes with the highest values of an output, as VALUE:INDEX:LABEL; may be repeated",
    "--parameter": "request parameter; true, false and numbers are sent as such, all other values as strings",
    "--request-id": "id of the request, which the server writes to its logs",
    "--output-dir": """write each output to DIR instead of printing it, as NAME.npy: BYTES as fixed-width
strings, BF16 as float32 (both lose nothing). BYTES that numpy's fixed-width strings cannot hold, because an
element ends with a zero byte, are written to NAME.jsonl: first {"datatype", "shape"}, then one base64 string
per element in row-major order. Characters other than letters, digits, '.', '_' and '-' in a name become '_'""",
    "--output-file": "write all outputs to one .npz file instead of printing them",
    "--format": """table: for people, long arrays shortened; json: the protocol's JSON form on one line, complete
(default: %(default)s)""",
}

_count = whole(0, 10**18)

# Python's own int() and float() also take "2024_11" and "nan", which may be names.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def main(argv: Sequence[str]) -> int:
    """Run one request; print the outputs or write them to files."""
    parser = _parser()
    arguments = parser.parse(argv)
    _check(parser, arguments)

    def run(client: InferenceClient) -> None:
        model = client.metadata(arguments.model, arguments.model_version, timeout=arguments.timeout)
        request = StreamRequest({}) if arguments.json is None else read_json(arguments.json, model)
        inputs = dict(cast("Mapping[str, Array]", request.inputs))
        add_once(inputs, read_inputs(arguments.input, model), "--input")
        if arguments.random and not model.inputs:
            received = f"model {model.name!r}, of which it names none"
            change = "give --input NAME=FILE.npy for each input"
            raise InvalidInput("--random", "a model whose inputs the server names", received, change)
        if arguments.random:
            shapes = shapes_of(arguments.shape, model)
            seed, rows = arguments.seed or 0, arguments.rows
            inputs.update(random_inputs(model, inputs, seed, rows, shapes))
        sent = StreamRequest(
            inputs,
            arguments.request_id or request.request_id,
            _outputs(parser, arguments) or request.outputs,
            {**(request.parameters or {}), **unique(parser, "--parameter", arguments.parameter)},
        )
        if gives_several(model):
            _show_answers(client, sent, arguments)
            return
        try:
            result = client.infer(
                arguments.model,
                sent.inputs,
                version=arguments.model_version,
                timeout=arguments.timeout,
                outputs=sent.outputs,
                request_id=sent.request_id or None,
                parameters=sent.parameters,
            )
        except InferenceError as error:
            if model.inputs or inputs or isinstance(error, InvalidInput):
                raise
            raise without_inputs(error, model) from None
        _show(result, arguments)

    return call_server(parser, arguments, run)


def _parser() -> CommandParser:
    parser = server_parser("infer", _DESCRIPTION)
    add_model(parser)
    add = parser.flags("inputs", _HELP)
    add("--input", metavar="[NAME=]VALUE", action="append", default=[])
    add("--json", metavar="JSON|FILE|-")
    add("--random", action="store_true")
    add("--seed", metavar="N", type=_count)
    add("--rows", metavar="N", type=_count)
    add("--shape", metavar="[NAME:]DIMS", action="append", type=dimensions, default=[])
    add = parser.flags("request", _HELP)
    add("--output", metavar="NAME", action="append")
    add("--classes", metavar="NAME=N", action="append", type=_classes, default=[])
    add("--parameter", metavar="NAME=VALUE", action="append", type=parameter, default=[])
    add("--request-id", default="")
    add = parser.flags("answer", _HELP, exclusive=True)
    add("--format", choices=("table", "json"), default="table")
    add("--output-dir", metavar="DIR", type=Path)
    add("--output-file", metavar="FILE.npz", type=Path)
    return parser


def _check(parser: CommandParser, arguments: argparse.Namespace) -> None:
    """Exit with 2 if options do not go together."""
    if not arguments.random:
        for option in ("seed", "rows", "shape"):
            if getattr(arguments, option) not in (None, []):
                parser.error(f"argument --{option}: it belongs to --random: add --random, or leave it out")
    named = [one for one in arguments.input if one == "@-" or one.endswith("=@-")]
    named += [one for one in (arguments.json, arguments.token_file) if one == "-"]
    if len(named) > 1:
        parser.error(f"stdin can be read once, got it {len(named)} times: name files for the others")


def _outputs(parser: CommandParser, arguments: argparse.Namespace) -> dict[str, Classification | None]:
    """Return the outputs that --output and --classes name; none for all."""
    classes = unique(parser, "--classes", arguments.classes)
    return {**dict.fromkeys(arguments.output or ()), **classes}


def _show(result: InferenceResult, arguments: argparse.Namespace) -> None:
    if arguments.format == "json":
        print(printing.json_text(result))
        return
    print(printing.title(result))
    if arguments.output_file is not None:
        write_archive(arguments.output_file, result)
        for name, array in result.items():
            print(printing.heading(name, array))
        print(f"  {arguments.output_file}")
    elif arguments.output_dir is not None:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        taken: set[Path] = set()
        for name, array in result.items():
            print(printing.heading(name, array))
            print(f"  {write_array(arguments.output_dir, name, array, taken)}")
    else:
        for line in printing.table(result, shutil.get_terminal_size().columns):
            print(line)
    for key, value in result.parameters.items():
        print(f"{printable(key)} = {value!r}")


def _show_answers(client: InferenceClient, request: StreamRequest, arguments: argparse.Namespace) -> None:
    """Print each answer of a model that answers in streams when it arrives."""
    for option in ("output_dir", "output_file"):
        if getattr(arguments, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise InvalidInput(
                name,
                "a model with one answer",
                f"model {arguments.model!r}, which answers in streams",
                "leave it out, or use --format json",
            )
    results = client.stream(
        arguments.model, [request], version=arguments.model_version, timeout=arguments.timeout
    )
    for number, result in enumerate(results):
        if arguments.format == "json":
            print(printing.json_text(result), flush=True)
            continue
        if not number:
            print(printing.title(result))
        for line in printing.table(result, shutil.get_terminal_size().columns):
            print(line, flush=True)


def _classes(text: str) -> tuple[str, Classification]:
    name, number = pair(text, "NAME=N")
    try:
        return name, Classification(_count(number))
    except InvalidInput:
        raise argparse.ArgumentTypeError(f"expected NAME=N with N of at least 1, got {text!r}") from None


def parameter(text: str) -> tuple[str, Parameter]:
    """Return name and value of a request parameter."""
    name, value = pair(text, "NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    if not _NUMBER.fullmatch(value):
        return name, value
    try:
        return name, int(value)
    except ValueError:
        return name, float(value)
