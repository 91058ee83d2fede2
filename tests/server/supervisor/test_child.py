"""One child process: how it ended, and messages that it does not read at once."""

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

from tensorferry.server.supervisor import child as child_module
from tensorferry.server.supervisor.child import Child, Ending
from tensorferry.server.supervisor.control import ControlChannel, Message
from tensorferry.server.supervisor.restart_delay import RestartDelay

Launch = Callable[..., Child]


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(Path(__file__).parents[2])]))


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts children; the test fails if one leaves a descriptor."""
    before = open_files()
    children = []

    def launch(*argv: str) -> Child:
        children.append(Child("support.processes.simple_child", argv, small_only=False))
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
        (("exit", "0"), Ending("exit status 0", False)),
        (("exit", "3"), Ending("exit status 3", False)),
        (("signal", str(int(signal.SIGABRT))), Ending("killed by SIGABRT", True)),
        (("signal", "40"), Ending("killed by signal 40", True)),
    ],
)
def test_how_it_ended(launch: Launch, argv: tuple[str, ...], ending: Ending) -> None:
    child = launch(*argv)
    assert child.wait(PATIENCE)
    # It has ended, but it is not reaped: its process id cannot belong to another process.
    child.kill()
    assert child.reap() == ending
    child.kill()
    child.send("late", {}, [os.memfd_create("link")])
    assert not child.has_unsent


def test_a_module_that_does_not_exist(launch: Launch, capfd: Any) -> None:
    child = Child("no.such.module", [], small_only=True)
    assert child.wait(PATIENCE)
    assert child.reap() == Ending("exit status 1", False)
    assert "No module named" in capfd.readouterr().err


def test_messages_and_descriptors_arrive(launch: Launch) -> None:
    child = launch("read")
    child.send("link", {"fds": 3}, [os.memfd_create("link") for _ in range(3)])
    assert receive(child).fields == {"fds": 3}
    child.channel.close()
    assert child.wait(PATIENCE)
    assert child.reap() == Ending("exit status 0", False)


def test_signals_are_blocked_until_the_child_ignores_them(launch: Launch) -> None:
    child = launch("hang")
    os.kill(child.pid, signal.SIGTERM)
    assert receive(child).kind == "here"
    assert not child.wait(0)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


class TestUnsent:
    def test_messages_wait_for_the_reader_in_order(self, launch: Launch) -> None:
        child = launch("read")
        os.kill(child.pid, signal.SIGSTOP)
        for number in range(30):
            child.send("text", {"number": number, "x": "x" * 30_000})
        child.send("link", {"fds": 1}, [os.memfd_create("link")])
        assert child.has_unsent
        os.kill(child.pid, signal.SIGCONT)
        numbers = []
        while (message := receive(child)).kind == "text":
            numbers.append(message.fields["number"])
            child.flush()
        assert numbers == list(range(30))
        assert message.fields == {"fds": 1}
        assert not child.has_unsent

    def test_only_the_latest_health_is_kept(self, launch: Launch) -> None:
        child = launch("hang")
        while not child.has_unsent:
            child.send("text", {"x": "x" * 30_000})
        for number in range(1000):
            child.send("health", {"number": number})
        assert [unsent.fields for unsent in child._unsent if unsent.kind == "health"] == [{"number": 999}]
        assert not child.wait(0)

    def test_a_child_that_reads_nothing_is_killed(self, launch: Launch, caplog: Any) -> None:
        child = launch("hang")
        before = open_files()
        for _ in range(child_module._MAX_UNSENT + 100):
            child.send("text", {"x": "x" * 30_000}, [os.memfd_create("link")])
        assert child.wait(PATIENCE)
        assert not open_files() - before
        assert "cannot be sent messages and is killed: 257 messages wait for it" in caplog.text
        assert child.reap() == Ending("killed by SIGKILL", True)

    def test_a_child_that_has_closed_its_channel_is_not_killed(self, launch: Launch) -> None:
        child = launch("exit", "0")
        assert child.wait(PATIENCE)
        child.send("late", {}, [os.memfd_create("link")])
        assert not child.has_unsent
        assert child.reap() == Ending("exit status 0", False)

    def test_a_child_that_nothing_can_be_sent_to_is_killed(
        self, launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        child = launch("hang")

        def fail(*arguments: Any) -> None:
            raise OSError(errno.ETOOMANYREFS, "too many descriptors in flight")

        monkeypatch.setattr(ControlChannel, "send", fail)
        child.send("link", {}, [os.memfd_create("link")])
        assert child.wait(PATIENCE)
        assert "too many descriptors in flight" in caplog.text


@pytest.mark.parametrize("part", ["Popen", "pidfd_open"])
def test_a_child_that_cannot_be_started(launch: Launch, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(subprocess if part == "Popen" else os, part, fail)
    with pytest.raises(OSError, match="too many open files"):
        launch("hang")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_restart_delays() -> None:
    delay = RestartDelay()
    unready = [delay.after(1, served=False) for _ in range(10)]
    assert unready == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
    assert [delay.after(1, served=True) for _ in range(3)] == [0.1, 0.1, 0.1]
    assert [delay.after(9.9, served=False) for _ in range(2)] == [0.2, 0.4]
    assert [delay.after(10, served=False), delay.after(1, served=True), delay.after(1, served=True)] == [
        0,
        0.1,
        0.1,
    ]
