"""Decisions of the supervisor: what follows when a server process reports, ends, or must end."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tensorferry.server.names import printable_lines
from tensorferry.server.processes.child import Child, ExitStatus
from tensorferry.server.processes.messages import Message
from tensorferry.server.processes.running_page import clear_page, read_page
from tensorferry.server.processes.slot import PING_SECONDS, ServerSlot
from tensorferry.server.processes.suspect_requests import CauseFinder, Findings, end_abandoned_trial
from tensorferry.server.system.stop_signals import StopSignals

_log = logging.getLogger("tensorferry.server")

# Time for a process to end after its drain, or after it has closed its control channel.
EXIT_SECONDS = 10.0
# Time for killed processes to end. One that hangs in a driver ends later.
_KILLED_SECONDS = 2.0
# Findings that a process which is started later still gets.
_MOST_FINDINGS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorSettings:
    """The address, the number of server processes, the times of a drain, and the module of a process.

    `sockets` has the listening sockets of "metrics" and "http", as far as these are served; every process inherits them, and
    the supervisor closes them when it drains. `gpus` has the visible GPUs of each process, by their numbers; empty if all see the same.
    """

    host: str
    port: int
    processes: int
    drain_seconds: float
    drain_delay: float = 0.0
    sockets: Mapping[str, socket.socket] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    module: str = "tensorferry.server.processes"


class _Phase(Enum):
    STARTING = "the server was never ready"
    RUNNING = "the server was ready"
    DRAINING = "all finish accepted requests"
    STOPPING = "every process is killed"


class Supervisor:
    """N server processes on one port. Not thread-safe: the event loop calls it on one thread.

    After each call, `exit_status` is set if the server has ended. `on_time` must be called at `next_time`. `launch` starts
    the child of a slot (OSError if it cannot), `print_error` prints a line on stderr. `where` has the fields `address`,
    `port` and `folder` of each child's first message; the folder is private, and the processes have sockets in it.
    """

    def __init__(
        self,
        settings: SupervisorSettings,
        where: Mapping[str, Any],
        launch: Callable[[ServerSlot], Child],
        print_error: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.exit_status: int | None = None
        self._settings = settings
        self._where = where
        self._launch = launch
        self._print_error = print_error
        self._now = clock
        self._signals = StopSignals(clock)
        self._phase = _Phase.STARTING
        self._slots = [ServerSlot(index) for index in range(settings.processes)]
        self._causes = CauseFinder()
        # The last ones, for processes that are started.
        self._findings: deque[Findings] = deque(maxlen=_MOST_FINDINGS)
        # Processes that are to be replaced one by one. The first is being replaced.
        self._to_replace: deque[ServerSlot] = deque()
        # What the processes were last told of each other.
        self._published: list[Mapping[str, Any]] = []
        self._ping_at = clock() + PING_SECONDS
        # In the last phase: when to exit although a killed process has not ended, and the status.
        self._exit_at = math.inf
        self._final_status = 0

    def start(self) -> None:
        """Start every process."""
        for slot in self._slots:
            if self._phase is _Phase.STARTING:
                self._start(slot)
        self._publish()

    def close(self) -> None:
        """Close the files of the pages."""
        for slot in self._slots:
            os.close(slot.page)

    def next_time(self) -> float:
        """Return when `on_time` has something to do."""
        of_slots = (min(slot.start_at, slot.kill_at) for slot in self._slots)
        return min(self._exit_at, self._ping_at, *of_slots)

    def on_time(self) -> None:
        """Do what is due by now."""
        now = self._now()
        if now >= self._exit_at:
            self.exit_status = self._final_status
            return
        for slot in self._slots:
            if slot.child is not None and now >= slot.kill_at:
                slot.kill_at = math.inf
                _log.error("%s has not ended in time: it is killed", slot)
                slot.child.kill()
            if now >= slot.start_at:
                self._start(slot)
        if now >= self._ping_at:
            self._ping_at = now + PING_SECONDS
            for slot in self._slots:
                slot.ping()
        self._publish()

    def on_message(self, slot: ServerSlot, message: Message) -> None:
        """Act on a message of the slot's child."""
        match message.kind:
            case "failed":
                self._on_failed(slot, printable_lines(str(message.fields.get("message"))))
            case "ready":
                self._on_ready(slot)
            case "pong":
                slot.unanswered_pings = 0
            case kind:
                self.on_malformed(slot, f"the message {kind[:100]!r} is unknown")
        self._publish()

    def on_malformed(self, slot: ServerSlot, reason: str) -> None:
        """Kill a child that has sent what is no message."""
        _log.error("%s is killed, because its control channel is unusable (bug): %s", slot, reason)
        if slot.child is not None:
            slot.child.kill()

    def on_channel_closed(self, slot: ServerSlot) -> None:
        """Give a child that has closed its control channel some time to end."""
        slot.kill_after(EXIT_SECONDS, self._now())

    def on_end(self, slot: ServerSlot, status: ExitStatus) -> None:
        """Replace a child that has ended, or go on with the end of the server."""
        name, served, now = str(slot), slot.serving, self._now()
        delay = slot.end(now)
        # A process whose requests outlast its drain exits with status 1, or is killed: they are not the cause. A model may
        # exit with any status, also 0.
        ordered = slot.draining and status.signal in (0, signal.SIGKILL)
        if not (ordered or self._phase is _Phase.STOPPING):
            self._find_cause(slot, status.signal)
        clear_page(slot.page)
        if self._phase is _Phase.STARTING and not served and not status.signal:
            _log.error("%s ended during the start: %s", name, status.description)
            self._stop(1)
        elif self._phase is _Phase.DRAINING:
            level = logging.INFO if status.clean else logging.WARNING
            _log.log(level, "%s ended: %s", name, status.description)
        elif self._is_being_replaced(slot) and served:
            _log.info("%s ended: %s", name, status.description)
            self._start(slot)
        elif self._phase is not _Phase.STOPPING:
            self._replace(slot, name, status, delay)
        self._exit_if_all_ended()
        self._publish()

    def on_signal(self, number: int) -> None:
        """Drain at the first SIGTERM or SIGINT; end at once at the second. SIGHUP replaces the processes one by one."""
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            self._begin_to_replace()
            return
        settings = self._settings
        if not self._signals.counts() or self._phase is _Phase.STOPPING:
            return
        if self._phase is _Phase.DRAINING:
            _log.warning("%s received again: stopping at once", name)
            self._stop(128 + number)
            return
        self._phase = _Phase.DRAINING
        self._to_replace.clear()
        if settings.drain_delay:
            _log.info("%s received: requests are accepted for %g s more", name, settings.drain_delay)
        _log.info("%s received: draining for at most %g s", name, settings.drain_seconds)
        # So that no connection waits on a port once the processes have closed it.
        for listening in settings.sockets.values():
            listening.close()
        for slot in self._slots:
            slot.start_at = math.inf
            self._drain(slot)
        self._exit_if_all_ended()
        self._publish()

    def _start(self, slot: ServerSlot) -> None:
        settings = self._settings
        slot.begin(self._now())
        try:
            child = slot.child = self._launch(slot)
        except OSError as error:
            self.on_end(slot, ExitStatus(f"it cannot be started: {error}"))
            return
        if slot.restarts:
            _log.info("%s is started", slot)
        start = {
            "index": slot.index,
            "processes": len(self._slots),
            **self._where,
            "page": slot.page,
            "sockets": {name: each.fileno() for name, each in settings.sockets.items()},
            "options": {
                "host": settings.host,
                "drain_seconds": settings.drain_seconds,
                "drain_delay": settings.drain_delay,
            },
            # A process that replaces another takes connections only when its models are loaded.
            "listens_first": not slot.restarts,
        }
        child.send("start", start)
        self._published = []
        for findings in self._findings:
            # A client can be refused for longer than requests.
            until = max(findings.until, findings.client_until) if findings.client else findings.until
            if until > self._now():
                child.send("findings", asdict(findings))

    def _on_ready(self, slot: ServerSlot) -> None:
        if slot.serving:
            return
        slot.serving = True
        if self._phase is _Phase.STARTING and all(other.serving for other in self._slots):
            self._phase = _Phase.RUNNING
            # It knows what the line says.
            if slot.child is not None:
                slot.child.send("print_ready", {})
        elif slot.restarts:
            seconds = self._now() - slot.ended_at
            end_abandoned_trial(Path(self._where["folder"]))
            _log.info("%s serves again, %.1f s after the last one ended", slot, seconds)
        if self._is_being_replaced(slot):
            self._to_replace.popleft()
            self._replace_next()

    def _on_failed(self, slot: ServerSlot, reason: str) -> None:
        if self._phase is _Phase.STARTING and not slot.serving:
            self._print_error(f"tensorferry serve: {reason}")
            self._stop(1)
        elif self._phase is not _Phase.STOPPING:
            _log.error("%s cannot serve: %s", slot, reason)
            slot.kill_after(EXIT_SECONDS, self._now())

    def _find_cause(self, slot: ServerSlot, number: int) -> None:
        """Tell all processes what follows from the requests that ran in one that ended unexpectedly."""
        _, running = read_page(slot.page)
        if not running:
            return
        findings = self._causes.after(running, number, self._now())
        self._findings.append(findings)
        if findings.refused:
            text = "%s ended while it tried one request alone (hash %s): the same inputs are refused for ten minutes"
            _log.error(text, slot.name, findings.refused)
        else:
            text = "%s ended while %d requests ran: equal ones run alone for ten minutes"
            _log.warning(text, slot.name, len(running))
        self._send_all("findings", asdict(findings))

    def _replace(self, slot: ServerSlot, name: str, status: ExitStatus, delay: float) -> None:
        """Decide and log what follows the unexpected end of a child."""
        if self._is_being_replaced(slot):
            _log.error("%s did not start, so the others are not replaced", slot.name)
            self._to_replace.clear()
        slot.start_at = self._now() + delay
        when = f"in {delay:g} s" if delay else "at once"
        text = "%s ended: %s; its calls fail with UNAVAILABLE; another is started %s"
        _log.error(text, name, status.description, when)

    def _begin_to_replace(self) -> None:
        if self._phase is not _Phase.RUNNING:
            _log.warning("SIGHUP received: nothing is replaced, because the server is not running normally")
            return
        _log.info("SIGHUP received: the processes are replaced one by one")
        # What is being started may have read the files before they changed, so it is replaced when it is ready.
        current = list(self._to_replace)[:1]
        starting = [slot for slot in self._slots if not slot.serving and slot not in current]
        self._to_replace = deque([*current, *starting, *self._slots])
        if not current:
            self._replace_next()

    def _is_being_replaced(self, slot: ServerSlot) -> bool:
        return bool(self._to_replace) and self._to_replace[0] is slot

    def _replace_next(self) -> None:
        if not self._to_replace:
            _log.info("every process has been replaced")
            return
        slot = self._to_replace[0]
        if slot.serving:
            self._drain(slot)

    def _drain(self, slot: ServerSlot) -> None:
        """Let a process finish its requests and end."""
        if slot.child is None:
            return
        settings = self._settings
        slot.draining = True
        slot.kill_after(settings.drain_delay + settings.drain_seconds + EXIT_SECONDS, self._now())
        slot.child.send("drain", {})

    def _stop(self, status: int) -> None:
        """Kill every child, and exit when all have ended."""
        self._phase = _Phase.STOPPING
        self._final_status = status
        self._exit_at = self._now() + _KILLED_SECONDS
        for slot in self._slots:
            slot.start_at = slot.kill_at = math.inf
            if slot.child is not None:
                slot.child.kill()
        self._exit_if_all_ended()

    def _exit_if_all_ended(self) -> None:
        if self.exit_status is not None or any(slot.child is not None for slot in self._slots):
            return
        if self._phase is _Phase.STOPPING:
            self.exit_status = self._final_status
        elif self._phase is _Phase.DRAINING:
            _log.info("stopped")
            self.exit_status = 0

    def _publish(self) -> None:
        """Tell the processes of each other, if anything has changed. Status page and metrics show them."""
        if self._phase is _Phase.STOPPING:
            return
        processes = [slot.described() for slot in self._slots]
        if processes != self._published:
            self._published = processes
            self._send_all("processes", {"processes": processes})

    def _send_all(self, kind: str, fields: Mapping[str, Any]) -> None:
        for slot in self._slots:
            if slot.child is not None:
                slot.child.send(kind, fields)
