"""A supervisor with stand-ins of children, and a clock that the test sets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorferry.server.processes.child import Child, ExitStatus
from tensorferry.server.processes.messages import Message
from tensorferry.server.processes.running_page import Running, RunningPage
from tensorferry.server.processes.slot import ServerSlot
from tensorferry.server.processes.supervisor import Supervisor, SupervisorSettings

PORT = 8001
KILLED = ExitStatus("killed by SIGKILL", 9)
CRASHED = ExitStatus("killed by SIGSEGV", 11)
EXITED = ExitStatus("exit status 1")
CLEAN = ExitStatus("exit status 0")


class FakeChild(Child):
    """Child without a process. It keeps what it was sent, and answers pings unless it hangs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.killed = False
        self.hangs = False
        self.pinged = False

    def send(self, kind: str, fields: Mapping[str, Any], content: bytes = b"") -> None:
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
        processes: int = 2,
        *,
        drain_seconds: float = 30.0,
        drain_delay: float = 0.0,
        launches: bool = True,
        sockets: Mapping[str, socket.socket] | None = None,
    ) -> None:
        self.now = 1000.0
        self.launches = launches
        self.errors: list[str] = []
        self.slots: dict[int, ServerSlot] = {}
        self._started = 0
        settings = SupervisorSettings(
            host="127.0.0.1",
            port=PORT,
            processes=processes,
            drain_seconds=drain_seconds,
            drain_delay=drain_delay,
            sockets=sockets or {},
        )
        where = {"address": f"127.0.0.1:{PORT}", "port": PORT, "folder": str(folder)}
        self.supervisor = Supervisor(settings, where, self._launch, self.errors.append, lambda: self.now)
        self.supervisor.start()

    def _launch(self, slot: ServerSlot) -> FakeChild:
        assert slot.child is None, "two children at once"
        self.slots[slot.index] = slot
        if not self.launches:
            raise OSError("no memory")
        self._started += 1
        return FakeChild(self._started)

    @property
    def exit_status(self) -> int | None:
        return self.supervisor.exit_status

    def child(self, index: int) -> FakeChild:
        child = self.slots[index].child
        assert isinstance(child, FakeChild), f"server {index} has no child"
        return child

    def alive(self) -> list[int]:
        return [index for index, slot in self.slots.items() if slot.child is not None]

    def note_running(self, index: int, running: Sequence[Running] = (), *, loads: bool = False) -> None:
        """Let the child note in its page that these requests run."""
        page = RunningPage(os.dup(self.slots[index].page))
        if loads:
            page._count_load(1)
        for each in running:
            page.begin(each)

    def say(self, index: int, kind: str, **fields: Any) -> None:
        """Let a child send a message."""
        self.supervisor.on_message(self.slots[index], Message(kind, fields))

    def ready(self, *indices: int) -> Supervision:
        """Let these children, or all, report that they are ready. Forget what they were sent so far."""
        for index in indices or self.alive():
            self.say(index, "ready")
        self.forget()
        return self

    def forget(self) -> None:
        for index in self.alive():
            self.child(index).take()

    def end(self, index: int, status: ExitStatus) -> None:
        """Let a child end."""
        self.supervisor.on_end(self.slots[index], status)

    def end_killed(self) -> None:
        """Let the killed children end."""
        for index in self.alive():
            if self.child(index).killed:
                self.end(index, KILLED)

    def wait(self, seconds: float) -> None:
        """Let time pass, with every event of the clock at its time."""
        until = self.now + seconds
        while (due := self.supervisor.next_time()) <= until:
            self.now = max(self.now, due)
            self.supervisor.on_time()
            if self.exit_status is not None:
                return
            for index in self.alive():
                child = self.child(index)
                if child.pinged and not child.hangs:
                    child.pinged = False
                    self.say(index, "pong")
        self.now = until
