"""`tensorferry config`: a model's completed configuration, in text format, without a server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tensorferry.server import logs
from tensorferry.server.config import OPTIONS, ConfigError, ModelSource, load_config, model_source
from tensorferry.server.errors import StartError
from tensorferry.server.model_config import DEFAULT_FILENAME, config_text, read_config
from tensorferry.server.models import NAME
from tensorferry.server.preparation import prepare
from tensorferry.server.session import choose_device

# Those that the configuration depends on.
_FLAGS = (
    "device",
    "max-batch-size",
    "batching",
    "max-queue-delay-ms",
    "preferred-batch-sizes",
    "priority-weights",
    "default-priority",
    "log-format",
    "log-level",
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensorferry config",
        description="Prints a model's completed configuration, as ModelConfig answers with it: what its config.pbtxt "
        "says, if it has one, and what the ONNX file and the options add. Nothing is served.",
        epilog="The options are those of tensorferry serve, and may come from the environment, too.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="path.onnx, name=path.onnx, or a model's directory NAME with NAME/VERSION/model.onnx and perhaps "
        "NAME/config.pbtxt, whose highest version is read",
    )
    for option in OPTIONS:
        if option.flag in _FLAGS:
            parser.add_argument(f"--{option.flag}", metavar="VALUE", help=option.help)
    return parser


def main(argv: Sequence[str]) -> int:
    """0 when it is printed, 1 when the model cannot be served, 2 for bad options."""
    arguments = vars(_parser().parse_args(argv))
    flags = {flag: arguments[flag.replace("-", "_")] for flag in _FLAGS}
    # The configuration is on stdout; of the log, only what its owner must know.
    flags["log-level"] = flags["log-level"] or os.environ.get("TENSORFERRY_LOG_LEVEL", "warning")
    model = arguments["model"]
    directory = Path(model)
    try:
        source = source_in(directory) if directory.is_dir() else model_source(model)
        options = load_config([f"{source.name}={source.path}"], flags, os.environ, None)
        logs.configure(options.log_format, options.log_level)
        prepared = prepare(source, options, choose_device(options.device))
    except ConfigError as error:
        print(f"tensorferry config: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"tensorferry config: {error}", file=sys.stderr)
        return 1
    print(config_text(prepared.config), end="")
    return 0


def source_in(directory: Path) -> ModelSource:
    """The highest version of the model in a directory of Triton's layout; StartError when there is none."""
    name = directory.resolve().name
    if not NAME.fullmatch(name):
        raise StartError(f"{directory} is named {name!r}, which no model can be: rename it")
    file = directory / "config.pbtxt"
    config = read_config(file) if file.is_file() else None
    versions = [entry.name for entry in directory.iterdir() if entry.name.isdecimal() and entry.is_dir()]
    if not versions:
        raise StartError(
            f"{directory} has no version of a model: a directory whose name is a number, with the ONNX file"
        )
    version = max(versions, key=int)
    path = directory / version / ((config.default_model_filename if config else "") or DEFAULT_FILENAME)
    if path.is_dir():
        path /= DEFAULT_FILENAME
    return ModelSource(name, path, version, config, directory)
