"""One child process: its start, how it ended, and messages that it does not read at once."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from polling import PATIENCE
from support.open_files import open_files

from tensorferry.server.processes.child import Child, Ending
from tensorferry.server.processes.control import Message
from tensorferry.server.processes.restart_delay import RestartDelay

Launch = Callable[..., Child]

LARGE = {"x": "x" * 30_000}


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Starts children; the test fails if one leaves a descriptor."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(Path(__file__).parents[2])]))
    before = open_files()
    children = []

    def launch(*argv: str, **options: Any) -> Child:
        children.append(Child("support.processes.simple_child", argv, **options))
        return children[-1]

    yield launch
    for child in children:
        if child._process.returncode is None:
            child.kill()
            assert child.wait(PATIENCE)
            child.reap()
    assert not open_files() - before


def receive(child: Child) -> Message:
    poll = select.poll()
    poll.register(child.channel, select.POLLIN)
    assert poll.poll(PATIENCE * 1e3)
    message = child.receive()
    assert message is not None
    return message


@pytest.mark.parametrize(
    ("argv", "ending"),
    [
        (("exit", "0"), Ending("exit status 0")),
        (("exit", "3"), Ending("exit status 3")),
        (("signal", "6"), Ending("killed by SIGABRT", 6)),
        (("signal", "40"), Ending("killed by signal 40", 40)),
    ],
)
def test_how_it_ended(launch: Launch, argv: tuple[str, ...], ending: Ending) -> None:
    child = launch(*argv)
    assert child.wait(PATIENCE)
    # It has ended, but it is not reaped: its process id cannot belong to another process.
    child.kill()
    child.send("late", {})
    assert not child.has_unsent
    assert child.reap() == ending
    assert ending.clean == (argv == ("exit", "0"))
    child.kill()
    child.send("late", {})


def test_it_inherits_files_and_variables(launch: Launch) -> None:
    file = os.memfd_create("page")
    os.pwrite(file, b"content", 0)
    child = launch("inherit", str(file), "GPUS", inherited=[file], variables={"GPUS": "1"})
    assert receive(child).fields == {"content": "content", "value": "1"}
    os.close(file)


def test_signals_are_blocked_until_the_child_ignores_them(launch: Launch) -> None:
    child = launch("hang")
    os.kill(child.pid, signal.SIGTERM)
    assert receive(child).kind == "here"
    assert not child.wait(0)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


@pytest.mark.parametrize("part", ["Popen", "pidfd_open"])
def test_a_child_that_cannot_be_started(launch: Launch, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(subprocess if part == "Popen" else os, part, fail)
    with pytest.raises(OSError, match="too many open files"):
        launch("hang")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_messages_wait_for_the_reader_and_only_the_latest_state(launch: Launch) -> None:
    child = launch("read")
    os.kill(child.pid, signal.SIGSTOP)
    for number in range(30):
        child.send("findings", {"number": number, **LARGE})
        child.send("processes", {"number": number})
        child.send("ping", {})
    assert child.has_unsent
    os.kill(child.pid, signal.SIGCONT)
    received: list[Message] = []
    while Message("processes", {"number": 29}) not in received:
        received.append(receive(child))
        child.flush()
    assert receive(child).kind == "ping"
    numbers = [message.fields["number"] for message in received if message.kind == "findings"]
    assert numbers == list(range(30))
    # Those that were not sent at once are replaced.
    assert len(received) < 80
    assert not child.has_unsent


@pytest.mark.parametrize(
    ("messages", "fields", "reason"),
    [(400, LARGE, "257 messages wait for it"), (1, {"x": "x" * 100_000}, "findings has 100")],
)
def test_a_child_that_cannot_be_sent_messages_is_killed(
    launch: Launch, caplog: pytest.LogCaptureFixture, messages: int, fields: dict[str, str], reason: str
) -> None:
    child = launch("hang")
    for _ in range(messages):
        child.send("findings", fields)
    assert child.wait(PATIENCE)
    assert f"cannot be sent messages and is killed: {reason}" in caplog.text
    assert not child.has_unsent


def test_restart_delays() -> None:
    delay = RestartDelay()
    unready = [delay.after(1, served=False) for _ in range(10)]
    assert unready == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
    assert [delay.after(1, served=True) for _ in range(3)] == [0.1, 0.1, 0.1]
    assert [delay.after(9.9, served=False) for _ in range(2)] == [0.2, 0.4]
    assert [delay.after(10, served=False), delay.after(1, served=True)] == [0, 0.1]
