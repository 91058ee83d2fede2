"""A real server process for tests: started on 127.0.0.1 port 0, stopped, and its output kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOP_SECONDS = 60


def command(*arguments: str | Path) -> list[str]:
    """The command line of `tensorferry` with these arguments."""
    return [sys.executable, "-m", "tensorferry.server", *map(str, arguments)]


def environment() -> dict[str, str]:
    """The environment without what would configure a server, but for the device that `make gpu-check` sets."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TENSORFERRY_") or name == "TENSORFERRY_DEVICE"
    }


@dataclass
class ServerProcess:
    """A running server; `ready` is its line on stdout, `log` its lines on stderr so far, all once it has ended."""

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
        port: int = 0,
    ) -> ServerProcess:
        """Starts `tensorferry serve` and waits until it is ready, and serves as it was told.

        Another `program` stands in for `tensorferry`; `variables` are set in its environment. The probe model
        is batched unchecked, because the batching check takes longer than most tests.
        """
        if "--batching" not in arguments and any(str(each).endswith("probe.onnx") for each in arguments):
            arguments = (*arguments, "--batching", "trust")
        always = ("--transport", transport, "--host", "127.0.0.1", "--port", port, "--log-format", "json")
        process = subprocess.Popen(
            [*(program or command()), *map(str, ("serve", *arguments, *always))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Where every thread is, in the log of one that is aborted since it does not end.
            env={**environment(), "PYTHONFAULTHANDLER": "1", **(variables or {})},
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
            raise AssertionError(f"the server did not start: exit {process.wait()}, {log}")
        server = cls(process, json.loads(line), log, reader)
        if server.ready["transport"] != transport:
            server.stop()
            raise AssertionError(f"{server.ready['transport']} serves, not {transport}: {log}")
        return server

    @property
    def address(self) -> str:
        """host:port."""
        return str(self.ready["address"])

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The process is stopped, as by a debugger: it answers nothing until the end of the `with`."""
        self.signal(signal.SIGSTOP)
        # The signal takes effect later; a call in between would be answered.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def wait(self) -> int:
        """Waits for the end; the exit code. One that does not end is aborted, and its log is in the error."""
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
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.signal()
        return self.wait()

    def errors(self) -> list[str]:
        """What was logged as an error, or raised."""
        return [line for line in self.log if '"level": "error"' in line or "Traceback" in line]


@contextmanager
def running(
    *arguments: str | Path, transport: str, logs_errors: bool = False, **options: Any
) -> Iterator[ServerProcess]:
    """A server as `ServerProcess.start` makes it, which must end by SIGTERM with code 0.

    And without an error in its log, unless the test is about one that `logs_errors`.
    """
    server = ServerProcess.start(*arguments, transport=transport, **options)
    try:
        yield server
    finally:
        code = server.stop()
    assert code == 0, "".join(server.log)
    assert logs_errors or not server.errors(), "".join(server.log)
