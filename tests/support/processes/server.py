"""A real server process for tests: started on 127.0.0.1 port 0, stopped, with its output kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from polling import until
from support.processes import observed

STOP_SECONDS = 60
_COMMAND_SECONDS = 120

# `make test-processes` gives every server of the tests this many processes.
SERVER_PROCESSES = os.environ.get("SERVER_PROCESSES", "")

# With these, tests change what one process has, which a server of several refuses.
_ONE_PROCESS = frozenset(
    (
        "--processes", "--allow-shared-memory", "--allow-log-settings", "--model-control", "explicit",
        "--reload",
    )
)  # fmt: skip

_TESTS = Path(__file__).resolve().parents[2]


def command(*arguments: str | Path) -> list[str]:
    """Return the command line of `tensorferry` with these arguments; `serve` gets the tests' number of processes."""
    if arguments[:1] == ("serve",):
        arguments = ("serve", *_with_processes(arguments[1:]))
    return [sys.executable, "-m", "tensorferry.server", *map(str, arguments)]


def _with_processes(arguments: tuple[str | Path, ...]) -> tuple[str | Path, ...]:
    if not SERVER_PROCESSES or not _ONE_PROCESS.isdisjoint(arguments):
        return arguments
    # First, because a test may leave out the value of the last option.
    return ("--processes", SERVER_PROCESSES, *arguments)


def environment() -> dict[str, str]:
    """Return the environment without variables that configure a server, except the device of `make
    gpu-check`.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TENSORFERRY_") or name == "TENSORFERRY_DEVICE"
    }


def run_command(
    *arguments: object, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `tensorferry` with these arguments to its end; `variables` are added to its environment."""
    return subprocess.run(
        command(*map(str, arguments)),
        capture_output=True,
        text=True,
        env={**environment(), **(variables or {})},
        timeout=_COMMAND_SECONDS,
    )


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))


@dataclass
class ServerProcess:
    """A running server; `ready` is its line on stdout, `log` its lines on stderr so far."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]
    log: list[str]
    _reader: threading.Thread

    @classmethod
    def start(
        cls,
        *arguments: str | Path,
        transport: str,
        program: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> ServerProcess:
        """Start `tensorferry serve`, and wait until it is ready with the given options.

        Another `program` replaces `tensorferry`; `variables` are added to its environment. The
        probe model is batched unchecked, because the batching check takes longer than most tests.
        """
        if "--batching" not in arguments and any(str(each).endswith("probe.onnx") for each in arguments):
            arguments = (*arguments, "--batching", "trust")
        arguments = _with_processes(arguments)
        always = ("--transport", transport, "--host", host, "--port", port, "--log-format", "json")
        process = subprocess.Popen(
            [*(program or command()), *map(str, ("serve", *arguments, *always))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **environment(),
                # Programs other than `tensorferry` import modules of the tests.
                **({"PYTHONPATH": _python_path()} if program else {}),
                # An aborted process writes the stack of every thread to its log.
                "PYTHONFAULTHANDLER": "1",
                **(variables or {}),
            },
        )
        assert process.stdout is not None
        assert process.stderr is not None
        log: list[str] = []
        stderr = process.stderr
        reader = threading.Thread(target=lambda: log.extend(stderr), name="server-log", daemon=True)
        reader.start()
        line = process.stdout.readline()
        if not line:
            reader.join(STOP_SECONDS)
            code = process.wait()
            process.stdout.close()
            process.stderr.close()
            raise AssertionError(f"the server did not start: exit {code}, {log}")
        server = cls(process, json.loads(line), log, reader)
        if server.ready["transport"] != transport:
            server.stop()
            raise AssertionError(f"{server.ready['transport']} serves, not {transport}: {log}")
        return server

    @property
    def address(self) -> str:
        """Return host:port."""
        return str(self.ready["address"])

    def page(self, path: str = "/metrics") -> str:
        """Return a page of its monitoring."""
        url = self.ready["metrics"].removesuffix("/metrics") + path
        with urllib.request.urlopen(url, timeout=STOP_SECONDS) as response:
            return str(response.read().decode())

    def statuses(self) -> dict[str, Any]:
        """Return what the status page has of each model, by name."""
        return {model["name"]: model for model in json.loads(self.page("/status.json"))["models"]}

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def processes(self) -> list[int]:
        """Return the ids of the process and of its children."""
        return [self.process.pid, *observed.children(self.process.pid)]

    @staticmethod
    def _state_of(pid: int) -> str:
        """Return the letter of a process's state, "T" if it is stopped."""
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop the process, as a debugger does: it answers nothing until the end of the `with`."""
        processes = self.processes()
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        for process in processes:
            # The signal takes effect later; a call in between would be answered.
            until(partial(self._state_of, process), "T".__eq__)
        try:
            yield
        finally:
            for process in reversed(processes):
                os.kill(process, signal.SIGCONT)

    def wait(self) -> int:
        """Wait for the end; return the exit code. A process that does not end is aborted, with its log
        in the error.
        """
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT)
            self.process.wait(STOP_SECONDS)
            self._reader.join(STOP_SECONDS)
            raise AssertionError(
                f"the server did not end in {STOP_SECONDS} s:\n{''.join(self.log)}"
            ) from None
        self._reader.join(STOP_SECONDS)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        if self.process.poll() is None:
            self.signal()
        return self.wait()

    def errors(self) -> list[str]:
        """Return logged errors and exceptions."""
        return [line for line in self.log if '"level": "error"' in line or "Traceback" in line]


@contextmanager
def running(
    *arguments: str | Path, transport: str, logs_errors: bool = False, **options: Any
) -> Iterator[ServerProcess]:
    """Run a server as `ServerProcess.start` does; it must stop on SIGTERM with code 0.

    Its log must have no error, unless the test expects one with `logs_errors`.
    """
    server = ServerProcess.start(*arguments, transport=transport, **options)
    try:
        yield server
    finally:
        code = server.stop()
    assert code == 0, "".join(server.log)
    assert logs_errors or not server.errors(), "".join(server.log)
