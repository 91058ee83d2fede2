"""`tensorferry serve --reload`: for development, a server that is started again when a file changes."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tensorferry.server.cli.signals import forward_signals
from tensorferry.server.config.load import models_in
from tensorferry.server.config.server_config import PYTHON_SUFFIX, ServerConfig
from tensorferry.server.errors import ConfigError

_log = logging.getLogger("tensorferry.server")

# Time between two looks at the files.
_POLL_SECONDS = 0.5
# Directories below an app file's that are not watched: environments and caches have thousands of files.
_SKIPPED = frozenset(("__pycache__", "node_modules", "site-packages", "venv"))

# The time and size of each file.
Snapshot = Mapping[Path, tuple[int, int]]


def serve_reloading(config: ServerConfig, argv: Sequence[str], file: Path | None) -> int:
    """Run the server as a child process, and start it again when a watched file changes; return its last exit code.

    `file` is that of --config. After SIGTERM or Ctrl-C the child is stopped and not started again. A child that ended by
    itself, for instance because a file has an error, is started again after the next change.
    """
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    forward_signals(signals.put)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # A terminal that closes sends it to this process only. The child would go on, and keep the port.
        signal.signal(signal.SIGHUP, lambda received, frame: None)
    command = [sys.executable, "-m", "tensorferry.server", "serve", *without_reload(argv)]

    def start() -> subprocess.Popen[bytes]:
        # In a process group of its own, because a terminal sends Ctrl-C to the whole group, and two would end it at once.
        return subprocess.Popen(command, process_group=0)

    return run_reloading(start, lambda: snapshot(watched(config, file)), signals)


def watched(config: ServerConfig, file: Path | None) -> Sequence[Path]:
    """Return the files of the models, that of --config, and those of the models that it names now."""
    sources = list(config.models)
    if file is not None:
        # The server says what is wrong with the file.
        with suppress(ConfigError):
            sources += models_in(file)
    return [source.path for source in sources if source.origin is None] + ([] if file is None else [file])


def run_reloading(
    start: Callable[[], subprocess.Popen[bytes]],
    look: Callable[[], Snapshot],
    signals: queue.SimpleQueue[int],
) -> int:
    """Run what `start` starts until a signal arrives; start it again when `look` returns something else."""
    while True:
        before = look()
        child = start()
        number = _wait(look, before, signals)
        if child.poll() is None:
            number = _stop(child, number, signals)
        if number is not None:
            return child.returncode
        changed = sorted(set(before.items()) ^ set(look().items()))
        _log.info(
            "%s changed: the server is started again (--reload)", changed[0][0] if changed else "a file"
        )


def _wait(look: Callable[[], Snapshot], before: Snapshot, signals: queue.SimpleQueue[int]) -> int | None:
    """Return the signal that arrives, or None when a file has changed."""
    while True:
        try:
            return signals.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if look() != before:
                return None


def _stop(child: subprocess.Popen[bytes], number: int | None, signals: queue.SimpleQueue[int]) -> int | None:
    """Stop the child, after a signal or a change; return the first signal. The child gets the second, which ends it at once."""
    child.terminate()
    while True:
        try:
            child.wait(_POLL_SECONDS)
            return number
        except subprocess.TimeoutExpired:
            pass
        with suppress(queue.Empty):
            arrived = signals.get(block=False)
            if number is not None:
                child.send_signal(arrived)
            number = arrived


def without_reload(argv: Sequence[str]) -> list[str]:
    """Return the arguments with --no-reload: before "--", after which no flag is read."""
    arguments = list(argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end], "--no-reload", *arguments[end:]]


def snapshot(paths: Iterable[Path]) -> Snapshot:
    """Return the state of these files, and of all Python files beside and below each Python file among them."""
    found: dict[Path, tuple[int, int]] = {}
    for path in paths:
        for file in _python_files(path.absolute().parent) if path.suffix == PYTHON_SUFFIX else [path]:
            try:
                status = file.stat()
            except OSError:
                # It was removed meanwhile.
                continue
            found[file] = status.st_mtime_ns, status.st_size
    return found


def _python_files(directory: Path) -> Iterable[Path]:
    for folder, below, files in os.walk(directory):
        below[:] = [name for name in below if name not in _SKIPPED and not name.startswith(".")]
        for name in files:
            if name.endswith(PYTHON_SUFFIX):
                yield Path(folder, name)
