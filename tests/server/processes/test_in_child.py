"""The child's side: its first message, callbacks, and what ends the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from polling import PATIENCE
from support.open_files import open_files

from tensorferry.server.processes import in_child
from tensorferry.server.processes.control import ControlChannel, Message
from tensorferry.server.processes.in_child import InChild


class Parent:
    """The supervisor's side, and whether the child has lost it."""

    def __init__(self) -> None:
        self.channel, self.theirs = ControlChannel.pair()
        self.lost = threading.Event()
        self.children: list[InChild] = []

    def start(self, **fields: Any) -> InChild:
        self.channel.send("start", fields)
        return self.child()

    def child(self) -> InChild:
        self.children.append(InChild(self.theirs.detach(), self.lost.set))
        return self.children[-1]

    def close(self) -> None:
        """Close both ends. A child's end is otherwise closed by the end of its process."""
        self.channel.close()
        for child in self.children:
            if child._thread.ident is not None:
                child._thread.join(PATIENCE)
            child._channel.close()


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parent]:
    monkeypatch.setattr(in_child, "_end_only_with_supervisor", lambda: None)
    before = open_files()
    parent = Parent()
    yield parent
    parent.close()
    assert not open_files() - before


def test_the_first_message_is_kept_and_the_rest_calls_back(parent: Parent) -> None:
    child = parent.start(index=1)
    assert child.start == {"index": 1}
    calls: list[Any] = []
    over = threading.Event()
    child.on("processes", calls.append)
    child.on("drain", lambda fields: over.set())
    parent.channel.send("processes", {"processes": [1]})
    child.run()
    parent.channel.send("unknown", {})
    parent.channel.send("processes", {"processes": []})
    parent.channel.send("drain", {})
    assert over.wait(PATIENCE)
    assert calls == [{"processes": [1]}, {"processes": []}]
    assert not parent.lost.is_set()
    parent.channel.close()
    assert parent.lost.wait(PATIENCE)


def test_messages_to_the_supervisor(parent: Parent) -> None:
    child = parent.start()
    child.send("pong", number=1)
    child.failed("no such model")
    assert parent.channel.receive() == Message("pong", {"number": 1})
    assert parent.channel.receive() == Message("failed", {"message": "no such model"})
    parent.channel.close()
    child.send("late")


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (b"no JSON", "unusable (bug): a packet of 7 bytes is no JSON"),
        (b'{"kind": "wrong"}', "the control thread crashed (bug)"),
        (b'{"kind": "ping"}', "cannot be acted on: exiting at once: [Errno 2]"),
    ],
)
def test_a_bug_or_a_lack_of_files_ends_the_process(
    parent: Parent, caplog: pytest.LogCaptureFixture, packet: bytes, text: str
) -> None:
    child = parent.start()
    child.on("wrong", lambda fields: fields["missing"])
    child.on("ping", lambda fields: os.remove("/missing"))
    child.run()
    parent.channel._socket.send(packet)
    assert parent.lost.wait(PATIENCE)
    assert text in caplog.text


@pytest.mark.parametrize("first", [b'{"kind": "ping"}', b"", b"no JSON"])
def test_a_first_message_that_is_no_start_ends_the_process(parent: Parent, first: bytes) -> None:
    parent.channel._socket.send(first)
    with pytest.raises(SystemExit):
        parent.child()
    assert parent.lost.is_set()
