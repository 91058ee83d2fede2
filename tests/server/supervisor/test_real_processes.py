"""The supervisor with real children: deaths of each, descriptors, signals, and what is left behind."""

from __future__ import annotations

import json
import os
import queue
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
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._kept: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                event = json.loads(line)
                self.pids.add(event["pid"])
                self._events.put(event)
            else:
                self.lines.append(line)
        self._events.put(None)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """Wait for the next event with this name and these fields; others are kept for later."""

        def fits(event: dict[str, Any]) -> bool:
            return event["event"] == name and fields.items() <= event.items()

        for index, event in enumerate(self._kept):
            if fits(event):
                return self._kept.pop(index)
        while True:
            event_or_end = self._events.get(timeout=PATIENCE)
            assert event_or_end is not None, f"no {name}: {self.log}"
            if fits(event_or_end):
                return event_or_end
            self._kept.append(event_or_end)

    def ready_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        return line

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

    def children(self) -> list[str]:
        """The child processes, zombies included."""
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()

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
    """Connect to the port, and return the process id of the front-end."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        return int(connection.makefile().read())


def test_start_and_clean_end(run: Run, tmp_path: Path) -> None:
    server = run("2", "model.onnx", "--flag")
    line = server.ready_line()
    assert line["ready"] == {"models": ["m"]}
    assert line["listening"] == {"port": int(line["address"].split(":")[1])}
    assert server.event("supervisor")["modules"] == []
    engine = server.event("engine")
    assert engine["argv"] == ["model.onnx", "--flag"]
    assert engine["ignored"] == ["SIGTERM", "SIGINT"]
    for index in range(2):
        server.event("linked", front_end=index, engine=engine["pid"], path=engine["start"]["socket"])
        server.event("health", front_end=index, serving={"": True}, ready=True)
    folder = Path(engine["start"]["socket"]).parent
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    fronts = {server.event("front_end")["pid"] for _ in range(2)}
    assert until(lambda: answer(line["address"])) in fronts
    server.signal(signal.SIGTERM)
    roles = [server.event("drain")["role"] for _ in range(3)]
    assert sorted(roles) == ["engine", "front_end", "front_end"]
    server.event("stop", role="engine")
    assert server.exit_status() == 0
    assert not server.living()
    assert not list(tmp_path.iterdir())
    assert "SIGTERM received: draining for at most 30 s" in server.log


def test_a_killed_front_end_is_replaced_on_the_same_port(run: Run) -> None:
    server = run("1")
    address = server.ready_line()["address"]
    engine, first = server.event("engine")["pid"], server.event("front_end")["pid"]
    server.event("linked")
    assert answer(address) == first
    for generation in range(1, 3):
        os.kill(first, signal.SIGKILL)
        lost = server.event("front_end_lost")
        assert (lost["front_end"], lost["generation"]) == (0, generation)
        second = server.event("front_end")
        assert second["start"]["generation"] == generation + 1
        server.event("linked", pid=second["pid"], engine=engine)
        assert answer(address) == second["pid"]
        assert not _lives(first)
        first = second["pid"]
    assert "ended: killed by SIGKILL" in server.log
    assert server.process.poll() is None


def test_an_aborted_engine_is_replaced(run: Run) -> None:
    server = run("2")
    address = server.ready_line()["address"]
    first = server.event("engine")
    fronts = {server.event("front_end")["pid"] for _ in range(2)}
    for index in range(2):
        server.event("linked", front_end=index)
        server.event("health", front_end=index)
    os.kill(first["pid"], signal.SIGABRT)
    for index in range(2):
        assert server.event("engine_lost", front_end=index)["restarts"]
    second = server.event("engine")
    assert second["start"]["socket"] != first["start"]["socket"]
    for index in range(2):
        server.event("linked", front_end=index, engine=second["pid"])
        server.event("health", front_end=index)
    assert answer(address) in fronts
    assert "ended: killed by SIGABRT" in server.log
    server.signal(signal.SIGINT)
    assert server.exit_status() == 0


def test_nothing_is_left_after_kill_9_of_the_supervisor(run: Run, tmp_path: Path) -> None:
    server = run("2")
    server.ready_line()
    folder = Path(server.event("engine")["start"]["socket"]).parent
    assert len(server.living()) == 4
    # A child that is stopped could not notice a closed channel.
    os.kill(server.event("front_end")["pid"], signal.SIGSTOP)
    server.signal(signal.SIGKILL)
    until(server.living, lambda living: not living)
    assert folder.exists()
    following = run("1")
    following.ready_line()
    assert not folder.exists()


def test_no_descriptor_of_the_supervisor_is_left_after_many_deaths(run: Run) -> None:
    server = run("1")
    server.ready_line()
    server.event("linked")

    def files() -> int:
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))

    before = files()
    for _ in range(3):
        os.kill(server.event("front_end")["pid"], signal.SIGKILL)
        server.event("linked")
        os.kill(server.event("engine")["pid"], signal.SIGKILL)
        server.event("linked")
    until(files, lambda now: now == before)
    assert len(server.children()) == 2


def test_orphans_are_reaped_beside_the_supervisors_own_children(run: Run) -> None:
    server = run("1", "leave-orphan")
    server.ready_line()
    first = server.event("orphan")["orphan"]
    until(lambda: str(first) in server.children())
    os.kill(first, signal.SIGKILL)
    until(server.children, lambda children: len(children) == 2)
    os.kill(server.event("engine")["pid"], signal.SIGKILL)
    second = server.event("orphan")["orphan"]
    # Both end at about the same time.
    os.kill(second, signal.SIGKILL)
    os.kill(server.event("front_end")["pid"], signal.SIGKILL)
    server.event("front_end_lost")
    server.event("linked", engine=server.event("engine")["pid"])
    until(server.children, lambda children: len(children) == 2 and str(second) not in children)
    assert server.log.count("ended: killed by SIGKILL") == 2
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0


def test_signals_to_the_whole_group_drain_as_well(run: Run) -> None:
    """Ctrl-C in a terminal sends SIGINT to the children, too, and systemd sends SIGTERM."""
    server = run("1")
    server.ready_line()
    os.killpg(server.process.pid, signal.SIGINT)
    for kind, role in (("drain", "front_end"), ("drain", "engine"), ("stop", "engine")):
        server.event(kind, role=role)
    assert server.exit_status() == 0


def test_a_signal_to_the_group_during_the_start_ends_no_child(run: Run) -> None:
    server = run("1")
    server.event("supervisor")
    until(server.children)
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.exit_status() == 0
    server.close()
    assert "killed by" not in server.log


@pytest.mark.parametrize(("hanging", "event"), [("front_end", "drain"), ("engine", "stop")])
def test_a_second_signal_ends_all_at_once(run: Run, hanging: str, event: str) -> None:
    server = run("1", f"{hanging}-hangs")
    server.ready_line()
    server.signal(signal.SIGTERM)
    server.event(event, role=hanging)

    def signalled() -> int | None:
        server.signal(signal.SIGTERM)
        return server.process.poll()

    # Signals within a second of the first do not count.
    until(signalled, lambda code: code is not None)
    assert server.exit_status() == 128 + signal.SIGTERM
    assert not server.living()
    assert "SIGTERM received again: stopping at once" in server.log


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("engine-fails", "tensorferry serve: no such model\n"),
        ("engine-exits", "ended during the start: exit status 3"),
    ],
)
def test_a_start_error(run: Run, tmp_path: Path, option: str, text: str) -> None:
    server = run("1", option)
    assert server.exit_status() == 1
    server.close()
    assert text in server.log
    assert not list(tmp_path.iterdir())


def test_a_bug_of_the_supervisor_ends_everything(run: Run, tmp_path: Path) -> None:
    server = run("2", "supervisor-crashes")
    server.ready_line()
    os.kill(server.event("engine")["pid"], signal.SIGKILL)
    assert server.exit_status() == 1
    assert not server.living()
    server.close()
    assert "the supervisor crashed (bug): it kills every process and exits" in server.log
    assert not list(tmp_path.iterdir())


def test_a_module_in_the_working_directory_replaces_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "selectors.py").write_text("raise SystemExit(5)")
    run("1").ready_line()


def test_the_path_of_the_socket_can_be_too_long(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    server = Server(folder, "1")
    assert server.exit_status() == 1
    server.close()
    assert "too long a path for a Unix socket; choose another by TMPDIR" in server.log
    assert not list(folder.iterdir())
