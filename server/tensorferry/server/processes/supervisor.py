"""Decisions of the supervisor: what follows when a server process reports, ends, or must end."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from tensorferry.server.names import printable_lines
from tensorferry.server.processes.child import Child, Ending
from tensorferry.server.processes.control import Message
from tensorferry.server.processes.heartbeats import Heartbeats
from tensorferry.server.processes.running_page import clear_page, create_page, read_page
from tensorferry.server.processes.settings import Environment, SupervisorSettings
from tensorferry.server.processes.slot import ServerSlot
from tensorferry.server.processes.suspects import Findings, Suspects
from tensorferry.server.processes.trial import remove_ended
from tensorferry.server.stop_signals import StopSignals

_log = logging.getLogger("tensorferry.server")

# Time for a process to end after its drain, or after it has closed its control channel.
EXIT_SECONDS = 10.0
# Time for killed processes to end. One that hangs in a driver ends later.
_KILLED_SECONDS = 2.0
# Findings that a process which is started later still gets.
_MOST_FINDINGS = 64


class _Phase(Enum):
    STARTING = "the server was never ready"
    RUNNING = "the server was ready"
    DRAINING = "all finish accepted requests"
    STOPPING = "every process is killed"


class Supervisor:
    """N server processes on one port. Not thread-safe: the event loop calls it on one thread.

    After each call, `exit_status` is set if the server has ended. `on_time` must be called at `next_time`. `folder` is
    private; the processes have sockets in it.
    """

    def __init__(
        self, settings: SupervisorSettings, environment: Environment, address: str, port: int, folder: Path
    ) -> None:
        self.exit_status: int | None = None
        self._settings = settings
        self._environment = environment
        self._now = environment.clock
        self._signals = StopSignals(environment.clock)
        self._address = address
        self._port = port
        self._folder = folder
        self._phase = _Phase.STARTING
        self._slots = [ServerSlot(index, create_page()) for index in range(settings.processes)]
        self._suspects = Suspects()
        # Those of the last ten minutes, for processes that are started.
        self._findings: deque[Findings] = deque(maxlen=_MOST_FINDINGS)
        # Processes that are to be replaced one by one. The first is being replaced.
        self._to_replace: deque[ServerSlot] = deque()
        # What the processes were last told of each other.
        self._published: list[dict[str, Any]] = []
        self._heartbeats = Heartbeats(environment.clock())
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
        return min(self._exit_at, self._heartbeats.at, *of_slots)

    def on_time(self) -> None:
        """Do what is due by now."""
        now = self._now()
        if now >= self._exit_at:
            self._exit(self._final_status)
            return
        for slot in self._slots:
            if slot.child is not None and now >= slot.kill_at:
                slot.kill_at = math.inf
                _log.error("%s has not ended in time: it is killed", slot)
                slot.child.kill()
            if now >= slot.start_at:
                self._start(slot)
        if now >= self._heartbeats.at:
            self._heartbeats.ask(self._slots, now)
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

    def on_end(self, slot: ServerSlot, ending: Ending) -> None:
        """Replace a child that has ended, or go on with the end of the server."""
        name, served, now = str(slot), slot.serving, self._now()
        delay = slot.end(now)
        if not ending.clean and self._phase is not _Phase.STOPPING:
            self._find_cause(slot, ending.signal)
        clear_page(slot.page)
        if self._phase is _Phase.STARTING and not served and not ending.signal:
            _log.error("%s ended during the start: %s", name, ending.description)
            self._stop(1)
        elif self._phase is _Phase.DRAINING:
            level = logging.INFO if ending.clean else logging.WARNING
            _log.log(level, "%s ended: %s", name, ending.description)
        elif self._is_being_replaced(slot) and served:
            _log.info("%s ended: %s", name, ending.description)
            self._start(slot)
        elif self._phase is not _Phase.STOPPING:
            self._replace(slot, name, ending, delay)
        if not any(self._children()):
            if self._phase is _Phase.STOPPING:
                self._exit(self._final_status)
            elif self._phase is _Phase.DRAINING:
                _log.info("stopped")
                self._exit(0)
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
        for slot in self._slots:
            slot.start_at = math.inf
            self._drain(slot)
        if not any(self._children()):
            _log.info("stopped")
            self._exit(0)
        self._publish()

    def _children(self) -> Iterator[Child]:
        return (slot.child for slot in self._slots if slot.child is not None)

    def _start(self, slot: ServerSlot) -> None:
        slot.begin(self._now())
        try:
            child = slot.child = self._environment.launch(slot)
        except OSError as error:
            self.on_end(slot, Ending(f"it cannot be started: {error}"))
            return
        if slot.restarts:
            _log.info("%s is started", slot)
        start = {
            "index": slot.index,
            "processes": len(self._slots),
            "address": self._address,
            "port": self._port,
            "folder": str(self._folder),
            "page": slot.page,
            "metrics_fd": self._settings.metrics_fd,
            # A process that replaces another takes connections only when its models are loaded.
            "listens_first": not slot.restarts,
        }
        child.send("start", start)
        self._published = []
        for findings in self._findings:
            if findings.until > self._now():
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
            seconds = slot.down_seconds(self._now())
            remove_ended(self._folder)
            _log.info("%s serves again, %.1f s after the last one ended", slot, seconds)
        if self._is_being_replaced(slot):
            self._to_replace.popleft()
            self._replace_next()

    def _on_failed(self, slot: ServerSlot, reason: str) -> None:
        if self._phase is _Phase.STARTING and not slot.serving:
            self._environment.print_error(f"tensorferry serve: {reason}")
            self._stop(1)
        elif self._phase is not _Phase.STOPPING:
            _log.error("%s cannot serve: %s", slot, reason)
            slot.kill_after(EXIT_SECONDS, self._now())

    def _find_cause(self, slot: ServerSlot, number: int) -> None:
        """Tell all processes what follows from the requests that ran in one that ended unexpectedly."""
        _, running = read_page(slot.page)
        if not running:
            return
        findings = self._suspects.after(running, number, self._now())
        self._findings.append(findings)
        if findings.refused:
            _log.error(
                "%s ended while it tried one request alone (hash %s): the same inputs are refused for ten minutes",
                slot.name,
                findings.refused,
            )
        else:
            _log.warning(
                "%s ended while %d requests ran: equal ones run alone for ten minutes",
                slot.name,
                len(running),
            )
        for child in self._children():
            child.send("findings", asdict(findings))

    def _replace(self, slot: ServerSlot, name: str, ending: Ending, delay: float) -> None:
        """Decide and log what follows the unexpected end of a child."""
        if self._is_being_replaced(slot):
            _log.error("%s did not start, so the others are not replaced", slot.name)
            self._to_replace.clear()
        slot.start_at = self._now() + delay
        when = f"in {delay:g} s" if delay else "at once"
        _log.error(
            "%s ended: %s; its calls fail with UNAVAILABLE; another is started %s",
            name,
            ending.description,
            when,
        )

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
        if not any(self._children()):
            self._exit(status)

    def _exit(self, status: int) -> None:
        if self.exit_status is None:
            self.exit_status = status

    def _publish(self) -> None:
        """Tell the processes of each other, if anything has changed. Status page and metrics show them."""
        if self._phase is _Phase.STOPPING:
            return
        processes: list[dict[str, Any]] = [dict(self._described(slot)) for slot in self._slots]
        if processes != self._published:
            self._published = processes
            for child in self._children():
                child.send("processes", {"processes": processes})

    def _described(self, slot: ServerSlot) -> Mapping[str, Any]:
        return {
            "name": slot.name,
            "pid": None if slot.child is None else slot.child.pid,
            "generation": slot.generation,
            "restarts": slot.restarts,
            "state": slot.state,
        }
