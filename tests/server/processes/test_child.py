"""One child process: its start, its messages, how it ended, and the result of a function that runs in one."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from polling import PATIENCE
from support.open_files import open_files

from tensorferry.server.processes.child import Child, ExitStatus, RestartDelay, run_in_child
from tensorferry.server.processes.messages import Message

Launch = Callable[..., Child]
Send = Callable[[Mapping[str, Any]], None]
_TESTS = Path(__file__).parents[2]

LARGE = {"x": "x" * 30_000}


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Starts children; the test fails if one leaves a descriptor."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(_TESTS)]))
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
    message = child.next_message(PATIENCE)
    assert message is not None
    return message


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (("exit", "0"), ExitStatus("exit status 0")),
        (("exit", "3"), ExitStatus("exit status 3")),
        (("signal", "6"), ExitStatus("killed by SIGABRT", 6)),
    ],
)
def test_how_it_ended(launch: Launch, argv: tuple[str, ...], status: ExitStatus) -> None:
    child = launch(*argv)
    assert child.wait(PATIENCE)
    # It has ended, but it is not reaped: its process id cannot belong to another process.
    child.kill()
    child.send("late", {})
    assert child.reap() == status
    assert status.clean == (argv == ("exit", "0"))
    child.kill()
    child.send("late", {})


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


def test_messages_wait_for_the_reader(launch: Launch) -> None:
    child = launch("read", max_content=1 << 20)
    os.kill(child.pid, signal.SIGSTOP)
    sent = [Message("findings", {"number": number}, bytes(1 << 20)) for number in range(4)]
    for message in sent:
        child.send(*message)
    assert child.channel.unsent
    with pytest.raises(TimeoutError):
        child.next_message(0.0)
    os.kill(child.pid, signal.SIGCONT)
    assert [receive(child) for _ in sent] == sent
    assert not child.channel.unsent
    assert child.end(PATIENCE) == ExitStatus("exit status 0")


def test_another_file_ends_the_wait_for_a_message(launch: Launch) -> None:
    child = launch("hang")
    receive(child)
    wake = os.eventfd(1)
    assert child.next_message(PATIENCE, wake) is None
    os.close(wake)


@pytest.mark.parametrize(
    ("messages", "fields", "reason"),
    [(600, LARGE, r"16\d{6} bytes wait for it"), (1, {"x": "x" * 2_000_000}, "a message has 2000")],
)
def test_a_child_that_cannot_be_sent_messages_is_killed(
    launch: Launch, caplog: pytest.LogCaptureFixture, messages: int, fields: dict[str, str], reason: str
) -> None:
    child = launch("hang")
    for _ in range(messages):
        child.send("findings", fields)
    assert child.wait(PATIENCE)
    assert re.search(f"cannot be sent messages and is killed: {reason}", caplog.text)


def act(what: str, send: Send) -> None:
    print("this is discarded")
    send({"began": what})
    match what:
        case "abort":
            os.abort()
        case "raise":
            raise ValueError("wrong")
        case "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            signal.pause()
    send({"ended": what})


@pytest.mark.parametrize(
    ("what", "status", "sent"),
    [
        ("return", ExitStatus("exit status 0"), ["began", "ended"]),
        ("raise", ExitStatus("exit status 1"), ["began"]),
        ("abort", ExitStatus("killed by SIGABRT", 6), ["began"]),
        # It takes too long.
        ("hang", ExitStatus("killed by SIGKILL", 9), ["began"]),
        ("be killed", ExitStatus("killed by SIGKILL", 9), []),
    ],
)
def test_a_function_in_a_child_has_a_result_or_the_reason_of_its_death(
    launch: Launch, capfd: pytest.CaptureFixture[str], what: str, status: ExitStatus, sent: list[str]
) -> None:
    seconds = 0.01 if what == "hang" else PATIENCE
    on_start = Child.kill if what == "be killed" else lambda child: None
    outcome = run_in_child(act, what, PATIENCE, seconds, on_start)
    assert outcome.sent == [{each: what} for each in sent]
    assert (outcome.status, outcome.late) == (status, what == "hang")
    assert capfd.readouterr() == ("", "")


def test_restart_delays() -> None:
    delay = RestartDelay()
    unready = [delay.after(1, served=False) for _ in range(10)]
    assert unready == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
    assert [delay.after(1, served=True) for _ in range(3)] == [0.1, 0.1, 0.1]
    assert [delay.after(9.9, served=False) for _ in range(2)] == [0.2, 0.4]
    assert [delay.after(10, served=False), delay.after(1, served=True)] == [0, 0.1]
