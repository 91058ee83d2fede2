"""The shell of a new user: its directory is a fresh clone, and it has nothing of this environment."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from docs.pages import ROOT, Command

PATIENCE_SECONDS = 300
_STOP_SECONDS = 30
# Between two looks at what a program has printed.
_LOOK_SECONDS = 0.02
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
        began = time.monotonic()
        with self._started(command) as (process, output):
            try:
                code = process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                what = f"It did not end in {PATIENCE_SECONDS} s"
                raise Failed.at(command, what, output.read_text()) from None
            if code:
                raise Failed.at(command, f"Exit code {code}", output.read_text())
            return time.monotonic() - began

    @contextmanager
    def running(self, command: Command, until: str) -> Iterator[tuple[re.Match[str], float]]:
        """Start a command; yield the first line that matches, and the seconds until then.

        At the end, press Ctrl-C. Raise Failed if the line does not come, or if it does not end then.
        """
        began = time.monotonic()
        with self._started(command) as (process, output):
            try:
                yield _find(command, process, output, until), time.monotonic() - began
            finally:
                _signal(process, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_SECONDS)
            printed = output.read_text()
            if process.returncode is None:
                raise Failed.at(command, f"It did not end within {_STOP_SECONDS} s of Ctrl-C", printed)
            if "Traceback" in printed:
                raise Failed.at(command, "It ended with a traceback", printed)

    @contextmanager
    def _started(self, command: Command) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """Start a command; yield its process, and the file of its output. At the end, kill it with its children."""
        with tempfile.NamedTemporaryFile() as output:
            process = subprocess.Popen(
                # A shell's background jobs ignore SIGINT, and so would what they start.
                ["env", "--default-signal=INT", "sh", "-c", self.adapted(command.text)],
                cwd=self.checkout,
                env=dict(self.variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Its children can then be ended with it.
                start_new_session=True,
            )
            try:
                yield process, Path(output.name)
            finally:
                _signal(process, signal.SIGKILL)
                process.wait()


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


def _find(command: Command, process: subprocess.Popen[bytes], output: Path, until: str) -> re.Match[str]:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        has_ended = process.poll() is not None
        lines, _, _ = (printed := output.read_text()).rpartition("\n")
        if found := re.search(until, lines):
            return found
        if has_ended:
            raise Failed.at(command, f"It ended without a line with {until!r}", printed)
        if time.monotonic() > end:
            raise Failed.at(command, f"No line with {until!r} in {PATIENCE_SECONDS} s", printed)
        time.sleep(_LOOK_SECONDS)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a program and its children, if there are any."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
