"""Decisions of the supervisor: what follows when a process of the server reports, ends, or must end."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from tensorferry.server.names import printable_lines
from tensorferry.server.stop_signals import StopSignals
from tensorferry.server.supervisor.child import Child, Ending
from tensorferry.server.supervisor.control import Message
from tensorferry.server.supervisor.links import create_twice
from tensorferry.server.supervisor.messages import is_count, is_health, is_refusal
from tensorferry.server.supervisor.pings import Pings
from tensorferry.server.supervisor.settings import Environment, SupervisorSettings
from tensorferry.server.supervisor.supervised_process import SupervisedProcess
from tensorferry.server.supervisor.trial_engine import TrialEngine

_log = logging.getLogger("tensorferry.server")

# Time for a child to end after its drain, or after it has closed its control channel.
EXIT_SECONDS = 10.0
# Time for killed children to end. One that hangs in a driver ends later.
_KILLED_SECONDS = 2.0


class _Phase(Enum):
    STARTING = "the server was never ready"
    RUNNING = "the server was ready"
    DRAINING = "all finish accepted requests"
    STOPPING_ENGINE = "the engine ends"
    STOPPING = "every child is killed"


class Supervisor:
    """One engine and N front-ends. Not thread-safe: the event loop calls it on one thread.

    After each call, `exit_status` is set if the server has ended. `on_time` must be called at `next_time`.
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
        # Private folder of the engine's socket.
        self._folder = folder
        self._phase = _Phase.STARTING
        self._engine = SupervisedProcess("the engine", settings.engine_module)
        self._trials = TrialEngine(
            SupervisedProcess("the engine for trials", settings.engine_module),
            self._start,
            lambda front_end: self._connect(front_end, self._trials.process, "trial"),
        )
        self._front_ends = [
            SupervisedProcess(f"front-end {index}", settings.front_end_module, index)
            for index in range(settings.front_ends)
        ]
        # The engine's last message about the health of its models; None while there is no engine.
        self._health: dict[str, Any] | None = None
        # What clients have last chosen by LogSettings; None if none has.
        self._log_levels: dict[str, Any] | None = None
        # What the engine was last told about the processes.
        self._published: list[dict[str, Any]] = []
        self._drain_deadline = math.inf
        self._pings = Pings(environment.clock())
        # In the last phase: when to exit although a killed child has not ended, and the status.
        self._exit_at = math.inf
        self._final_status = 0

    def start(self) -> None:
        """Start every process."""
        for process in self._processes():
            if self._phase is _Phase.STARTING:
                self._start(process)
        self._settle()

    def next_time(self) -> float:
        """Return when `on_time` has something to do."""
        of_processes = (min(process.start_at, process.kill_at) for process in self._processes())
        return min(self._exit_at, self._pings.at, *of_processes)

    def on_time(self) -> None:
        """Do what is due by now."""
        now = self._now()
        if now >= self._exit_at:
            self._exit(self._final_status)
            return
        for process in self._processes():
            if process.child is not None and now >= process.kill_at:
                process.kill_at = math.inf
                _log.error("%s has not ended in time: it is killed", process)
                process.child.kill()
            if now >= process.start_at:
                self._start(process)
        if now >= self._pings.at:
            self._pings.send(self._processes(), now)
        self._settle()

    def on_message(self, process: SupervisedProcess, message: Message) -> None:
        """Act on a message of the process's child. The caller closes the message."""
        fields = message.fields
        is_engine, is_trial = process is self._engine, process is self._trials.process
        match message.kind:
            case "failed":
                self._on_failed(process, printable_lines(str(fields.get("message"))))
            case "ready" if is_engine:
                self._on_serving(process, fields)
            case "listening" if not is_engine and fields.get("port") == self._port:
                self._on_serving(process, fields)
            case "health" if is_engine and is_health(fields):
                self._health = fields
                for front_end in self._living_front_ends():
                    front_end.send("health", fields)
            case "pong":
                process.unanswered_pings = 0
            case "log_levels" if is_engine and isinstance(levels := fields.get("levels"), dict):
                self._log_levels = levels
                for front_end in self._living_front_ends():
                    front_end.send("log_levels", fields)
            case "ready" if is_trial:
                process.serving = True
            case "health" if is_trial and is_health(fields):
                if fields["loaded"]:
                    self._trials.on_loaded()
            case "suspects" if process.index is not None and is_count(fields):
                self._trials.on_count(process, fields["count"])
            case "refuse" if process.index is not None and is_refusal(fields):
                self._trials.on_refuse(process, fields, self._front_ends)
            case "front_end_broken" if (is_engine or is_trial) and (
                broken := self._named(fields)
            ) is not None:
                self._kill_broken(broken, fields.get("generation", broken.generation))
            case kind:
                self.on_malformed(process, f"the message {kind[:100]!r} is unknown, or has wrong fields")
        self._settle()

    def on_malformed(self, process: SupervisedProcess, reason: str) -> None:
        """Kill a child that has sent what is no message."""
        _log.error("%s is killed, because its control channel is unusable (bug): %s", process, reason)
        if process.child is not None:
            process.child.kill()

    def on_channel_closed(self, process: SupervisedProcess) -> None:
        """Give a child that has closed its control channel some time to end."""
        process.kill_after(EXIT_SECONDS, self._now())

    def on_end(self, process: SupervisedProcess, ending: Ending) -> None:
        """Replace a child that has ended, or go on with the end of the server."""
        name, served, now = str(process), process.serving, self._now()
        delay = process.end(now)
        if process is self._trials.process:
            _log.info("%s ended: %s", name, ending.description)
        elif self._phase is _Phase.STARTING and not served and not ending.by_signal:
            _log.error("%s ended during the start: %s", name, ending.description)
            self._stop(1)
        elif self._phase is not _Phase.STOPPING:
            self._replace(process, name, ending, delay)
        self._tell_of_end(process)
        if self._phase is _Phase.STOPPING:
            if not any(other.child for other in self._processes()):
                self._exit(self._final_status)
        elif self._phase is _Phase.DRAINING and not any(self._living_front_ends()):
            self._stop_engine()
        elif self._phase is _Phase.STOPPING_ENGINE and self._engine.child is None:
            self._finish()
        self._settle()

    def on_signal(self, number: int) -> None:
        """Drain at the first SIGTERM or SIGINT; end at once at the second."""
        name = signal.Signals(number).name
        settings = self._settings
        if not self._signals.counts() or self._phase is _Phase.STOPPING:
            return
        if self._phase in (_Phase.DRAINING, _Phase.STOPPING_ENGINE):
            _log.warning("%s received again: stopping at once", name)
            self._stop(128 + number)
            return
        self._phase = _Phase.DRAINING
        if settings.drain_delay:
            _log.info("%s received: requests are accepted for %g s more", name, settings.drain_delay)
        _log.info("%s received: draining for at most %g s", name, settings.drain_seconds)
        now = self._now()
        self._drain_deadline = now + settings.drain_delay + settings.drain_seconds
        drain = {"seconds": settings.drain_seconds, "delay": settings.drain_delay}
        for process in self._front_ends:
            process.start_at = math.inf
            if process.child is not None:
                process.kill_after(self._drain_deadline + EXIT_SECONDS - now, now)
                process.child.send("drain", drain)
        if self._engine.child is not None:
            # At the same time, so that it reports the drain and starts batches without waiting for more requests. An
            # engine that replaces it does not drain: front-ends refuse new requests, and need it to finish the others.
            self._engine.child.send("drain", drain)
        if not any(self._living_front_ends()):
            self._stop_engine()
        self._settle()

    def _processes(self) -> Iterator[SupervisedProcess]:
        yield self._engine
        yield from self._front_ends
        if self._trials.process.child is not None:
            yield self._trials.process

    def _living_front_ends(self) -> Iterator[Child]:
        return (process.child for process in self._front_ends if process.child is not None)

    def _start(self, process: SupervisedProcess) -> None:
        process.begin(self._now())
        try:
            child = process.child = self._environment.launch(process)
        except OSError as error:
            self.on_end(process, Ending(f"it cannot be started: {error}", by_signal=False))
            return
        if process.restarts:
            _log.info("%s is started", process)
        common = {
            "generation": process.generation,
            "port": self._port,
            "address": self._address,
            "front_ends": len(self._front_ends),
            "log_levels": self._log_levels,
        }
        if process.index is not None:
            child.send("start", {**common, "front_end": process.index})
            self._connect(process, self._engine, "link")
            if self._health is not None:
                child.send("health", self._health)
            self._trials.send_refused(process)
            return
        is_trial = process is self._trials.process
        metrics_fd = None if is_trial else self._settings.metrics_fd
        fields = {"socket": self._socket(process), "metrics_fd": metrics_fd, "trial": is_trial}
        child.send("start", {**common, **fields})
        if not is_trial:
            self._published = []
            for front_end in self._front_ends:
                self._connect(front_end, process, "link")

    def _connect(self, front_end: SupervisedProcess, engine: SupervisedProcess, kind: str) -> None:
        """Give a front-end and an engine a new link, if both are alive. The front-end gets it by a message of this kind."""
        if engine.child is None or front_end.child is None:
            return
        try:
            files, copies = create_twice(self._environment.create_link)
        except Exception as error:
            # The next attempt is made when it is started again.
            _log.error("%s is killed, because no link to the engine can be made: %s", front_end, error)
            front_end.child.kill()
            return
        engine.child.send("link", {"front_end": front_end.index, "generation": front_end.generation}, copies)
        front_end.child.send(kind, {"engine": engine.generation, "socket": self._socket(engine)}, files)

    def _socket(self, engine: SupervisedProcess) -> str:
        """Return the path of the socket of an engine of this generation."""
        name = "engine" if engine is self._engine else "trial"
        return str(self._folder / f"{name}-{engine.generation}")

    def _on_serving(self, process: SupervisedProcess, fields: dict[str, Any]) -> None:
        if process.serving:
            return
        process.serving = True
        process.report = fields
        if self._phase is _Phase.STARTING and all(other.serving for other in self._processes()):
            self._phase = _Phase.RUNNING
            try:
                self._environment.print_ready(self._address, self._engine.report, self._front_ends[0].report)
            except Exception as error:
                _log.error("the ready line cannot be printed: %r", error)
        elif process.restarts:
            seconds = process.down_seconds(self._now())
            _log.info("%s serves again, %.1f s after the last one ended", process, seconds)

    def _on_failed(self, process: SupervisedProcess, reason: str) -> None:
        if self._phase is _Phase.STARTING and not process.serving:
            self._environment.print_error(f"tensorferry serve: {reason}")
            self._stop(1)
        elif self._phase is not _Phase.STOPPING:
            _log.error("%s cannot serve: %s", process, reason)
            process.kill_after(EXIT_SECONDS, self._now())

    def _named(self, fields: dict[str, Any]) -> SupervisedProcess | None:
        """Return the front-end that a message names; None if there is none."""
        index = fields.get("front_end")
        return next((front_end for front_end in self._front_ends if front_end.index == index), None)

    def _kill_broken(self, front_end: SupervisedProcess, generation: object) -> None:
        """Kill the front-end of this generation, because the engine cannot serve it any more."""
        if front_end.child is not None and front_end.generation == generation:
            _log.error("%s is killed, because it broke the rules of its link to the engine", front_end)
            front_end.child.kill()

    def _replace(self, process: SupervisedProcess, name: str, ending: Ending, delay: float) -> None:
        """Decide and log what follows the end of a child."""
        how = ending.description
        # During a drain, front-ends need the engine to finish their calls.
        not_replaced = self._phase is _Phase.DRAINING and process is not self._engine
        if not_replaced or self._phase is _Phase.STOPPING_ENGINE:
            level = logging.INFO if how == "exit status 0" else logging.WARNING
            _log.log(level, "%s ended: %s", name, how)
            return
        process.start_at = self._now() + delay
        lost = (
            "requests wait or fail until another is ready"
            if process is self._engine
            else "its connections are lost"
        )
        when = f"in {delay:g} s" if delay else "at once"
        _log.error("%s ended: %s; %s; another is started %s", name, how, lost, when)

    def _tell_of_end(self, process: SupervisedProcess) -> None:
        """Tell the other side of each link of the ended child."""
        if process.index is None:
            _remove(self._socket(process))
        if process is self._trials.process:
            self._trials.on_end()
        elif process is self._engine:
            self._health = None
            restarts = not math.isinf(process.start_at)
            for front_end in self._living_front_ends():
                front_end.send("engine_lost", {"engine": process.generation, "restarts": restarts})
        else:
            self._trials.forget(process)
            for engine in (self._engine, self._trials.process):
                if engine.child is not None:
                    engine.child.send(
                        "front_end_lost", {"front_end": process.index, "generation": process.generation}
                    )

    def _stop_engine(self) -> None:
        """End the engine. No front-end is left, so each of its requests has ended or is cancelled."""
        self._phase = _Phase.STOPPING_ENGINE
        engine, now = self._engine, self._now()
        engine.start_at = math.inf
        if engine.child is None:
            self._finish()
            return
        engine.kill_after(EXIT_SECONDS, now)
        engine.child.send("stop", {})

    def _finish(self) -> None:
        _log.info("stopped")
        self._exit(0)

    def _stop(self, status: int) -> None:
        """Kill every child, and exit when all have ended."""
        self._phase = _Phase.STOPPING
        self._final_status = status
        self._exit_at = self._now() + _KILLED_SECONDS
        for process in self._processes():
            process.start_at = process.kill_at = math.inf
            if process.child is not None:
                process.child.kill()
        if not any(process.child for process in self._processes()):
            self._exit(status)

    def _exit(self, status: int) -> None:
        if self.exit_status is None:
            self.exit_status = status

    def _settle(self) -> None:
        """Do what follows each event."""
        if self._phase is not _Phase.STOPPING:
            self._trials.settle(self._now(), may_start=self._engine.serving)
        self._publish()

    def _publish(self) -> None:
        """Tell the engine about the processes, if anything has changed. Its status page and metrics show them."""
        if self._engine.child is None or self._phase is _Phase.STOPPING:
            return
        processes = [
            {
                "name": process.name,
                "pid": process.child.pid if process.child is not None else None,
                "generation": process.generation,
                "restarts": process.restarts,
                "state": process.state,
            }
            for process in self._processes()
        ]
        if processes != self._published:
            self._published = processes
            self._engine.child.send("processes", {"processes": processes})


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
