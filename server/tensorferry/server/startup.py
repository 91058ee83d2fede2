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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tensorferry.server.config.flags import CommandParser, add_flags, read_flags
from tensorferry.server.config.load import load_config
from tensorferry.server.config.server_config import OPTIONS, ServerConfig
from tensorferry.server.names import printable
from tensorferry.server.system import malloc
from tensorferry.server.system.installed_versions import imported
from tensorferry.server.transport import grpc_environment

if TYPE_CHECKING:
    from tensorferry.server.app import App

# The ready line describes at most this many models.
_MAX_MODELS_SHOWN = 8
# Of the models in the ready line. A model alone may have more.
_MOST_CHARACTERS = 100

# The garbage collector runs after this many more allocations than deallocations of containers: about the number that
# hundreds of requests in flight hold.
_GC_THRESHOLD = 50_000


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
    parser.add_argument("--config", metavar="FILE", help="TOML file (also TENSORFERRY_CONFIG)")
    add_flags(parser, OPTIONS)
    return parser


def read_config(arguments: Sequence[str]) -> ServerConfig:
    """Return the configuration of a command line and this process's environment. ConfigError for bad options."""
    parsed, flags = read_flags(command_parser(), arguments, OPTIONS)
    return load_config(parsed["models"], flags, os.environ, _file(parsed))


def config_file(arguments: Sequence[str]) -> Path | None:
    """Return the file of --config, or of its environment variable."""
    return _file(read_flags(command_parser(), arguments, OPTIONS)[0])


def _file(parsed: Mapping[str, Any]) -> Path | None:
    file = parsed["config"] or os.environ.get("TENSORFERRY_CONFIG")
    return Path(file) if file else None


def prepare_collector() -> None:
    """Exclude what was loaded from garbage collection. Requests make no cycles, so collection is rarely needed."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def ready_fields(app: App) -> Mapping[str, Any]:
    """Return what the ready line says of an application."""
    return {
        "ready": app.service.ready,
        "failed": app.registry.unavailable(),
        "metrics": app.metrics_url,
        "http": app.http_url,
        "models": [
            {"name": m.name, "version": m.version, "signature": str(m.signature), "batching": m.batching}
            for m in app.registry.models()
        ],
    }


def print_ready_line(log_format: str, address: str, transport: str, fields: Mapping[str, Any]) -> None:
    """Print the one line on stdout: the server is ready."""
    models, failed = fields["models"], fields["failed"]
    others = {name: fields[name] for name in ("http", "metrics") if fields[name]}
    if log_format == "json":
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": "info",
            "message": "ready" if fields["ready"] else "listening, but not ready",
            "address": address,
            "transport": transport,
            "models": models,
            "failed": failed,
        }
        print(json.dumps({**line, **others}), flush=True)
        return
    names = {"http": "HTTP", "metrics": "metrics"}
    where = ", ".join([address, *(f"{names[name]} on {url}" for name, url in others.items())])
    state = "ready" if fields["ready"] else "listening, but not ready,"
    text = f"tensorferry {version('tensorferry')} {state} on {where}: {describe_models(models)}"
    if failed:
        text += f"; {len(failed)} could not be loaded, {_some(failed)}"
    print(printable(text), flush=True)


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
