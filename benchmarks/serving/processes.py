"""Processes of a server: started, observed, and all of them ended.

A server's processes are found by an environment variable, which children inherit.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_TAG = "SERVING_BENCH_TAG"
_TICK = os.sysconf("SC_CLK_TCK")
_STOP_SECONDS = 10
_FIRST_PORT, _PORTS_OF_A_SERVER = 19100, 3
_LOG_TAIL = 1500


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of servers and load. If they are shared, both have all cores."""

    server: int
    load: int
    shared: bool = False

    @classmethod
    def split(cls) -> Cores:
        """Return the first core for the server and the last for the load; the same if there is only
        one.
        """
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[0], allowed[-1])

    def of_server(self) -> Set[int]:
        """Return the cores on which a server runs."""
        return os.sched_getaffinity(0) if self.shared else {self.server}

    def of_load(self) -> int | None:
        """Return the core on which the load runs, None for all."""
        return None if self.shared else self.load


class Ports:
    """Free ports, several in a row for each server; a port is not reused soon."""

    def __init__(self) -> None:
        self._next = _FIRST_PORT

    def take(self) -> int:
        """Return the first of them."""
        while True:
            first = self._next
            self._next = _FIRST_PORT + (self._next + _PORTS_OF_A_SERVER - _FIRST_PORT) % 3000
            if all(_is_free(first + offset) for offset in range(_PORTS_OF_A_SERVER)):
                return first


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Running:
    """A started server, with a folder for its files."""

    process: subprocess.Popen[bytes]
    tag: bytes
    port: int
    folder: Path

    def pids(self) -> list[int]:
        """Return the ids of all its processes."""
        found = []
        for entry in os.listdir("/proc"):
            with suppress(OSError):
                if entry.isdigit() and self.tag in Path("/proc", entry, "environ").read_bytes():
                    found.append(int(entry))
        return found

    def ended(self) -> int | None:
        """Return the exit status of the first process, None while it runs."""
        return self.process.poll()

    def log(self) -> str:
        """Return the end of its output."""
        return (self.folder / "log").read_text(errors="replace")[-_LOG_TAIL:]

    def batches(self) -> tuple[int, int]:
        """Return the rows and batches that a peer has counted."""
        rows = batches = 0
        for file in self.folder.glob("batches.*"):
            with suppress(OSError, ValueError):
                some = file.read_text().split()
                rows, batches = rows + int(some[0]), batches + int(some[1])
        return rows, batches


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the processor time of these processes and of their finished children."""
    used = 0.0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            # The clock is exact; /proc counts hundredths of a second, which is coarse for a single
            # caller.
            used += time.clock_gettime(_clock_of(pid)) + sum(map(int, fields[13:15])) / _TICK
    return used


def _clock_of(pid: int) -> int:
    """Return the clock of a process's processor time."""
    clock = ctypes.c_int()
    if wrong := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(wrong, os.strerror(wrong))
    return clock.value


def busy_seconds() -> tuple[float, float]:
    """Return the processor time that the whole machine has used, and that its host has withheld."""
    user, nice, system, _idle, _wait, irq, softirq, stolen, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / _TICK, stolen / _TICK


def memory_mib(pids: Sequence[int]) -> float:
    """Return the memory of these processes in MiB, as Pss, which divides shared pages."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, cores: Set[int], port: int
) -> Iterator[Running]:
    """Run a server on these cores until the block ends, and end all its processes."""
    # The path is short, because sockets are named below it.
    folder = Path(tempfile.mkdtemp(prefix="tf-"))
    tag = f"{os.getpid()}-{folder.name}"
    variables = {**environment, _TAG: tag, "SERVING_BENCH_FOLDER": str(folder)}
    allowed = os.sched_getaffinity(0)
    with (folder / "log").open("wb") as log:
        os.sched_setaffinity(0, cores)  # The child inherits the file.
        try:
            process = subprocess.Popen(
                command,
                env=variables,
                cwd=cwd,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, allowed)
        server = Running(process, f"{_TAG}={tag}\0".encode(), port, folder)
        try:
            yield server
        finally:
            _end(server)
            shutil.rmtree(folder, ignore_errors=True)


def _end(server: Running) -> None:
    with suppress(ProcessLookupError):
        server.process.terminate()
    until = time.monotonic() + _STOP_SECONDS
    while server.pids() and time.monotonic() < until:
        server.process.poll()
        time.sleep(0.05)
    while left := server.pids():
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.process.poll()
        time.sleep(0.05)
    server.process.wait()
