"""A supervisor with stand-ins of children, a clock that the test sets, and real descriptors for links."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorferry.server.supervisor.child import Child, Ending
from tensorferry.server.supervisor.control import Message, close_fds
from tensorferry.server.supervisor.settings import Environment, SupervisorSettings
from tensorferry.server.supervisor.supervised_process import SupervisedProcess
from tensorferry.server.supervisor.supervisor import Supervisor

PORT = 8001
KILLED = Ending("killed by SIGKILL", by_signal=True)
ABORTED = Ending("killed by SIGABRT", by_signal=True)
EXITED = Ending("exit status 1", by_signal=False)
CLEAN = Ending("exit status 0", by_signal=False)


class FakeChild(Child):
    """Child without a process: it keeps what it was sent, and the number of descriptors beside it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.killed = False
        self.hangs = False
        self.pinged = False

    def send(self, kind: str, fields: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        assert len(fds) == (3 if kind in ("link", "trial") else 0)
        close_fds(fds)
        if kind == "ping":
            self.pinged = True
        else:
            self.sent.append((kind, dict(fields)))

    def kill(self) -> None:
        self.killed = True

    def take(self, *kinds: str) -> list[tuple[str, dict[str, Any]]]:
        """Return and forget what it was sent, of these kinds or of all but `processes`."""
        sent, self.sent = self.sent, []
        return [(kind, fields) for kind, fields in sent if (kind in kinds if kinds else kind != "processes")]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.take()]


class Supervision:
    """The supervisor under test. Children get the process ids 1, 2, 3, ... in the order of their starts."""

    def __init__(
        self,
        folder: Path,
        front_ends: int = 2,
        *,
        drain_seconds: float = 30.0,
        drain_delay: float = 0.0,
        starts: bool = True,
    ) -> None:
        self.now = 1000.0
        self.launched: list[str] = []
        self.unlaunchable: set[str] = set()
        self.no_links = False
        self.stdout_is_closed = False
        self.links = 0
        self.ready_lines: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self.errors: list[str] = []
        self._processes: dict[str, SupervisedProcess] = {}
        settings = SupervisorSettings(
            host="127.0.0.1",
            port=PORT,
            front_ends=front_ends,
            drain_seconds=drain_seconds,
            drain_delay=drain_delay,
        )
        environment = Environment(
            clock=lambda: self.now,
            launch=self._launch,
            create_link=self._create_link,
            print_ready=self._print_ready,
            print_error=self.errors.append,
        )
        self.supervisor = Supervisor(settings, environment, f"127.0.0.1:{PORT}", PORT, folder)
        if starts:
            self.supervisor.start()

    def _launch(self, process: SupervisedProcess) -> FakeChild:
        assert process.child is None, "two children at once"
        self._processes[process.name] = process
        if process.name in self.unlaunchable:
            raise OSError("no memory")
        self.launched.append(process.name)
        return FakeChild(len(self.launched))

    def _create_link(self) -> Sequence[int]:
        if self.no_links:
            raise OSError("too many open files")
        self.links += 1
        return [os.memfd_create("link") for _ in range(3)]

    def _print_ready(self, address: str, ready: dict[str, Any], listening: dict[str, Any]) -> None:
        if self.stdout_is_closed:
            raise BrokenPipeError("closed")
        self.ready_lines.append((address, ready, listening))

    def process(self, name: str) -> SupervisedProcess:
        return self._processes[name]

    def child(self, name: str) -> FakeChild:
        child = self._processes[name].child
        assert isinstance(child, FakeChild), f"{name} has no child"
        return child

    @property
    def engine(self) -> FakeChild:
        return self.child("the engine")

    def front_end(self, index: int) -> FakeChild:
        return self.child(f"front-end {index}")

    def alive(self) -> list[str]:
        return [name for name, process in self._processes.items() if process.child is not None]

    @property
    def exit_status(self) -> int | None:
        return self.supervisor.exit_status

    def say(self, name: str, kind: str, **fields: Any) -> None:
        """Let a child send a message."""
        self.supervisor.on_message(self._processes[name], Message(kind, fields))

    def listen(self, index: int) -> None:
        self.say(f"front-end {index}", "listening", port=PORT, transport="lane")

    def engine_ready(self, **fields: Any) -> None:
        self.say("the engine", "ready", **fields)
        self.say("the engine", "health", serving={"": True}, ready=True, loaded=True)

    def run(self) -> Supervision:
        """Let every child report that it works."""
        self.engine_ready()
        for name in self.alive():
            if name != "the engine":
                self.say(name, "listening", port=PORT, transport="lane")
        return self

    def end(self, name: str, ending: Ending) -> None:
        """Let a child end."""
        self.supervisor.on_end(self._processes[name], ending)

    def end_killed(self) -> None:
        """Let the killed children end."""
        for name in self.alive():
            if self.child(name).killed:
                self.end(name, KILLED)

    def wait(self, seconds: float) -> None:
        """Let time pass, with every event of the clock at its time."""
        until = self.now + seconds
        while (due := self.supervisor.next_time()) <= until:
            self.now = max(self.now, due)
            self.supervisor.on_time()
            if self.exit_status is not None:
                return
            self._answer_pings()
        self.now = until

    def _answer_pings(self) -> None:
        for name in self.alive():
            child = self.child(name)
            if child.pinged and not child.hangs:
                child.pinged = False
                self.say(name, "pong")

    def forget(self) -> None:
        """Forget what the children were sent so far."""
        for name in self.alive():
            self.child(name).take()
