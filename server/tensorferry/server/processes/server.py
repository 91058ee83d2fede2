"""Life cycle of a server process, as the supervisor orders it."""

from __future__ import annotations

import errno
import logging
import os
import queue
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import grpc

from tensorferry.server.app import App, OneOfSeveral
from tensorferry.server.config.checks import check
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import ConfigError, StartError
from tensorferry.server.grpc_server import Listener
from tensorferry.server.inference.suspects.crash_watch import CrashWatch
from tensorferry.server.observability.logs import logs
from tensorferry.server.observability.monitoring.processes import process_statuses
from tensorferry.server.processes.division import share_of
from tensorferry.server.processes.in_child import Parent, exit_at_once
from tensorferry.server.processes.messages import MAX_FIELDS_BYTES
from tensorferry.server.processes.peers import Peers
from tensorferry.server.processes.running_page import RunningPage
from tensorferry.server.processes.suspect_requests import TrialLock
from tensorferry.server.startup import exclude_from_collection, print_ready_line, read_config
from tensorferry.server.system.threads import ThreadKind, new_thread, watch_threads

_log = logging.getLogger("tensorferry.server")

# Of the reason why a process cannot serve. A character has at most 12 bytes in JSON.
_MOST_CHARACTERS = MAX_FIELDS_BYTES // 16
# No method that exists, so that it needs no authorization, and no line of a log tells of it.
_HEARTBEAT = "/tensorferry.Heartbeat/Ask"
# Less than the time between two pings.
_HEARTBEAT_SECONDS = 8.0


def main(arguments: Sequence[str]) -> NoReturn:
    """Serve until the supervisor says to drain, or is gone."""
    supervisor = Parent(arguments[0])
    message = supervisor.receive()
    if message is None:
        exit_at_once()
    try:
        config = read_config(arguments[1:])
        output = logs.configure(config.log_format, config.log_level)
        watch_threads(output.flush)
        process = ServerProcess(config, supervisor, message.fields, output)
    except ConfigError as error:
        # The file has changed since the supervisor read it.
        _report(error, supervisor)
        exit_at_once()
    process.start()
    status = process.endings.get()
    output.flush()
    # A worker, or the thread that loads models, can still be in ONNX Runtime. It would abort the process if it returned
    # while the interpreter shuts down.
    os._exit(status)


class Heartbeat:
    """Calls its own process by a private socket, so that the thread which serves all calls must work for an answer.

    `alive` is called for each call that gets an answer, which is UNIMPLEMENTED. It is also called if the process has no free
    file for the connection: other connections have taken them, and may be served. Not thread-safe.
    """

    def __init__(self, path: Path, alive: Callable[[], None]) -> None:
        # That of the process before, which was killed.
        path.unlink(missing_ok=True)
        self.socket = str(path)
        self._alive = alive
        self._call: Any = None

    def ask(self) -> Any:
        """Make a call, and return it without waiting for its answer."""
        if self._call is None:
            self._call = grpc.insecure_channel(f"unix:{self.socket}").unary_unary(_HEARTBEAT)
        call = self._call.future(b"", timeout=_HEARTBEAT_SECONDS)
        call.add_done_callback(self._answered)
        return call

    def _answered(self, call: Any) -> None:
        silent = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        if call.code() not in silent or not _has_free_file():
            self._alive()


def _has_free_file() -> bool:
    try:
        os.close(os.eventfd(0))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


class ServerProcess:
    """One of several server processes. `start` has the fields of the supervisor's first message.

    `endings` gets the status to exit with. ConfigError if `config` contradicts the options of the supervisor's start.
    """

    def __init__(
        self, config: ServerConfig, supervisor: Parent, start: Mapping[str, Any], output: logs.LogOutput
    ) -> None:
        count, folder = start["processes"], Path(start["folder"])
        self.endings: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._supervisor = supervisor
        sockets = {name: _inherited(fd) for name, fd in start["sockets"].items()}
        # These are the supervisor's, although the file of --config may have changed since its start. It has decided, too,
        # what `--processes auto` means.
        config = replace(
            config,
            processes=count,
            metrics_port=_port_of(sockets.get("metrics")),
            http_port=_port_of(sockets.get("http")),
            **start["options"],
        )
        check(config)
        self._config = share_of(config, count)
        self._listens_first: bool = start["listens_first"]
        self._trial = TrialLock(folder, self._all_serve)
        self._watch = CrashWatch(RunningPage(start["page"]), self._trial)
        self._heartbeat = Heartbeat(folder / f"self-{start['index']}", lambda: supervisor.send("pong"))
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
                sockets,
            ),
        )

    def start(self) -> None:
        """Load the models and serve, on a thread."""
        self._in_thread("start", self._start)

    def _start(self) -> None:
        if self._listens_first:
            self._app.start()
        self._supervisor.obey(
            {
                "processes": self._on_processes,
                "findings": self._watch.on_findings,
                "ping": lambda fields: self._heartbeat.ask(),
                "print_ready": lambda fields: print_ready_line(self._app),
                "drain": lambda fields: self._begin_drain(),
            }
        )
        self._app.load()
        if not self._listens_first:
            self._app.start()
        exclude_from_collection()
        self._supervisor.send("ready")

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
                _report(error, self._supervisor)
                self.endings.put(1)

        new_thread(name, run, ThreadKind.ESSENTIAL).start()


def _report(error: Exception, supervisor: Parent) -> None:
    """Send the reason why this process cannot serve."""
    supervisor.send("failed", {"message": str(error)[:_MOST_CHARACTERS]})


def _port_of(listening: socket.socket | None) -> int | None:
    return None if listening is None else listening.getsockname()[1]


def _inherited(fd: int) -> socket.socket:
    """Return a socket that the supervisor has left open for this process."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
