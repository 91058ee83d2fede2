"""`tensorferry serve`: the server's command line, its life cycle, and its exit codes."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from tensorferry.server.app import App
from tensorferry.server.cli.signals import forward_signals, ignore_signals
from tensorferry.server.config.flags import CommandParser, add_flags, read_flags
from tensorferry.server.config.load import load_config, unknown_variables
from tensorferry.server.config.server_config import OPTIONS, ServerConfig
from tensorferry.server.errors import ConfigError, StartError
from tensorferry.server.models.registry import Model
from tensorferry.server.telemetry import logs
from tensorferry.server.threads import watch_threads

_log = logging.getLogger("tensorferry.server")


@dataclass(frozen=True, slots=True)
class _Signal:
    """SIGTERM or SIGINT was received."""

    number: int


@dataclass(frozen=True, slots=True)
class _ServiceLost:
    """The process can serve nothing any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class _DeviceLost:
    """A model has no instance that works, and only a restart can help."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Failure:
    """Start or drain raised this."""

    error: BaseException


class _Progress(Enum):
    STARTED = "every model is loaded"
    STOPPED = "every worker has ended"
    ABANDONED = "stopped, but a worker still runs"


_Event: TypeAlias = _Signal | _ServiceLost | _DeviceLost | _Failure | _Progress
_Events: TypeAlias = "queue.SimpleQueue[_Event]"

# The ready line describes at most this many models.
_MAX_MODELS_SHOWN = 8

# The garbage collector runs after this many more allocations than deallocations of containers: about the number that
# hundreds of requests in flight hold.
_GC_THRESHOLD = 50_000


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tensorferry serve",
        usage="tensorferry serve [MODEL ...] [--FLAG VALUE ...]",
        description="Serve ONNX models over gRPC (Open Inference Protocol v2), with dynamic batching.",
        epilog="Each option is also an environment variable (TENSORFERRY_PORT) and a key in the --config file "
        "(port = 8001; models = [...]). A flag has precedence over the environment, and the environment over the file.",
        allow_abbrev=False,
    )
    parser.add_argument("models", metavar="MODEL", nargs="*", help="path.onnx or name=path.onnx")
    parser.add_argument("--config", metavar="FILE", help="TOML file (also TENSORFERRY_CONFIG)")
    add_flags(parser, OPTIONS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Return 0 after a clean stop, 1 if the server cannot start, 2 for bad options."""
    arguments, flags = read_flags(_parser(), argv, OPTIONS)
    file = arguments["config"] or os.environ.get("TENSORFERRY_CONFIG")
    try:
        config = load_config(arguments["models"], flags, os.environ, Path(file) if file else None)
    except ConfigError as error:
        print(f"tensorferry serve: {error}", file=sys.stderr)
        return 2
    output = logs.configure(config.log_format, config.log_level)
    for warning in unknown_variables(os.environ):
        _log.warning("%s", warning)
    return _serve(config, output)


def _serve(config: ServerConfig, output: logs.LogOutput) -> int:
    events: _Events = queue.SimpleQueue()
    forward_signals(lambda number: events.put(_Signal(number)))
    watch_threads(lambda reason: events.put(_ServiceLost(reason)))

    def on_device_loss(reason: str) -> None:
        if config.exit_on_device_loss:
            events.put(_DeviceLost(reason))

    app = App(config, output, on_device_loss)
    _run_in_thread("start", _start, app, events)
    started = draining = device_lost = False
    while True:
        match events.get():
            case _Progress.STARTED:
                started = True
            case _Progress() as progress:
                _log.info("stopped")
                ignore_signals()
                code = 1 if device_lost else 0
                # A worker, or a thread that loads models, can still be in ONNX Runtime. It would abort the process if it
                # returned while the interpreter shuts down.
                return code if progress is _Progress.STOPPED and started else _exit_now(code, output)
            case _DeviceLost(reason):
                device_lost = True
                if not draining:
                    draining = True
                    _log.critical(
                        "%s: draining for at most %g s, then exiting (--exit-on-device-loss)",
                        reason,
                        config.drain_seconds,
                    )
                    _run_in_thread("drain", _drain, app, events)
            case _ServiceLost(reason):
                _log.critical("%s: exiting at once, so that the server can be restarted", reason)
                _exit_now(1, output)
            case _Failure(StartError() as error):
                output.put(f"tensorferry serve: {error}")
                _exit_now(1, output)
            case _Failure(error):
                _log.error("the server failed to %s", "drain" if draining else "start", exc_info=error)
                _exit_now(1, output)
            case _Signal(number):
                name = signal.Signals(number).name
                if draining:
                    _log.warning("%s received again: stopping at once", name)
                    _exit_now(128 + number, output)
                draining = True
                if config.drain_delay:
                    _log.info("%s received: requests are accepted for %g s more", name, config.drain_delay)
                _log.info("%s received: draining for at most %g s", name, config.drain_seconds)
                _run_in_thread("drain", _drain, app, events)


def _start(app: App, events: _Events) -> None:
    app.start()
    app.load()
    # Loaded objects stay, so they are excluded from collection. Requests make no cycles, so collection is rarely needed.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    _print_ready_line(app)
    events.put(_Progress.STARTED)


def _drain(app: App, events: _Events) -> None:
    if not app.drain():
        _log.warning("requests were still running after %g s: they fail now", app.config.drain_seconds)
    events.put(_Progress.STOPPED if app.stop() else _Progress.ABANDONED)


def _run_in_thread(name: str, work: Callable[[App, _Events], None], app: App, events: _Events) -> None:
    def run() -> None:
        try:
            work(app, events)
        except BaseException as error:
            events.put(_Failure(error))

    threading.Thread(target=run, name=name, daemon=True).start()


def _exit_now(code: int, output: logs.LogOutput) -> NoReturn:
    """End the process without waiting for calls, for models that are being loaded, or for a device that hangs."""
    output.flush()
    os._exit(code)


def _print_ready_line(app: App) -> None:
    """Print the one line on stdout: the server is ready."""
    models = app.registry.models()
    metrics = app.metrics_url
    if app.config.log_format == "json":
        line: dict[str, Any] = {
            "message": "ready" if app.service.ready else "listening, but not ready",
            "address": app.address,
            "transport": app.transport,
            "models": [
                {"name": m.name, "version": m.version, "signature": str(m.signature), "batching": m.batching}
                for m in models
            ],
        }
        if metrics is not None:
            line["metrics"] = metrics
        print(json.dumps(line), flush=True)
    else:
        address = app.address if metrics is None else f"{app.address}, metrics on {metrics}"
        state = "ready" if app.service.ready else "listening, but not ready,"
        print(f"tensorferry {version('tensorferry')} {state} on {address}: {_describe(models)}", flush=True)


def _describe(models: Sequence[Model]) -> str:
    """Return the signatures of all models if there are few, else the names of some."""
    if not models:
        return "no model"
    if len(models) <= _MAX_MODELS_SHOWN:
        return "; ".join(map(str, models))
    names = ", ".join(model.name for model in models[:_MAX_MODELS_SHOWN])
    return f"{len(models)} models, {names} and {len(models) - _MAX_MODELS_SHOWN} more (tensorferry models lists them)"
