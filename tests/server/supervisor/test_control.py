"""Messages between the supervisor and its children, and what is not one."""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from support.open_files import open_files

from tensorferry.server.supervisor.control import (
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    MAX_PACKET_BYTES,
    ControlChannel,
    ControlError,
    Message,
)


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = open_files()
    yield
    assert not open_files() - before


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
    fields: dict[str, Any] = {
        "port": 1,
        "serving": {"ü": True},
        "seconds": 0.5,
        "none": None,
        "list": [1, "a"],
    }
    pair[0].send("health", fields)
    pair[0].send("drain", {})
    first, second = received(pair[1]), received(pair[1])
    assert (first.kind, first.fields) == ("health", fields)
    assert (second.kind, second.fields) == ("drain", {})


def test_the_end_of_file_is_no_message(pair: tuple[ControlChannel, ControlChannel]) -> None:
    pair[0].send("last", {})
    pair[0].close()
    assert received(pair[1]).kind == "last"
    assert pair[1].receive() is None
    with pytest.raises(BrokenPipeError):
        pair[1].send("late", {})


def test_the_end_of_file_after_unread_messages(pair: tuple[ControlChannel, ControlChannel]) -> None:
    pair[0].send("last", {})
    pair[1].send("unread", {})
    pair[0].close()
    assert received(pair[1]).kind == "last"
    assert pair[1].receive() is None
    assert pair[1].receive() is None


def test_the_last_message_of_a_child_that_read_nothing(pair: tuple[ControlChannel, ControlChannel]) -> None:
    """The supervisor must get a start error although it sends to a child that ends."""
    pair[1].send("unread", {})
    pair[0].send("failed", {})
    pair[0].close()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        pair[1].send("unread", {})
    assert received(pair[1]).kind == "failed"
    assert pair[1].receive() is None


def test_descriptors_are_the_takers(pair: tuple[ControlChannel, ControlChannel]) -> None:
    files = [os.memfd_create(f"file {index}") for index in range(3)]
    for index, file in enumerate(files):
        os.write(file, bytes([index]))
    pair[0].send("link", {"engine": 1}, files)
    for file in files:
        os.close(file)
    message = received(pair[1])
    with pytest.raises(ControlError, match="3 file descriptors; expected 2"):
        message.take_fds(2)
    taken = message.take_fds(3)
    message.close()
    assert [os.pread(fd, 1, 0) for fd in taken] == [b"\0", b"\1", b"\2"]
    assert not any(os.get_inheritable(fd) for fd in taken)
    for fd in taken:
        os.close(fd)


def test_descriptors_that_are_not_taken_are_closed(pair: tuple[ControlChannel, ControlChannel]) -> None:
    before = open_files()
    pair[0].send("link", {}, [0, 1, 2])
    message = received(pair[1])
    assert len(open_files() - before) == 3
    message.close()
    message.close()
    assert not open_files() - before


@pytest.mark.parametrize("size", [MAX_PACKET_BYTES - 100, MAX_PACKET_BYTES, 5 << 20])
def test_large_messages(pair: tuple[ControlChannel, ControlChannel], size: int) -> None:
    file = os.memfd_create("beside")
    pair[0].send("health", {"text": "x" * size}, [file])
    os.close(file)
    message = received(pair[1])
    assert message.fields == {"text": "x" * size}
    (taken,) = message.take_fds(1)
    os.close(taken)


def test_too_large_messages_are_not_sent(pair: tuple[ControlChannel, ControlChannel]) -> None:
    with pytest.raises(ControlError, match="at most"):
        pair[0].send("health", {"text": "x" * MAX_MESSAGE_BYTES})


def test_a_front_end_may_send_no_large_message() -> None:
    ours, theirs = ControlChannel.pair(small_only=True)
    child = ControlChannel(theirs)
    child.send("listening", {"text": "x" * MAX_PACKET_BYTES})
    with pytest.raises(ControlError, match="memfd is not expected"):
        ours.receive()
    ours.close()
    child.close()


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
        (b'{"kind": "in_memfd"}', "memfd is not expected"),
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


def test_a_malformed_packet_leaves_no_descriptor(raw: tuple[ControlChannel, socket.socket]) -> None:
    channel, other = raw
    socket.send_fds(other, [b"no JSON"], [0, 1])
    with pytest.raises(ControlError):
        channel.receive()
    socket.send_fds(other, [b'{"kind": "many"}'], [0] * (MAX_DESCRIPTORS + 1))
    with pytest.raises(ControlError, match="descriptors are lost"):
        channel.receive()


def test_an_empty_packet_is_the_end_but_not_with_descriptors(
    raw: tuple[ControlChannel, socket.socket],
) -> None:
    channel, other = raw
    other.sendmsg([b""], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
    with pytest.raises(ControlError, match="empty"):
        channel.receive()


@pytest.mark.parametrize("kind", ["pipe", "file", "unsealed", "sparse", "no JSON"])
def test_a_memfd_that_is_none_or_not_sealed(
    raw: tuple[ControlChannel, socket.socket], kind: str, tmp_path: Any
) -> None:
    channel, other = raw
    if kind == "pipe":
        reading, writing = os.pipe()
        os.close(writing)
        file = reading
    elif kind == "file":
        file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    else:
        file = os.memfd_create(kind, os.MFD_ALLOW_SEALING)
        os.write(file, b"x")
        if kind == "sparse":
            os.truncate(file, MAX_MESSAGE_BYTES + 1)
        if kind != "unsealed":
            seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    socket.send_fds(other, [b'{"kind": "in_memfd"}'], [file])
    os.close(file)
    with pytest.raises(ControlError):
        channel.receive()


def test_random_packets(raw: tuple[ControlChannel, socket.socket]) -> None:
    channel, other = raw
    random = Random(1)
    whole = json.dumps({"kind": "health", "serving": {"m": True}, "ready": True}).encode()
    for _ in range(3000):
        packet = bytearray(whole)
        for _ in range(random.randint(1, 8)):
            packet[random.randrange(len(packet))] = random.randrange(256)
        other.send(packet[: random.randint(1, len(packet))])
        try:
            message = channel.receive()
        except ControlError:
            continue
        assert message is not None
        assert isinstance(message.kind, str)


def test_without_blocking(pair: tuple[ControlChannel, ControlChannel]) -> None:
    channel, other = pair
    channel.set_blocking(False)
    with pytest.raises(BlockingIOError):
        channel.receive()
    sent = _fill(channel)
    assert 1 < sent < 1000
    for _ in range(sent):
        assert received(other).kind == "health"


def _fill(channel: ControlChannel) -> int:
    """Send until nothing more is accepted; return the number of messages."""
    for sent in range(1000):
        try:
            channel.send("health", {"text": "x" * 10_000})
        except BlockingIOError:
            return sent
    return 1000


def test_a_receiver_waits_for_the_next_message(pair: tuple[ControlChannel, ControlChannel]) -> None:
    kinds: list[str] = []
    thread = threading.Thread(target=lambda: kinds.append(received(pair[1]).kind))
    thread.start()
    pair[0].send("drain", {})
    thread.join()
    assert kinds == ["drain"]
