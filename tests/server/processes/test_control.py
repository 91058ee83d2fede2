"""Messages between the supervisor and its children, and what is not one."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from tensorferry.server.processes.control import MAX_PACKET_BYTES, ControlChannel, ControlError, Message


@pytest.fixture
def raw() -> Iterator[tuple[ControlChannel, socket.socket]]:
    """A channel, and the socket of its other side."""
    channel, other = ControlChannel.pair()
    yield channel, other
    channel.close()
    other.close()


@pytest.fixture
def pair(raw: tuple[ControlChannel, socket.socket]) -> tuple[ControlChannel, ControlChannel]:
    channel, other = raw
    return channel, ControlChannel(other)


def received(channel: ControlChannel) -> Message:
    message = channel.receive()
    assert message is not None
    return message


def test_fields_arrive_as_they_were_sent(pair: tuple[ControlChannel, ControlChannel]) -> None:
    fields: dict[str, Any] = {"port": 1, "serving": {"ü": True}, "none": None, "list": [0.5, "a"]}
    pair[0].send("start", fields)
    pair[0].send("drain", {})
    assert received(pair[1]) == Message("start", fields)
    assert received(pair[1]) == Message("drain", {})


def test_the_end_of_file_comes_after_the_last_message(pair: tuple[ControlChannel, ControlChannel]) -> None:
    """The supervisor must get a start error although it sends to a child that ends."""
    pair[1].send("unread", {})
    pair[0].send("failed", {})
    pair[0].close()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        pair[1].send("unread", {})
    assert received(pair[1]).kind == "failed"
    assert pair[1].receive() is None


def test_the_largest_message(pair: tuple[ControlChannel, ControlChannel]) -> None:
    room = MAX_PACKET_BYTES - len('{"kind":"findings","text":""}')
    pair[0].send("findings", {"text": "x" * room})
    assert received(pair[1]).fields == {"text": "x" * room}
    with pytest.raises(ControlError, match="findings has 65537 bytes; at most 65536 are possible"):
        pair[0].send("findings", {"text": "x" * (room + 1)})


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (b"\xff\xfe", "no JSON"),
        (b"{", "no JSON"),
        (b"[" * 60_000, "no JSON"),
        (b"9" * 60_000, "no JSON"),
        (b"[]", "no JSON object with a kind"),
        (b"{}", "no JSON object with a kind"),
        (b'{"kind": 1}', "no JSON object with a kind"),
        (b'{"kind": "' + b"x" * MAX_PACKET_BYTES + b'"}', "more than 65536 bytes"),
    ],
)
def test_malformed_packets(raw: tuple[ControlChannel, socket.socket], packet: bytes, reason: str) -> None:
    channel, other = raw
    other.send(packet)
    other.send(b'{"kind": "next"}')
    with pytest.raises(ControlError, match=reason):
        channel.receive()
    assert received(channel).kind == "next"


def test_random_packets(raw: tuple[ControlChannel, socket.socket]) -> None:
    channel, other = raw
    random = Random(1)
    whole = json.dumps({"kind": "ready", "serving": {"m": True}, "ready": True}).encode()
    for _ in range(1000):
        packet = bytearray(whole)
        for _ in range(random.randint(1, 8)):
            packet[random.randrange(len(packet))] = random.randrange(256)
        other.send(packet[: random.randint(1, len(packet))])
        try:
            assert isinstance(received(channel).kind, str)
        except ControlError:
            continue
