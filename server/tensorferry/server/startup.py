"""What every process of `tensorferry serve` does at its start: read the options, set up the collector, report ready."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from tensorferry.server.config.flags import CommandParser, add_flags, config_file, read_flags
from tensorferry.server.config.load import load_config
from tensorferry.server.config.server_config import OPTIONS, ServerConfig
from tensorferry.server.names import printable
from tensorferry.server.system import malloc
from tensorferry.server.system.installed_versions import imported
from tensorferry.server.system.standard_streams import print_line
from tensorferry.server.transport import grpc_environment

if TYPE_CHECKING:
    from tensorferry.server.app import App

# The ready line describes at most this many models.
_MAX_MODELS_SHOWN = 8
# Of the models in the ready line. A model alone may have more.
_MOST_CHARACTERS = 100


def run_child(module: str) -> NoReturn:
    """Run the function `main` of a module as a child of the supervisor, with the arguments DESCRIPTORS ARGUMENTS."""
    # Before grpc is imported.
    grpc_environment.prepare()
    malloc.reuse_large_buffers()
    main = imported("serve", module, "main")
    if main is not None:
        main(sys.argv[1:])
    sys.exit(1)


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of `tensorferry serve`."""
    parser = CommandParser(
        prog="tensorferry serve",
        usage="tensorferry serve [MODEL ...] [--FLAG VALUE ...]",
        description="Serve ONNX models and Python functions over gRPC (Open Inference Protocol v2), with dynamic batching.",
        epilog="Each option is also an environment variable (TENSORFERRY_PORT) and a key in the --config file "
        "(port = 8001; models = [...]). A flag has precedence over the environment, and the environment over the file. A "
        "table [models.NAME] of the file has the options of one model, which precede all of them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help="path.onnx, name=path.onnx, or path.py with models that tensorferry.serving declares; instead of a path to ONNX, "
        "hf://ORG/REPO/FILE, s3://BUCKET/KEY, gs://BUCKET/KEY or https://HOST/FILE, optionally with #sha256=HASH",
    )
    add_flags(parser, OPTIONS)
    return parser


def read_config(arguments: Sequence[str]) -> ServerConfig:
    """Return the configuration of a command line and this process's environment. ConfigError for bad options."""
    parsed, flags = read_flags(command_parser(), arguments, OPTIONS)
    return load_config(parsed["models"], flags, os.environ, config_file(parsed))


def exclude_from_collection() -> None:
    """Exclude what was loaded from garbage collections, which then take little time."""
    gc.collect()
    gc.freeze()


def print_ready_line(app: App) -> None:
    """Print the one line on stdout: the server is ready."""
    models = [
        {"name": m.name, "version": m.version, "signature": str(m.signature), "batching": m.batching}
        for m in app.registry.models()
    ]
    failed = app.registry.unavailable()
    others = {name: url for name, url in (("http", app.http_url), ("metrics", app.metrics_url)) if url}
    state = "ready" if app.service.ready else "listening, but not ready"
    if app.config.log_format == "json":
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": "info",
            "message": state,
            "address": app.address,
            "transport": app.transport,
            "models": models,
            "failed": failed,
        }
        print_line(json.dumps({**line, **others}))
        return
    names = {"http": "HTTP", "metrics": "metrics"}
    where = ", ".join([app.address, *(f"{names[name]} on {url}" for name, url in others.items())])
    if not app.service.ready:
        state += ","
    text = f"tensorferry {version('tensorferry')} {state} on {where}: {describe_models(models)}"
    if failed:
        text += f"; {len(failed)} could not be loaded, {_some(failed)}"
    print_line(printable(text))


def describe_models(models: Sequence[Mapping[str, str]]) -> str:
    """Return the signature of a model, or of several if they are short; else the names of some."""
    if not models:
        return "no model"
    signatures = [f"{model['name']}{model['signature']}, {model['batching']}" for model in models]
    if len(models) == 1 or len(text := "; ".join(signatures)) <= _MOST_CHARACTERS:
        return signatures[0] if len(models) == 1 else text
    return (
        f"{len(models)} models, {_some([model['name'] for model in models])} (tensorferry models lists them)"
    )


def _some(names: Sequence[str]) -> str:
    shown = list(names[:_MAX_MODELS_SHOWN])
    while len(shown) > 1 and len(", ".join(shown)) > _MOST_CHARACTERS:
        shown.pop()
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
