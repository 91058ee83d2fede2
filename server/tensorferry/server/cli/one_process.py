"""Life cycle of `tensorferry serve` in one process, and its exit codes."""

from __future__ import annotations

import logging
import os
import queue
import signal
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import NoReturn, TypeAlias

from tensorferry.server.app import App
from tensorferry.server.cli.signals import forward_signals, ignore_signals
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.names import printable_lines
from tensorferry.server.observability.logs import logs
from tensorferry.server.startup import exclude_from_collection, print_ready_line
from tensorferry.server.system.threads import ThreadKind, new_thread, watch_threads

_log = logging.getLogger("tensorferry.server")


class _Progress(Enum):
    STARTED = "every model is loaded"
    STOPPED = "every worker has ended"
    ABANDONED = "stopped, but a worker still runs"


# The number of SIGTERM or SIGINT; why a model has no instance that works, if only a restart can help; or what start or drain
# raised.
_Event: TypeAlias = int | str | BaseException | _Progress
_Events: TypeAlias = "queue.SimpleQueue[_Event]"


def run_one_process(config: ServerConfig, output: logs.LogOutput) -> int:
    """Serve until SIGTERM or Ctrl-C. Return 0 after a clean stop, 1 if the server cannot start."""
    events: _Events = queue.SimpleQueue()
    # Operators who gave --processes expect that SIGHUP replaces processes, and not that it ends the only one.
    forward_signals(events.put, None if config.processes == 1 else _warn_of_hangup)
    config = replace(config, processes=1)
    watch_threads(output.flush)

    def on_device_loss(reason: str) -> None:
        if config.exit_on_device_loss:
            events.put(reason)

    app = App(config, output, on_device_loss)
    _run_in_thread("start", _start, app, events)
    started = signalled = draining = device_lost = False
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
            case str(reason):
                device_lost = True
                if not draining:
                    draining = True
                    _log.critical(
                        "%s: draining for at most %g s, then exiting (--exit-on-device-loss)",
                        reason,
                        config.drain_seconds,
                    )
                    _run_in_thread("drain", _drain, app, events)
            case StartError() as error:
                output.put(printable_lines(f"tensorferry serve: {error}"))
                _exit_now(1, output)
            case BaseException() as error:
                _log.error("the server failed to %s", "drain" if draining else "start", exc_info=error)
                _exit_now(1, output)
            case int(number):
                name = signal.Signals(number).name
                if signalled:
                    _log.warning("%s received again: stopping at once", name)
                    _exit_now(128 + number, output)
                signalled = True
                if draining:
                    _log.info("%s received: the drain goes on", name)
                    continue
                draining = True
                if config.drain_delay:
                    _log.info("%s received: requests are accepted for %g s more", name, config.drain_delay)
                _log.info("%s received: draining for at most %g s", name, config.drain_seconds)
                _run_in_thread("drain", _drain, app, events)


def _warn_of_hangup() -> None:
    _log.warning(
        "SIGHUP received: nothing is replaced, because the server is one process; restart it to read changed files"
    )


def _start(app: App, events: _Events) -> None:
    app.start()
    app.load()
    exclude_from_collection()
    print_ready_line(app)
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
            events.put(error)

    new_thread(name, run, ThreadKind.ESSENTIAL).start()


def _exit_now(code: int, output: logs.LogOutput) -> NoReturn:
    """End the process without waiting for calls, for models that are being loaded, or for a device that hangs."""
    output.flush()
    os._exit(code)
