"""The child's side: its first message, callbacks, and what ends the process."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from polling import PATIENCE
from support.open_files import open_files

from tensorferry.server.supervisor import child_process
from tensorferry.server.supervisor.child_process import ChildProcess
from tensorferry.server.supervisor.control import ControlChannel, Message


class Parent:
    """The supervisor's side, and the events of the child."""

    def __init__(self) -> None:
        self.channel, self.theirs = ControlChannel.pair()
        self.lost = threading.Event()
        self.children: list[ChildProcess] = []

    def start(self, **fields: Any) -> ChildProcess:
        self.channel.send("start", fields)
        return self.child()

    def child(self) -> ChildProcess:
        self.children.append(ChildProcess(self.theirs.detach(), self.lost.set))
        return self.children[-1]

    def close(self) -> None:
        """Close both ends. A child's end is otherwise closed by the end of its process."""
        self.channel.close()
        for child in self.children:
            if child._thread.ident is not None:
                child._thread.join(PATIENCE)
            child._channel.close()

    def receive(self) -> Message:
        message = self.channel.receive()
        assert message is not None
        return message


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parent]:
    monkeypatch.setattr(child_process, "_end_only_with_supervisor", lambda: None)
    before = open_files()
    parent = Parent()
    yield parent
    parent.close()
    assert not open_files() - before


def test_the_first_message_is_kept_and_the_rest_calls_back(parent: Parent) -> None:
    child = parent.start(front_end=1, generation=2)
    assert child.start == {"front_end": 1, "generation": 2}
    calls: list[Any] = []
    over = threading.Event()
    child.on("health", lambda message: calls.append(message.fields))
    child.on("drain", lambda message: over.set())
    parent.channel.send("health", {"ready": True})
    child.run()
    parent.channel.send("unknown", {})
    parent.channel.send("health", {"ready": False})
    parent.channel.send("drain", {})
    assert over.wait(PATIENCE)
    assert calls == [{"ready": True}, {"ready": False}]
    assert not parent.lost.is_set()
    parent.channel.close()
    assert parent.lost.wait(PATIENCE)


def test_descriptors_that_no_callback_takes_are_closed(parent: Parent) -> None:
    child = parent.start()
    taken: list[int] = []
    over = threading.Event()
    child.on("take", lambda message: taken.extend(message.take_fds(1)))
    child.on("leave", lambda message: None)
    child.on("drain", lambda message: over.set())
    before = open_files()
    child.run()
    for kind in ("take", "leave", "unknown"):
        parent.channel.send(kind, {}, [0])
    parent.channel.send("drain", {})
    assert over.wait(PATIENCE)
    assert len(open_files() - before) == 1
    os.close(taken[0])


def test_pings_are_answered(parent: Parent) -> None:
    child = parent.start()
    child.run()
    for _ in range(3):
        parent.channel.send("ping", {})
        assert parent.receive().kind == "pong"


def test_messages_to_the_supervisor(parent: Parent) -> None:
    child = parent.start()
    child.send("listening", port=1)
    child.failed("no such model")
    first, second = parent.receive(), parent.receive()
    assert (first.kind, first.fields) == ("listening", {"port": 1})
    assert (second.kind, second.fields) == ("failed", {"message": "no such model"})
    parent.channel.close()
    child.send("late")


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda other: other.send(b"no JSON"), "unusable (bug): a packet of 7 bytes is no JSON"),
        (lambda other: other.send(b'{"kind": "wrong"}'), "the control thread crashed (bug)"),
        (lambda other: other.send(b'{"kind": "link"}'), "cannot be acted on: exiting at once: [Errno 24]"),
    ],
)
def test_a_bug_or_a_lack_of_files_ends_the_process(
    parent: Parent, caplog: Any, end: Callable[[socket.socket], object], text: str
) -> None:
    child = parent.start()

    def crash(message: Message) -> None:
        raise ValueError(message.kind)

    def lack(message: Message) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    child.on("wrong", crash)
    child.on("link", lack)
    child.run()
    end(parent.channel._socket)
    assert parent.lost.wait(PATIENCE)
    assert text in caplog.text


@pytest.mark.parametrize("first", [b'{"kind": "link"}', b"", b"no JSON"])
def test_a_first_message_that_is_none_ends_the_process(parent: Parent, first: bytes) -> None:
    parent.channel._socket.send(first)
    with pytest.raises(SystemExit):
        parent.child()
    assert parent.lost.is_set()
