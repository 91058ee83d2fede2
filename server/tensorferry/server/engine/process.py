"""Life cycle of the engine process, as the supervisor orders it."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

from tensorferry.server.app import App, EngineOptions
from tensorferry.server.engine.front_end_port import ResponseBursts, mark_begun
from tensorferry.server.engine.loop import EngineLoop
from tensorferry.server.errors import StartError
from tensorferry.server.link import LinkFiles
from tensorferry.server.monitoring.processes import process_statuses
from tensorferry.server.startup import prepare_collector, read_config, ready_fields, use_log_levels
from tensorferry.server.supervisor.child_process import ChildProcess
from tensorferry.server.supervisor.control import Message
from tensorferry.server.telemetry import logs
from tensorferry.server.threads import ThreadKind, new_thread, watch_threads

_log = logging.getLogger("tensorferry.server")


def main(control_fd: int, arguments: Sequence[str]) -> NoReturn:
    """Serve front-ends until the supervisor says to stop, or is gone."""
    config = read_config(arguments)
    output = logs.configure(config.log_format, config.log_level)
    control = ChildProcess(control_fd)
    use_log_levels(output, control.start["log_levels"])
    # The supervisor has decided what `--front-ends auto` means.
    config = replace(config, front_ends=control.start["front_ends"])
    if control.start["trial"]:
        # What only one engine can have: a port, and files that are not appended to. Requests come one at a time, so that none
        # has others to wait for.
        config = replace(config, metrics_port=None).for_all_models(max_queue_delay=0.0)
    # The status to exit with.
    endings: queue.SimpleQueue[int] = queue.SimpleQueue()
    bursts = ResponseBursts()
    health = _Health(control, lambda: app.registry.complete)
    # Held while the log levels are read and sent, so that the last message has the newest.
    log_levels_lock = threading.Lock()
    # The processes of the supervisor's last message. Replaced as a whole, so that any thread can read it.
    reported: Sequence[Mapping[str, Any]] = ()

    def processes(message: Message) -> None:
        nonlocal reported
        reported = message.fields["processes"]

    def publish_log_levels() -> None:
        with log_levels_lock:
            control.send("log_levels", levels=asdict(output.levels))

    def on_device_loss(reason: str) -> None:
        if config.exit_on_device_loss:
            in_thread("drain", lambda: replace_device(reason))

    def replace_device(reason: str) -> None:
        _log.critical("%s: draining for at most %g s (--exit-on-device-loss)", reason, config.drain_seconds)
        drain()
        _log.critical("%s: the engine exits, and is started again", reason)
        endings.put(1)

    watch_threads(output.flush)
    app = App(
        config,
        output,
        on_device_loss,
        EngineOptions(
            address=control.start["address"],
            unix_socket=control.start["socket"],
            response_hook=bursts,
            batch_started=mark_begun,
            publish_health=health.publish,
            publish_log_levels=publish_log_levels,
            refused=lambda: loop.refused(),
            gauges=lambda: loop.gauges(),
            processes=lambda: process_statuses(reported),
            metrics_socket=_inherited(control.start["metrics_fd"]),
        ),
    )
    loop = EngineLoop(app.service, bursts)

    def link(message: Message) -> None:
        front_end, generation = message.fields["front_end"], message.fields["generation"]

        def broken(why: str) -> None:
            _log.error("front-end %d broke the rules of its link and is cut off: %s", front_end, why)
            control.send("front_end_broken", front_end=front_end, generation=generation)

        loop.connect(front_end, LinkFiles(*message.take_fds(3)), broken)

    def start() -> None:
        app.start()
        loop.start()
        control.run()
        app.load()
        prepare_collector()
        control.send("ready", **ready_fields(app))

    def drain() -> None:
        if not app.drain():
            _log.warning("requests were still running after %g s: they fail now", config.drain_seconds)

    def stop() -> None:
        loop.stop()
        endings.put(0 if app.stop() else 1)

    def in_thread(name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except StartError as error:
                control.failed(str(error))
                endings.put(1)

        new_thread(name, run, ThreadKind.ESSENTIAL).start()

    control.on("link", link)
    control.on("front_end_lost", lambda message: loop.disconnect(message.fields["front_end"]))
    control.on("processes", processes)
    # Front-ends drain at the same time. The engine serves them until it is told to stop.
    control.on("drain", lambda message: in_thread("drain", drain))
    control.on("stop", lambda message: in_thread("stop", stop))
    in_thread("start", start)
    status = endings.get()
    output.flush()
    # A worker, or the thread that loads models, can still be in ONNX Runtime. It would abort the process if it returned
    # while the interpreter shuts down.
    os._exit(status)


def _inherited(fd: int | None) -> socket.socket | None:
    """Return a socket that the supervisor has left open for this process."""
    if fd is None:
        return None
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


class _Health:
    """The health of all models, sent to the supervisor when it changes. Thread-safe.

    `loaded` returns whether the models of the start were all tried: front-ends send requests only from then on.
    """

    def __init__(self, control: ChildProcess, loaded: Callable[[], bool]) -> None:
        self._control = control
        self._loaded = loaded
        # Guards _serving. A message is sent while it is held, so that the last one is the newest.
        self._lock = threading.Lock()
        self._serving: dict[str, bool] = {}

    def publish(self, serving: Mapping[str, bool], ready: bool) -> None:
        """Send the health of the server and of every model. `serving` has the models whose health may have changed."""
        with self._lock:
            self._serving.update(serving)
            fields: dict[str, Any] = {"serving": self._serving, "ready": ready, "loaded": self._loaded()}
            self._control.send("health", **fields)
