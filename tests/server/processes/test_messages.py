"""Messages between processes, and what is not one."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tensorferry.server.processes.messages import MAX_FIELDS_BYTES, Channel, Message, MessageError

MAX_CONTENT = 4 << 20


@pytest.fixture
def raw() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel without content, and the socket of its other side."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    channels = [Channel(end, MAX_CONTENT) for end in socket.socketpair()]
    yield channels[0], channels[1]
    for channel in channels:
        channel.close()


def received(channel: Channel) -> Message:
    message = channel.receive()
    assert message is not None
    return message


def packed(head: bytes, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", len(head), len(content)) + head + content


def test_fields_and_content_arrive_as_they_were_sent(pair: tuple[Channel, Channel]) -> None:
    fields: dict[str, Any] = {"port": 1, "serving": {"ü": True}, "none": None, "list": [0.5, "a"]}
    pair[0].send("start", fields)
    pair[0].send("drain", {}, b"content")
    assert received(pair[1]) == Message("start", fields)
    assert received(pair[1]) == Message("drain", {}, b"content")


@pytest.mark.parametrize("size", [64 << 10, MAX_CONTENT])
def test_what_the_socket_does_not_take_is_kept_and_sent_in_order(
    pair: tuple[Channel, Channel], size: int
) -> None:
    sender, receiver = pair
    sender._socket.setblocking(False)
    receiver._socket.setblocking(False)
    contents = [bytes([number]) * size for number in range(20)]
    for number, content in enumerate(contents):
        sender.send("part", {"number": number}, content)
    assert sender.unsent
    found: list[Message] = []
    while len(found) < len(contents):
        sender.flush()
        receiver.fill()
        found += iter(receiver.take, None)
    assert found == [Message("part", {"number": n}, content) for n, content in enumerate(contents)]
    assert not sender.unsent


def test_the_end_of_file_comes_after_the_last_message(pair: tuple[Channel, Channel]) -> None:
    """The supervisor must get a start error although it sends to a child that ends."""
    pair[1].send("unread", {})
    pair[0].send("failed", {})
    pair[0].close()
    for _ in range(2):
        pair[1].send("lost", {})
        assert not pair[1].unsent
    assert received(pair[1]).kind == "failed"
    assert pair[1].receive() is None
    pair[1].close()
    pair[1].send("late", {})


def test_the_largest_message(pair: tuple[Channel, Channel]) -> None:
    room = MAX_FIELDS_BYTES - len('{"kind": "findings", "text": ""}')
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(pair[0].send, "findings", {"text": "x" * room})
        assert received(pair[1]).fields == {"text": "x" * room}
        sent.result()
    with pytest.raises(
        MessageError, match="a message has 1048577 bytes of fields and 0 of content; at most 1048576"
    ):
        pair[0].send("findings", {"text": "x" * (room + 1)})
    with pytest.raises(MessageError, match=f"{MAX_CONTENT + 1} of content"):
        pair[0].send("run", {}, bytes(MAX_CONTENT + 1))


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"\xff\xfe", "no JSON"),
        (b"[" * 60_000, "no JSON"),
        (b"9" * 60_000, "no JSON"),
        (b"[]", "no JSON object with a kind"),
        (b"{}", "no JSON object with a kind"),
        (b'{"kind": 1}', "no JSON object with a kind"),
    ],
)
def test_a_malformed_message_does_not_affect_the_next_one(
    raw: tuple[Channel, socket.socket], head: bytes, reason: str
) -> None:
    channel, other = raw
    other.sendall(packed(head) + packed(b'{"kind": "next"}'))
    with pytest.raises(MessageError, match=reason):
        channel.receive()
    assert received(channel).kind == "next"


@pytest.mark.parametrize("lengths", [(MAX_FIELDS_BYTES + 1, 0), (2, 1), (2, 2**64 - 1)])
def test_lengths_above_the_bounds_are_refused_before_anything_is_received(
    raw: tuple[Channel, socket.socket], lengths: tuple[int, int]
) -> None:
    channel, other = raw
    other.sendall(struct.pack("<IQ", *lengths))
    with pytest.raises(MessageError, match=f"{lengths[0]} bytes of fields and {lengths[1]} of content"):
        channel.receive()
