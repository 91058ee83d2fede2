"""Ends of server processes under load, one after another, and what each of them did to the callers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos.content import write_model
from crashes import callers
from crashes.callers import Caller
from crashes.poison import MODEL, Poison, Round
from polling import until
from support.models.recurrent import aborting
from support.processes import observed
from support.processes.server import ServerProcess

PROCESSES = 2
MODULE = "tensorferry.server.processes"
UNARY, STREAMS = 6, 3
# Load between two kills.
_SETTLED_SECONDS = 0.3
_ATTEMPTS = 20


@dataclass(slots=True)
class Phase:
    """Findings of kills of one kind."""

    name: str
    kills: int = 0
    # Seconds from a kill to the new process, and from an end to a right answer for every caller.
    replaced: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    connections_lost: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Crashes:
    """Findings of a run."""

    phases: list[Phase] = field(default_factory=list)
    poison: Poison = field(default_factory=Poison)
    sent: Counter[str] = field(default_factory=Counter)
    states: Counter[tuple[str, str]] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def all_wrong(self) -> list[str]:
        """What is wrong with the run and with each phase."""
        return [*self.wrong, *(f"{phase.name}: {what}" for phase in self.phases for what in phase.wrong)]


def run(kills: int, seed: int, transport: str, folder: Path) -> Crashes:
    """Kill a supervisor; then `kills` processes of a server, and a fifth as many times one or all of them at random.

    Requests abort processes in half as many rounds.
    """
    found = Crashes()
    # First, because a server's first start compiles what it imports.
    found.wrong += kill_supervisor(folder, transport)
    server = start(folder, transport)
    try:
        killer = Killer(server, random.Random(seed), found.poison)
        try:
            for name, kill, count in (
                ("a process", killer.process, kills),
                ("a process, by a request", killer.abort, (kills + 1) // 2),
                ("one or all, at random", killer.at_random, (kills + 4) // 5),
            ):
                found.phases.append(killer.phase(name, kill, count))
        finally:
            found.wrong += killer.stop()
        for caller in killer.callers:
            found.sent[caller.kind] += caller.sent
            found.states.update({(caller.kind, state): count for state, count in caller.states.items()})
            if caller.sent != caller.states.total():
                found.wrong.append(f"{caller.sent} requests, but {caller.states.total()} ends")
    finally:
        if code := server.stop():
            found.wrong.append(f"the server ended with {code}")
    found.log = server.log
    found.wrong += bugs(server) + left_running(folder, server) + left_files(folder)
    return found


def model_of(folder: Path) -> Path:
    """Return the path of a model, which the command line of every process of the server has."""
    return folder.with_name("models") / "affine.onnx"


def start(folder: Path, transport: str) -> ServerProcess:
    """Start a server whose temporary files are in the folder."""
    model = write_model(model_of(folder))
    folder.mkdir(exist_ok=True)
    return ServerProcess.start(
        f"affine={model}",
        f"{MODEL}={aborting(model.with_name(f'{MODEL}.onnx'))}",
        # The value of one row ends the process of all: the check would not batch this model.
        *("--batching", "trust"),
        *("--processes", str(PROCESSES), "--drain-seconds", "20"),
        transport=transport,
        host="0.0.0.0",
        variables={"TMPDIR": str(folder)},
    )


class Killer:
    """Kills processes of one server under load, and watches what follows."""

    def __init__(self, server: ServerProcess, chance: random.Random, poison: Poison) -> None:
        self._server = server
        self._supervisor = server.process.pid
        self._port = int(server.address.rpartition(":")[2])
        self._chance = chance
        self._poison = poison
        self._listeners = observed.listeners(self._port)
        self.callers: Sequence[Caller] = callers.start(self._port, UNARY, STREAMS)
        self._all_answer()

    def phase(self, name: str, kill: Callable[[Phase], None], count: int) -> Phase:
        """Kill again and again."""
        phase = Phase(name)
        for _ in range(count):
            before = self._failures()
            time.sleep(_SETTLED_SECONDS)
            phase.wrong += [f"{one} without a kill" for one in self._since(before, phase)]
            kill(phase)
            phase.kills += 1
        return phase

    def process(self, phase: Phase) -> None:
        """Kill one process. Only calls of its connections may fail."""
        victim = self._loaded_process()
        kept = self._others(victim)
        theirs = {one.address for one in self._connections() if one.process == victim}
        failures = self._failures()
        begin = self._kill(victim, signal.SIGKILL)
        phase.replaced.append(self._replaced([victim], begin))
        phase.answered.append(self._all_answer() - begin)
        for failure in self._since(failures, phase):
            if failure.address not in theirs:
                phase.wrong.append(f"a call of another process's connection ended with {failure.state}")
        phase.connections_lost += len(kept - self._connections())

    def abort(self, phase: Phase) -> None:
        """Let one request among others abort processes, until it is refused."""
        failures = self._failures()
        ends = self._ends()
        begin = time.monotonic()
        Round(self._port, phase.kills).run(self._poison)
        phase.replaced.append(self._replaced([], begin))
        phase.answered.append(self._all_answer() - begin)
        self._poison.ends.append(self._ends() - ends)
        self._since(failures, phase)

    def at_random(self, phase: Phase) -> None:
        """Kill one process, or all at once."""
        victims = self._processes()
        self._chance.shuffle(victims)
        victims = victims[: self._chance.choice((1, PROCESSES))]
        failures = self._failures()
        begin = time.monotonic()
        for victim in victims:
            self._kill(victim, self._chance.choice((signal.SIGKILL, signal.SIGABRT)))
        phase.replaced.append(self._replaced(victims, begin))
        phase.answered.append(self._all_answer() - begin)
        self._since(failures, phase)

    def stop(self) -> list[str]:
        """Stop the callers. Return those that did not end."""
        return [f"a request of {one.address} has not ended" for one in self.callers if not one.stop()]

    def _kill(self, victim: int, number: int) -> float:
        begin = time.monotonic()
        os.kill(victim, number)
        return begin

    def _replaced(self, victims: Sequence[int], begin: float) -> float:
        """Wait until as many sockets listen as at the start, none of them a victim's. Return the time since then."""
        until(
            lambda: (
                not {*victims} & {*observed.children(self._supervisor)}
                and len(self._processes()) == PROCESSES
                and observed.listeners(self._port) == self._listeners
            ),
            seconds=60.0,
        )
        return time.monotonic() - begin

    def _ends(self) -> int:
        return sum("killed by SIGABRT" in line for line in self._server.log)

    def _all_answer(self) -> float:
        """Wait until each caller has the answer to a request that it sends after this call. Return the time then."""
        begin = time.monotonic()
        until(
            lambda: [one.address for one in self.callers if one.answered_at <= begin],
            lambda silent: not silent,
            seconds=60.0,
        )
        return time.monotonic()

    def _processes(self) -> list[int]:
        return observed.of_module(self._supervisor, MODULE)

    def _connections(self) -> set[observed.Connection]:
        """Return the connections of callers."""
        addresses = {one.address for one in self.callers}
        found = observed.connections(self._port, self._processes())
        return {one for one in found if one.address in addresses}

    def _others(self, victim: int) -> set[observed.Connection]:
        return {one for one in self._connections() if one.process != victim}

    def _loaded_process(self) -> int:
        """Return a process at random, after both were given connections: all go to one when the other is replaced."""
        for _ in range(_ATTEMPTS):
            loaded = {one.process for one in self._connections()}
            if loaded == set(self._processes()):
                break
            for caller in self._chance.sample(list(self.callers), len(self.callers) // 2):
                caller.reopen()
            time.sleep(_SETTLED_SECONDS)
            self._all_answer()
        return self._chance.choice(self._processes())

    def _failures(self) -> list[int]:
        return [len(one.failures) for one in self.callers]

    def _since(self, before: Sequence[int], phase: Phase) -> Sequence[callers.Failure]:
        """Return the failures since then, after recording them. Only UNAVAILABLE is allowed."""
        found = [
            failure
            for caller, count in zip(self.callers, before, strict=True)
            for failure in caller.failures[count:]
        ]
        phase.failed.update(failure.state for failure in found)
        phase.wrong += [
            f"{one.address}: {one.state}" for one in found if one.state not in ("UNAVAILABLE", "OK")
        ]
        return found


def bugs(server: ServerProcess) -> list[str]:
    """Return the lines of the log that no kill explains."""
    return [line for line in server.log if "Traceback" in line or "this is a bug" in line or "(bug)" in line]


def left_running(folder: Path, server: ServerProcess) -> list[str]:
    """Wait until no process of an ended server is left. Return its port if that is open."""
    # The kernel ends what an ended process has started, some time after it.
    until(lambda: observed.with_argument(str(model_of(folder))), lambda left: not left)
    port = int(server.address.rpartition(":")[2])
    return [f"port {port} is still open"] if observed.listeners(port) else []


def left_files(folder: Path) -> list[str]:
    """Return the files that ended servers have left."""
    return [f"{name} was left" for name in os.listdir(folder)]


def kill_supervisor(folder: Path, transport: str) -> list[str]:
    """Kill a supervisor. Return what is left of its server, after the next server's start and end for files."""
    killed = start(folder, transport)
    killed.process.kill()
    killed.wait()
    found = left_running(folder, killed)
    following = start(folder, transport)
    if code := following.stop():
        found.append(f"the server after it ended with {code}")
    return found + left_running(folder, following) + left_files(folder)
