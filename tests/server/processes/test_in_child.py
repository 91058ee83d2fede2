"""The child's side: callbacks for the parent's messages, and what ends the process."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from polling import PATIENCE
from support.open_files import open_files

from tensorferry.server.processes import in_child
from tensorferry.server.processes.in_child import Parent
from tensorferry.server.processes.messages import Channel, Message


class Rig:
    """The parent's side, and whether the child has lost it."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.lost = threading.Event()
        reading, self.writing = os.pipe()
        self.parent = Parent(f"{self.theirs.detach()},{reading}")
        os.close(reading)

    def close(self) -> None:
        """Close both ends. A child's end is otherwise closed by the end of its process."""
        self.channel.close()
        os.close(self.writing)
        for thread in threading.enumerate():
            if thread.name == "control":
                thread.join(PATIENCE)
        self.parent._channel.close()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(in_child, "_end_only_with_parent", lambda lifeline: None)
    before = open_files()
    rig = Rig()
    monkeypatch.setattr(in_child, "exit_at_once", rig.lost.set)
    yield rig
    rig.close()
    assert not open_files() - before


def test_messages_are_received_and_then_call_back(rig: Rig) -> None:
    rig.channel.send("start", {"index": 1})
    rig.channel.send("processes", {"processes": [1]})
    assert rig.parent.receive() == Message("start", {"index": 1})
    calls: list[Any] = []
    over = threading.Event()
    rig.parent.obey({"processes": calls.append, "drain": lambda fields: over.set()})
    rig.channel.send("unknown", {})
    rig.channel.send("processes", {"processes": []})
    rig.channel.send("drain", {})
    assert over.wait(PATIENCE)
    assert calls == [{"processes": [1]}, {"processes": []}]
    assert not rig.lost.is_set()
    rig.channel.close()
    assert rig.lost.wait(PATIENCE)


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (b"no JSON", "unusable (bug): the fields of a message, 7 bytes, are no JSON"),
        (b'{"kind": "wrong"}', "the control thread crashed (bug)"),
        (b'{"kind": "ping"}', "cannot be acted on: exiting at once: [Errno 2]"),
    ],
)
def test_a_bug_or_a_lack_of_files_ends_the_process(
    rig: Rig, caplog: pytest.LogCaptureFixture, head: bytes, text: str
) -> None:
    rig.parent.obey({"wrong": lambda fields: fields["missing"], "ping": lambda fields: os.remove("/missing")})
    rig.channel._socket.send(struct.pack("<IQ", len(head), 0) + head)
    assert rig.lost.wait(PATIENCE)
    assert text in caplog.text
