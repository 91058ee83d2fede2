"""The command line of `tensorferry serve`: switches, and signals whichever thread they reach."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
from server.rig import PATIENCE

from tensorferry.server import cli
from tensorferry.server.config import ServerConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configurations that `main` would have served."""
    configs: list[ServerConfig] = []

    def serve(config: ServerConfig, output: None) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(cli, "_serve", serve)
    monkeypatch.setattr("tensorferry.server.logs.configure", lambda *args: None)
    return configs


@pytest.mark.parametrize(
    ("arguments", "on"),
    [
        (["--allow-shared-memory", "m.onnx"], True),
        (["m.onnx", "--allow-shared-memory"], True),
        (["--allow-shared-memory=true", "m.onnx"], True),
        (["--allow-shared-memory=false", "m.onnx"], False),
        (["m.onnx"], False),
    ],
)
def test_a_switch_may_stand_alone_before_a_model_too(
    served: list[ServerConfig], arguments: list[str], on: bool
) -> None:
    assert cli.main(arguments) == 0
    (config,) = served
    assert config.allow_shared_memory is on
    assert [source.path for source in config.models] == [Path("m.onnx")]


def test_a_switch_is_true_or_false(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--allow-shared-memory=yes", "m.onnx"]) == 2
    assert "--allow-shared-memory is 'yes'; it must be true or false" in capsys.readouterr().err


def test_a_flag_is_written_out(served: list[ServerConfig], capsys: pytest.CaptureFixture[str]) -> None:
    """Else one that is cut short would mean another once there is one more."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--max-batch", "4", "m.onnx"])
    assert ended.value.code == 2
    assert "--max-batch" in capsys.readouterr().err


def test_help_shows_defaults_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    help = " ".join(capsys.readouterr().out.split())
    assert "8,1 gives two (default: 1)" in help
    assert "(default: (" not in help


_TAKEN_BY_ANOTHER_THREAD = f"""
import queue, signal, threading
from tensorferry.server.cli import _hear_signals

events = queue.SimpleQueue()
_hear_signals(events)

def take():
    # As the kernel may choose: to this thread, not to the main one, which waits.
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    threading.Event().wait()

threading.Timer(0.2, take).start()
print(events.get(timeout={PATIENCE}), flush=True)
import os; os._exit(0)
"""


def test_a_signal_that_another_thread_takes_is_an_event() -> None:
    """The handler of such a one waits for the main thread to wake, which nothing does."""
    heard = subprocess.run(
        [sys.executable, "-c", _TAKEN_BY_ANOTHER_THREAD],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=2 * PATIENCE,
    )
    assert heard.stdout == "15\n", heard.stderr


class _LoadsForLong:
    """An App that still loads its models when it is drained and stopped."""

    loading, enough = threading.Event(), threading.Event()

    def __init__(self, config: ServerConfig, *others: Any) -> None:
        self.config = config

    def start(self) -> None: ...

    def load(self) -> None:
        self.loading.set()
        assert self.enough.wait(PATIENCE)
        raise RuntimeError("after the end")

    def drain(self) -> bool:
        return True

    def stop(self) -> bool:
        return True


class _Left(BaseException):
    """The process is over."""


def test_who_is_stopped_while_models_load_does_not_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes back from ONNX Runtime as the interpreter ends would abort the process: 134, not 0."""

    def hear(events: Any) -> None:
        def term() -> None:
            assert _LoadsForLong.loading.wait(PATIENCE)
            events.put(signal.SIGTERM)

        threading.Thread(target=term, daemon=True).start()

    def leave(code: int, output: Any) -> NoReturn:
        raise _Left(code)

    monkeypatch.setattr(cli, "App", _LoadsForLong)
    monkeypatch.setattr(cli, "_hear_signals", hear)
    monkeypatch.setattr(cli, "_leave", leave)
    monkeypatch.setattr(cli, "watch_threads", lambda lost: None)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    try:
        with pytest.raises(_Left) as left:
            cli._serve(ServerConfig(()), None)  # type: ignore[arg-type]
    finally:
        _LoadsForLong.enough.set()
    assert left.value.args == (0,)
