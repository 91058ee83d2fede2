"""Life cycle of a server process, as the supervisor orders it."""

from __future__ import annotations

import logging
import os
import queue
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tensorferry.server.app import App, OneOfSeveral
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.grpc_server import Listener
from tensorferry.server.inference.crash_watch import CrashWatch
from tensorferry.server.monitoring.processes import process_statuses
from tensorferry.server.processes.division import share_of
from tensorferry.server.processes.heartbeat import Heartbeat
from tensorferry.server.processes.in_child import InChild
from tensorferry.server.processes.peers import Peers
from tensorferry.server.processes.running_page import RunningPage
from tensorferry.server.processes.trial import Trial
from tensorferry.server.startup import prepare_collector, print_ready_line, read_config, ready_fields
from tensorferry.server.telemetry import logs
from tensorferry.server.threads import ThreadKind, new_thread, watch_threads

_log = logging.getLogger("tensorferry.server")


def main(control_fd: int, arguments: Sequence[str]) -> NoReturn:
    """Serve until the supervisor says to drain, or is gone."""
    config = read_config(arguments)
    output = logs.configure(config.log_format, config.log_level)
    control = InChild(control_fd)
    watch_threads(output.flush)
    process = ServerProcess(config, control, output)
    process.start()
    status = process.endings.get()
    output.flush()
    # A worker, or the thread that loads models, can still be in ONNX Runtime. It would abort the process if it returned
    # while the interpreter shuts down.
    os._exit(status)


class ServerProcess:
    """One of several server processes. `endings` gets the status to exit with."""

    def __init__(self, config: ServerConfig, control: InChild, output: logs.LogOutput) -> None:
        start = control.start
        count, folder = start["processes"], Path(start["folder"])
        self.endings: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._control = control
        # The supervisor has decided what `--processes auto` means.
        self._config = share_of(replace(config, processes=count), count)
        self._listens_first: bool = start["listens_first"]
        self._trial = Trial(folder, self._all_serve)
        self._watch = CrashWatch(RunningPage(start["page"]), self._trial)
        self._heartbeat = Heartbeat(folder / f"self-{start['index']}", lambda: control.send("pong"))
        # Changed by the control thread only.
        self._draining = False
        # The processes of the supervisor's last message. Replaced as a whole, so that any thread can read it.
        self._processes: Sequence[Mapping[str, Any]] = ()
        self._app = App(
            self._config,
            output,
            self._on_device_loss,
            OneOfSeveral(
                Listener(config.host, start["port"], reuse_port=True, private=self._heartbeat.socket),
                Peers(folder, start["index"], count),
                self._watch,
                lambda: process_statuses(self._processes),
                _inherited(start["metrics_fd"]),
            ),
        )

    def start(self) -> None:
        """Load the models and serve, on a thread."""
        control = self._control
        control.on("processes", self._on_processes)
        control.on("findings", self._watch.on_findings)
        control.on("ping", lambda fields: self._heartbeat.ask())
        control.on("print_ready", lambda fields: self._print_ready())
        control.on("drain", lambda fields: self._begin_drain())
        self._in_thread("start", self._start)

    def _start(self) -> None:
        # While models load, native code may let no other thread run.
        self._watch.page.set_loading(True)
        if self._listens_first:
            self._app.start()
        self._control.run()
        self._app.load()
        if not self._listens_first:
            self._app.start()
        prepare_collector()
        self._watch.page.set_loading(False)
        self._control.send("ready")

    def _print_ready(self) -> None:
        config, app = self._config, self._app
        print_ready_line(config.log_format, app.address, app.transport, ready_fields(app))

    def _all_serve(self) -> bool:
        return all(process["state"] == "serving" for process in self._processes)

    def _on_processes(self, fields: Mapping[str, Any]) -> None:
        self._processes = fields["processes"]
        self._trial.processes_changed()

    def _begin_drain(self) -> None:
        """Drain at the first order: one to be replaced may be followed by one of the whole server."""
        if not self._draining:
            self._draining = True
            self._in_thread("drain", self._drain)

    def _drain(self) -> None:
        if not self._app.drain():
            _log.warning("requests were still running after %g s: they fail now", self._config.drain_seconds)
        self.endings.put(0 if self._app.stop() else 1)

    def _on_device_loss(self, reason: str) -> None:
        if self._config.exit_on_device_loss:
            self._in_thread("drain", lambda: self._replace_device(reason))

    def _replace_device(self, reason: str) -> None:
        seconds = self._config.drain_seconds
        _log.critical("%s: draining for at most %g s (--exit-on-device-loss)", reason, seconds)
        self._app.drain()
        _log.critical("%s: the process exits, and is started again", reason)
        self.endings.put(1)

    def _in_thread(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except StartError as error:
                self._control.failed(str(error))
                self.endings.put(1)

        new_thread(name, run, ThreadKind.ESSENTIAL).start()


def _inherited(fd: int | None) -> socket.socket | None:
    """Return a socket that the supervisor has left open for this process."""
    if fd is None:
        return None
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
