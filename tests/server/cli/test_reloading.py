"""`tensorferry serve --reload` starts the server again when a file changes, and ends with it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.server.rig import PATIENCE

from tensorferry.server.cli.reloading import run_reloading, snapshot, watched, without_reload
from tensorferry.server.config.load import load_config


class _Child:
    """A process that ends by itself, or when it is asked to."""

    def __init__(self, code: int | None = None) -> None:
        self.returncode = code
        self.asked = 0

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self.asked += 1
        self.returncode = 0

    def wait(self, timeout: float | None = None) -> int | None:
        return self.returncode


class _Draining(_Child):
    """A process that ends at the second signal."""

    def terminate(self) -> None:
        self.asked += 1

    def wait(self, timeout: float | None = None) -> int | None:
        if self.returncode is None:
            raise subprocess.TimeoutExpired("server", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.returncode = 128 + number


class _Signals(queue.SimpleQueue[int]):
    """Signals that arrive at given looks at the queue."""

    def __init__(self, *arrivals: int | None) -> None:
        self.arrivals = list(arrivals)

    def get(self, block: bool = True, timeout: float | None = None) -> int:
        arrival = self.arrivals.pop(0)
        if arrival is None:
            raise queue.Empty
        return arrival


def _run(children: list[_Child], states: list[Any], signals: _Signals) -> int:
    started = iter(children)
    seen = iter(states)
    start: Any = lambda: next(started)  # noqa: E731
    return run_reloading(start, lambda: {Path("app.py"): (next(seen), 0)}, signals)


def test_a_server_that_failed_is_started_after_the_next_change() -> None:
    children = [_Child(1), _Child()]
    assert _run(children, [1, 1, 2, 2, 2], _Signals(None, None, signal.SIGINT)) == 0
    assert [child.asked for child in children] == [0, 1]


def test_the_code_of_a_server_that_failed_is_returned() -> None:
    assert _run([_Child(1)], [1], _Signals(signal.SIGTERM)) == 1


@pytest.mark.parametrize(("first", "states"), [((signal.SIGINT, None), [1]), ((None, signal.SIGINT), [1, 2])])
def test_the_second_signal_ends_a_server_that_drains(
    first: tuple[int | None, ...], states: list[int]
) -> None:
    """It may drain because a file has changed."""
    assert _run([_Draining()], states, _Signals(*first, signal.SIGINT)) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["app.py", "--reload"], ["app.py", "--reload", "--no-reload"]),
        (["--reload", "--", "app.py"], ["--reload", "--no-reload", "--", "app.py"]),
    ],
)
def test_the_child_does_not_reload(argv: list[str], expected: list[str]) -> None:
    assert without_reload(argv) == expected


def test_models_that_the_file_names_later_are_watched(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('models = ["a.onnx"]')
    config = load_config([], {}, {}, file)
    file.write_text('models = ["a.onnx", "b.onnx"]')
    assert set(watched(config, file)) == {Path("a.onnx"), Path("b.onnx"), file}
    file.write_text("models =")
    assert set(watched(config, file)) == {Path("a.onnx"), file}


# These tests may run below a program that ignores the signal, such as nohup.
_WITH_SIGHUP = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_a_terminal_that_closes_ends_the_server(tmp_path: Path) -> None:
    serve = ["-m", "tensorferry.server", "serve", "--reload", "--port", "0", str(tmp_path / "missing.onnx")]
    command = [sys.executable, "-c", _WITH_SIGHUP, *serve]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            # The child has said why it ended, so the parent waits for a change.
            assert any("no such file" in line for line in process.stderr)
            process.send_signal(signal.SIGHUP)
            assert process.wait(PATIENCE) == 1
        finally:
            process.kill()


def test_python_files_beside_and_below_an_app_are_watched(tmp_path: Path) -> None:
    app, other, model = tmp_path / "app.py", tmp_path / "steps" / "text.py", tmp_path / "elsewhere" / "m.onnx"
    for file in (app, other, model, tmp_path / ".venv" / "x.py", tmp_path / "__pycache__" / "y.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("1")
    before = snapshot([app, model, tmp_path / "gone.onnx"])
    assert set(before) == {app, other, model}
    os.utime(other, ns=(1, 1))
    assert snapshot([app, model]) != before
