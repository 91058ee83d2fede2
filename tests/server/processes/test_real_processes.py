"""The supervisor with real children: deaths, descriptors, signals, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from polling import PATIENCE, until
from support.processes import observed

_TESTS = Path(__file__).parents[2]


class Server:
    """A supervisor as a process of its own, in a process group of its own."""

    def __init__(self, folder: Path, *argv: str) -> None:
        environment = {
            **os.environ,
            "TMPDIR": str(folder),
            "PYTHONPATH": os.pathsep.join([*sys.path, str(_TESTS)]),
        }
        program = _TESTS / "support/processes/supervised.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program), *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=folder,
            text=True,
            start_new_session=True,
        )
        self.pids: set[int] = {self.process.pid}
        self.lines: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                event = json.loads(line)
                self.pids.add(event["pid"])
                self._events.append(event)
            else:
                self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def event(self, name: str) -> dict[str, Any]:
        """Wait for the next event with this name; others are kept for later."""
        event = until(lambda: [event for event in self._events if event["event"] == name])[0]
        self._events.remove(event)
        return event

    def address(self) -> str:
        """Wait for the ready line, which has the address."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_status(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        until(self.living, lambda living: not living)
        self._thread.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def children(self) -> list[int]:
        """The child processes, zombies included."""
        return observed.children(self.process.pid)

    def living(self) -> list[int]:
        """The processes that have not ended."""
        return [pid for pid in self.pids if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


Run = Callable[..., Server]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short path, because the path of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    servers = []

    def run(*argv: str) -> Server:
        servers.append(Server(tmp_path, *argv))
        return servers[-1]

    yield run
    for server in servers:
        server.close()


def answer(address: str) -> int:
    """Connect to the port, and return the process id of the server."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        return int(connection.makefile().read())


def test_start_and_clean_end(run: Run, tmp_path: Path) -> None:
    # A module in the working directory must not replace one of the server.
    module = tmp_path / "selectors.py"
    module.write_text("raise SystemExit(5)")
    server = run("2", "model.onnx", "--flag")
    address = server.address()
    pids = set()
    for _ in range(2):
        event = server.event("server")
        start = event["start"]
        assert event["argv"] == ["model.onnx", "--flag"]
        assert event["gpus"] == f"gpu {start['index']}"
        assert start["address"] == address
        folder = Path(start["folder"])
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        pids.add(event["pid"])
    assert {answer(address) for _ in range(32)} == pids
    # Ctrl-C in a terminal sends SIGINT to the children, too, and systemd sends SIGTERM.
    os.killpg(server.process.pid, signal.SIGINT)
    assert {server.event("drain")["pid"] for _ in range(2)} == pids
    assert server.exit_status() == 0
    assert not server.living()
    assert list(tmp_path.iterdir()) == [module]
    server.close()
    assert "SIGINT received: draining for at most 30 s" in server.log


def test_orphans_are_reaped_beside_the_supervisors_own_children(run: Run) -> None:
    server = run("1", "leave-orphan")
    server.address()
    first = server.event("orphan")["orphan"]
    until(lambda: first in server.children())
    os.kill(first, signal.SIGKILL)
    until(server.children, lambda children: len(children) == 1)
    os.kill(server.event("ready")["pid"], signal.SIGKILL)
    second = server.event("orphan")["orphan"]
    # Both end at about the same time.
    os.kill(second, signal.SIGKILL)
    os.kill(server.event("ready")["pid"], signal.SIGKILL)
    server.event("ready")
    until(lambda: second not in server.children())
    assert server.log.count("ended: killed by SIGKILL") == 2
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0


def test_a_bug_of_the_supervisor_ends_everything(run: Run, tmp_path: Path) -> None:
    server = run("2", "supervisor-crashes")
    server.address()
    os.kill(server.event("ready")["pid"], signal.SIGKILL)
    assert server.exit_status() == 1
    assert not server.living()
    server.close()
    assert "the supervisor crashed (bug): it kills every process and exits" in server.log
    assert not list(tmp_path.iterdir())


def test_the_path_of_a_socket_can_be_too_long(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    server = Server(folder, "1")
    assert server.exit_status() == 1
    server.close()
    assert "too long a path for a Unix socket; choose another by TMPDIR" in server.log
    assert not list(folder.iterdir())
