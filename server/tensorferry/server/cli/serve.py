"""`tensorferry serve`: the command line of the server, its signals and its exit codes."""

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
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from tensorferry.batcher.supervision import Pauses, last
from tensorferry.server.app import App
from tensorferry.server.config.flags import CommandParser, add_flags, read_flags
from tensorferry.server.config.load import load_config, unknown_variables
from tensorferry.server.config.server_config import OPTIONS, ServerConfig
from tensorferry.server.errors import ConfigError, StartError
from tensorferry.server.models.registry import Model
from tensorferry.server.telemetry import logs
from tensorferry.server.threads import watch_threads

_log = logging.getLogger("tensorferry.server")

_Events: TypeAlias = "queue.SimpleQueue[int | BaseException | str]"


class _Dead(Exception):
    """The event that nothing is served any more, nor can be by this process."""


class _Lost(Exception):
    """The event that a model has lost its devices for good."""


# Models that the readiness line describes.
_MOST_SHOWN = 8

# Containers made and not freed since the last look, in the number that many requests in flight keep.
_GC_THRESHOLD = 50_000


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tensorferry serve",
        usage="tensorferry serve [MODEL ...] [--FLAG VALUE ...]",
        description="Serves ONNX models over gRPC (Open Inference Protocol v2), batching single requests.",
        epilog="Each option is also an environment variable (TENSORFERRY_PORT) and a key in the --config file "
        "(port = 8001; models = [...]). A flag counts before the environment, that before the file.",
        allow_abbrev=False,
    )
    parser.add_argument("models", metavar="MODEL", nargs="*", help="path.onnx or name=path.onnx")
    parser.add_argument("--config", metavar="FILE", help="TOML file (also TENSORFERRY_CONFIG)")
    add_flags(parser, OPTIONS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM or Ctrl-C. 0 after a clean stop, 1 when it cannot start, 2 for bad options."""
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
    # The starting and stopping threads report here, and the one that hears signals.
    events: _Events = queue.SimpleQueue()
    _hear_signals(events)
    watch_threads(lambda reason: events.put(_Dead(reason)))
    lost = (lambda reason: events.put(_Lost(reason))) if config.exit_on_device_loss else (lambda reason: None)
    app = App(config, output, lost)
    _in_thread("start", _start, app, events)
    started, draining, code = False, False, 0
    while True:
        event = events.get()
        if event == "started":
            started = True
        if isinstance(event, _Dead):
            _log.critical("%s: ending at once, to be started anew", event)
            _leave(1, output)
        if isinstance(event, _Lost):
            code = 1
            if not draining:
                draining = True
                _log.critical(
                    "%s: draining for at most %g s, and ending (--exit-on-device-loss)",
                    event,
                    config.drain_seconds,
                )
                _in_thread("drain", _drain, app, events)
            continue
        if event in ("drained", "abandoned"):
            _log.info("stopped")
            # One that comes now must not turn a clean stop into a death by signal.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            # A thread that comes back from ONNX Runtime into an interpreter that is being taken
            # down would abort the process: a worker's, or the one that still loads models.
            return code if event == "drained" and started else _leave(code, output)
        if isinstance(event, StartError):
            output.put(f"tensorferry serve: {event}")
            _leave(1, output)
        if isinstance(event, BaseException):
            _log.error("the server failed to %s", "drain" if draining else "start", exc_info=event)
            _leave(1, output)
        if isinstance(event, int):
            name = signal.Signals(event).name
            if draining:
                _log.warning("%s received again: stopping at once", name)
                _leave(128 + event, output)
            draining = True
            if config.drain_delay:
                _log.info("%s received: requests are accepted for %g s more", name, config.drain_delay)
            _log.info("%s received: draining for at most %g s", name, config.drain_seconds)
            _in_thread("drain", _drain, app, events)


def _hear_signals(events: _Events) -> None:
    """From now on SIGTERM and SIGINT are events.

    By a pipe and a thread that reads it: which thread of the process takes a signal is the kernel's
    choice, any of them writes to the pipe, but only the main one runs handlers, and nothing wakes
    it for a signal that another took.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: None)

    def read() -> None:
        while received := os.read(reading, 1):
            events.put(received[0])

    def hear() -> None:
        last(
            read,
            lambda fault: _log.error("hearing of signals ended unexpectedly; it goes on", exc_info=fault),
            Pauses(),
        )

    threading.Thread(target=hear, name="signals", daemon=True).start()


def _start(app: App, events: _Events) -> None:
    app.start()
    app.load()
    # What is loaded stays. What requests leave behind holds no cycles, so it is seldom looked at.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    _announce(app)
    events.put("started")


def _drain(app: App, events: _Events) -> None:
    if not app.drain():
        _log.warning("requests were still running after %g s: they fail now", app.config.drain_seconds)
    events.put("drained" if app.stop() else "abandoned")


def _in_thread(name: str, work: Callable[[App, _Events], None], app: App, events: _Events) -> None:
    def run() -> None:
        try:
            work(app, events)
        except BaseException as error:
            events.put(error)

    threading.Thread(target=run, name=name, daemon=True).start()


def _leave(code: int, output: logs.LogOutput) -> NoReturn:
    """Ends the process without waiting for calls, models being loaded, or a device that hangs."""
    output.flush()
    os._exit(code)


def _announce(app: App) -> None:
    """The one line on stdout that says: ready."""
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
        where = app.address if metrics is None else f"{app.address}, metrics on {metrics}"
        state = "ready" if app.service.ready else "listening, but not ready,"
        print(f"tensorferry {version('tensorferry')} {state} on {where}: {_listed(models)}", flush=True)


def _listed(models: Sequence[Model]) -> str:
    """All models with their signatures if they are few, else the names of some."""
    if not models:
        return "no model"
    if len(models) <= _MOST_SHOWN:
        return "; ".join(map(str, models))
    names = ", ".join(model.name for model in models[:_MOST_SHOWN])
    return (
        f"{len(models)} models, {names} and {len(models) - _MOST_SHOWN} more (tensorferry models lists them)"
    )
