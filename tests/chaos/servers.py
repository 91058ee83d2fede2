"""Servers and callers of the soak, as processes that are ended and started again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from chaos.faulty_server import LEAKS
from chaos.faulty_supervisor import MODULE
from chaos.proxy import FaultProxy
from polling import until
from support.processes import observed, thrower
from support.processes.free_ports import free_ports
from support.processes.server import ServerProcess

# A server starts or stops in less, even on a busy machine.
PATIENCE = 60.0
_TESTS = Path(__file__).resolve().parents[1]


def build_clock(folder: Path) -> Path | None:
    """Build the library that makes a server's wall clock jump; return None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    made = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(made), str(source), "-ldl"],
        capture_output=True,
        check=False,
    )
    return made if done.returncode == 0 else None


class Server:
    """A server on a fixed port, with this number of `processes`. The output of all its lives goes to `log`.

    Its temporary files are in the folder `temporary`, and `sockets` is that of `thrower`.
    """

    def __init__(
        self,
        name: str,
        transport: str,
        folder: Path,
        arguments: Sequence[str],
        clock: Path | None,
        *,
        processes: int,
        temporary: Path,
        sockets: Path,
        leaks: bool = False,
    ) -> None:
        self.name = name
        self.count = processes
        self.sockets = sockets
        self.port, self.metrics_port, self.http_port = free_ports(3)
        self.log = folder / f"{name}.log"
        self.lives = 0
        self._clock_file = folder / f"{name}.clock"
        self._clock_file.write_bytes(struct.pack("d", 0.0))
        program = "faulty_supervisor.py" if processes > 1 else "faulty_server.py"
        self._start = partial(
            ServerProcess.start,
            *arguments,
            *("--processes", str(processes), "--metrics-port", str(self.metrics_port), "--device", "cpu"),
            *("--http-port", str(self.http_port)),
            *("--drain-seconds", "20", "--run-timeout-seconds", "0.7"),
            transport=transport,
            program=[sys.executable, str(Path(__file__).with_name(program))],
            port=self.port,
        )
        python_path = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._variables = {"TMPDIR": str(temporary), **thrower.variables(sockets, python_path)}
        if leaks:
            self._variables[LEAKS] = "1"
        if clock is not None:
            self._variables |= {"LD_PRELOAD": str(clock), "CHAOS_CLOCK": str(self._clock_file)}
        self.running: ServerProcess | None = None
        # Whether it is being ended or started again.
        self.away = threading.Event()

    @property
    def address(self) -> str:
        """Return host:port."""
        return f"127.0.0.1:{self.port}"

    @property
    def metrics_url(self) -> str:
        """Return the URL of its metrics."""
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        """Process id, 0 without a process."""
        return 0 if self.running is None else self.running.process.pid

    @property
    def processes(self) -> Mapping[str, Sequence[int]]:
        """Ids of its processes, by their role."""
        if self.count == 1:
            return {"the server": [self.pid]}
        return {"the supervisor": [self.pid], "the server processes": observed.of_module(self.pid, MODULE)}

    def start(self) -> None:
        """Start the server; return when it is ready."""
        self.lives += 1
        self.running = self._start(variables=self._variables)

    def end(self, number: int) -> int:
        """End it by a signal, or await its end with 0; return its exit code, when nothing listens on its ports."""
        assert self.running is not None
        self.running.signal(number)
        try:
            code = self.running.wait()
        finally:
            with self.log.open("a") as log:
                log.writelines(self.running.log)
        # The kernel kills the children of a process that was killed, and they may listen for some milliseconds more.
        for port in (self.port, self.metrics_port, self.http_port):
            until(lambda: observed.listeners(port), lambda listeners: not listeners)  # noqa: B023
        return code

    def jump(self, seconds: float) -> None:
        """Shift its wall clock from now on."""
        with self._clock_file.open("r+b") as file:
            file.write(struct.pack("d", seconds))


class CallerProcesses:
    """Processes of callers, by the number of their sender, which is never reused."""

    def __init__(self, folder: Path, servers: Sequence[Server], proxy: FaultProxy, *, aborts: bool) -> None:
        self._folder = folder
        first, last = servers
        self._arguments = ["--servers", f"ipv4:{first.address},{last.address}", "--first", first.address]
        self._arguments += ["--proxy", f"127.0.0.1:{proxy.port}"]
        self._arguments += ["--http", f"{first.http_port},{last.http_port}"]
        if aborts:
            self._arguments.append("--aborts")
        self._senders = 0
        self._running: dict[Path, subprocess.Popen[bytes]] = {}
        self.killed: set[Path] = set()
        self.failed: list[str] = []

    @property
    def ledgers(self) -> Sequence[Path]:
        """Return the ledgers of all of them."""
        return sorted(self._folder.glob("*.ledger"))

    def start(self) -> None:
        """Start one more."""
        self._senders += 1
        ledger = self._folder / f"{self._senders}.ledger"
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")]),
        }
        with (self._folder / "callers.log").open("a") as log:
            self._running[ledger] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "chaos.caller", *self._arguments),
                    *("--ledger", str(ledger), "--sender", str(self._senders)),
                ],
                stderr=log,
                env=variables,
            )

    def kill_one(self, which: int) -> None:
        """Kill one by SIGKILL during its calls; another takes its place."""
        ledger = sorted(self._running)[which % len(self._running)]
        process = self._running.pop(ledger)
        self.killed.add(ledger)
        process.kill()
        process.wait(PATIENCE)
        self.start()

    def stop(self) -> None:
        """Stop all: each ends its calls first."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for ledger, process in self._running.items():
            if code := process.wait(PATIENCE):
                self.failed.append(f"the callers of {ledger.name} ended with {code}")


class Busy:
    """Processes that use the processor of a server, on its cores."""

    def __init__(self, count: int, pid: int) -> None:
        cores: Any = os.sched_getaffinity(pid)
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {cores!r})\nwhile True: pass"]
            )
            for _ in range(count)
        ]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE)


def exhaust_files(address: tuple[str, int], count: int, seconds: float, healed: threading.Event) -> None:
    """Open many idle connections to a server for a time."""
    taken: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.socket()
            one.settimeout(0.5)
            taken.append(one)
            try:
                one.connect(address)
            except OSError:
                continue
        healed.wait(seconds)
    finally:
        for one in taken:
            one.close()
