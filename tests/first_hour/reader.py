"""The shell of a new user: its directory is a fresh clone, and it has nothing of this environment."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from docs.pages import ROOT, Command

PATIENCE_SECONDS = 300
_STOP_SECONDS = 30
_SHOWN_LINES = 30
_DEFAULT = "127.0.0.1:8001"


class Failed(Exception):
    """A command of a page does not work; the text has the command and what it printed."""

    @classmethod
    def at(cls, command: Command, what: str, printed: str) -> Failed:
        """Return the error of a command, with the end of what it printed."""
        end = "\n".join(printed.splitlines()[-_SHOWN_LINES:])
        return cls(f"{command.page}:{command.line}: {command.text}\n{what}; it printed:\n{end}")


@dataclass(frozen=True, slots=True)
class Reader:
    """A shell in `checkout`; `folder` has the clone and what the reader makes beside it.

    With `caches`, pip's downloads are kept there instead of in the user's cache.
    """

    folder: Path
    checkout: Path
    variables: Mapping[str, str]
    caches: Path | None

    @classmethod
    def in_fresh_clone(cls, folder: Path, caches: Path | None) -> Reader:
        """Clone the commit of this checkout, without changes that are not committed."""
        checkout = folder / "tensorferry"
        cloned = subprocess.run(
            ["git", "clone", "--quiet", str(ROOT), str(checkout)], capture_output=True, text=True
        )
        if cloned.returncode:
            raise Failed(f"{ROOT} cannot be cloned: {cloned.stderr.strip()}")
        variables = without_this_environment()
        # A reader has installed grpcurl; here `make tools` has.
        if (grpcurl := Path(sys.prefix, "bin", "grpcurl")).exists():
            programs = folder / "programs"
            programs.mkdir()
            (programs / grpcurl.name).symlink_to(grpcurl)
            variables["PATH"] = os.pathsep.join((variables["PATH"], str(programs)))
        # A server takes a free port, and its address replaces the pages'.
        return cls(folder, checkout, {**variables, "PORT": "0", "TENSORFERRY_PORT": "0"}, caches)

    def with_cache(self, name: str) -> Reader:
        """Return the shell with a cache of pip's of its own, so that milestones do not share downloads."""
        if self.caches is None:
            return self
        return replace(self, variables={**self.variables, "PIP_CACHE_DIR": str(self.caches / name)})

    def activated(self, environment: str) -> Reader:
        """Return the shell after `. ENVIRONMENT/bin/activate`."""
        prefix = (self.checkout / environment).resolve()
        path = os.pathsep.join((str(prefix / "bin"), self.variables["PATH"]))
        return replace(self, variables={**self.variables, "PATH": path, "VIRTUAL_ENV": str(prefix)})

    def calling(self, address: str) -> Reader:
        """Return the shell with the server that its clients call."""
        return replace(self, variables={**self.variables, "TENSORFERRY_TARGET": address})

    def adapted(self, text: str) -> str:
        """Replace the default address by that of the server."""
        return text.replace(_DEFAULT, self.variables.get("TENSORFERRY_TARGET", _DEFAULT))

    def has(self, program: str) -> bool:
        """Return whether the reader has installed a program."""
        return shutil.which(program, path=self.variables["PATH"]) is not None

    def run(self, command: Command) -> float:
        """Run a command; return its seconds. Raise Failed if its exit code is not 0."""
        with tempfile.TemporaryFile("w+") as output:
            began = time.monotonic()
            process = subprocess.Popen(
                self.adapted(command.text),
                shell=True,
                cwd=self.checkout,
                env=dict(self.variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Its children can then be ended with it.
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process, signal.SIGKILL)
                process.wait()
            seconds = time.monotonic() - began
            output.seek(0)
            if code is None:
                raise Failed.at(command, f"It did not end in {PATIENCE_SECONDS} s", output.read())
            if code:
                raise Failed.at(command, f"Exit code {code}", output.read())
        return seconds

    @contextmanager
    def running(self, command: Command, until: str) -> Iterator[tuple[re.Match[str], float]]:
        """Start a command; yield the first line that matches, and the seconds until then.

        At the end, press Ctrl-C. Raise Failed if the line does not come, or if it does not end then.
        """
        began = time.monotonic()
        process = subprocess.Popen(
            # A shell's background jobs ignore SIGINT, and so would what they start.
            ["env", "--default-signal=INT", "sh", "-c", command.text],
            cwd=self.checkout,
            env=dict(self.variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        lines = queue.SimpleQueue[str]()
        # Read until the end, so that the program never waits for a reader.
        drain = threading.Thread(target=_drain, args=(process, lines), daemon=True)
        drain.start()
        printed: list[str] = []
        try:
            yield _find(command, lines, until, printed), time.monotonic() - began
        finally:
            _end(process, signal.SIGINT)
            drain.join(_STOP_SECONDS)
            ended = not drain.is_alive()
            _end(process, signal.SIGKILL)
            # A child in another group may still have the pipe.
            drain.join(_STOP_SECONDS)
            process.wait()
        printed.extend(iter(lines.get, ""))
        if not ended:
            raise Failed.at(command, f"It did not end within {_STOP_SECONDS} s of Ctrl-C", "".join(printed))
        if "Traceback" in "".join(printed):
            raise Failed.at(command, "It ended with a traceback", "".join(printed))


def without_this_environment() -> dict[str, str]:
    """Return the environment's variables without those of a virtual environment, make, and tensorferry.

    What configures pip is kept.
    """
    dropped = re.compile(r"(VIRTUAL_ENV|PYTHON|MAKE|MFLAGS|TENSORFERRY_|PORT$|DEVICE$)")
    kept = {name: value for name, value in os.environ.items() if not dropped.match(name)}
    folders = kept.get("PATH", os.defpath).split(os.pathsep)
    kept["PATH"] = os.pathsep.join(
        folder for folder in folders if not Path(folder).is_relative_to(sys.prefix)
    )
    return kept


def _drain(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            lines.put(line)
    lines.put("")


def _find(command: Command, lines: queue.SimpleQueue[str], until: str, printed: list[str]) -> re.Match[str]:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            line = lines.get(timeout=max(end - time.monotonic(), 0))
        except queue.Empty:
            raise Failed.at(
                command, f"No line with {until!r} in {PATIENCE_SECONDS} s", "".join(printed)
            ) from None
        if not line:
            # Still the end, for the caller that reads the remaining lines.
            lines.put("")
            raise Failed.at(command, f"It ended without a line with {until!r}", "".join(printed))
        printed.append(line)
        if found := re.search(until, line):
            return found


def _end(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    """Signal a program and its children, if there are any."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass
