"""Control channel between the supervisor and a child: JSON messages with file descriptors, on a Unix socket pair."""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

MAX_PACKET_BYTES = 64 << 10
# Limit of a message in a memfd: the health of some hundred thousand models.
MAX_MESSAGE_BYTES = 16 << 20
MAX_DESCRIPTORS = 8

# Kind of the packet that stands for a message in a memfd, which is the last of its descriptors.
_IN_MEMFD = "in_memfd"

_DESCRIPTOR_BYTES = array.array("i").itemsize


class ControlError(Exception):
    """The other side has sent what is not a message; the text says what is wrong."""


class Message:
    """Message that was received. It owns its descriptors until they are taken."""

    def __init__(self, kind: str, fields: dict[str, Any], fds: Sequence[int] = ()) -> None:
        self.kind = kind
        self.fields = fields
        self._fds = tuple(fds)

    def take_fds(self, count: int) -> tuple[int, ...]:
        """Return the descriptors, which the caller owns then. ControlError if there are not `count`."""
        if len(self._fds) != count:
            raise ControlError(f"{self.kind} has {len(self._fds)} file descriptors; expected {count}")
        fds, self._fds = self._fds, ()
        return fds

    def close(self) -> None:
        """Close the descriptors that were not taken. Idempotent."""
        fds, self._fds = self._fds, ()
        close_fds(fds)


class ControlChannel:
    """One end of the socket pair. A send and a receive may run at the same time, each on one thread.

    Use `set_blocking(False)` for BlockingIOError instead of waiting. A peer with `small_only` may send no message in a
    memfd.
    """

    def __init__(self, sock: socket.socket, *, small_only: bool = False) -> None:
        self._socket = sock
        self._small_only = small_only

    @classmethod
    def pair(cls, *, small_only: bool = False) -> tuple[ControlChannel, socket.socket]:
        """Return the channel of this process, and the end for the other one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (ours, theirs):
            # Room for the largest packet, whatever the system's default is.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
        return cls(ours, small_only=small_only), theirs

    def set_blocking(self, blocking: bool) -> None:
        """Choose whether `send` and `receive` wait."""
        self._socket.setblocking(blocking)

    def fileno(self) -> int:
        """Return the descriptor of the socket, for a selector."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the channel; the other side receives the end of file. Idempotent."""
        self._socket.close()

    def send(self, kind: str, fields: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message and copies of `fds`, which stay the caller's.

        ControlError if it is larger than any message may be. OSError if the other side is closed; BlockingIOError if its
        buffer is full and the channel does not block.
        """
        data = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
        if len(data) <= MAX_PACKET_BYTES:
            self._send_packet(data, fds)
            return
        if len(data) > MAX_MESSAGE_BYTES:
            raise ControlError(f"{kind} has {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are possible")
        memory = _sealed_memory(data)
        try:
            self._send_packet(json.dumps({"kind": _IN_MEMFD}).encode(), (*fds, memory))
        finally:
            os.close(memory)

    def _send_packet(self, data: bytes, fds: Sequence[int]) -> None:
        socket.send_fds(self._socket, [data], fds, socket.MSG_NOSIGNAL)

    def receive(self) -> Message | None:
        """Return the next message; None at the end of file. ControlError if it is malformed."""
        try:
            data, ancillary, flags = self._receive_packet()
        except ConnectionResetError:
            # The other side has closed the channel before it had read everything. The kernel reports this first, and once;
            # what the other side had sent before comes next.
            data, ancillary, flags = self._receive_packet()
        fds = _descriptors(ancillary)
        try:
            if flags & socket.MSG_TRUNC:
                raise ControlError(f"a packet has more than {MAX_PACKET_BYTES} bytes")
            if flags & socket.MSG_CTRUNC:
                raise ControlError(
                    f"file descriptors are lost: a packet has more than {MAX_DESCRIPTORS}, or too many are open"
                )
            if not data:
                if fds:
                    raise ControlError("a packet with file descriptors is empty")
                return None
            kind, fields = _parse(data)
            if kind == _IN_MEMFD:
                kind, fields = self._read_memory(fds)
            message, fds = Message(kind, fields, fds), []
            return message
        finally:
            close_fds(fds)

    def _receive_packet(self) -> tuple[bytes, Sequence[tuple[int, int, bytes]], int]:
        # Not recv_fds, which ignores its flags: a process started at this moment could inherit the descriptors.
        size = socket.CMSG_SPACE(MAX_DESCRIPTORS * _DESCRIPTOR_BYTES)
        return self._socket.recvmsg(MAX_PACKET_BYTES, size, socket.MSG_CMSG_CLOEXEC)[:3]

    def _read_memory(self, fds: list[int]) -> tuple[str, dict[str, Any]]:
        """Read the message from the last descriptor, and close and remove that."""
        if self._small_only or not fds:
            raise ControlError("a message in a memfd is not expected here")
        memory = fds.pop()
        try:
            # Only a memfd has seals. Another file could block the reader.
            if fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _seals() != _seals():
                raise ControlError("the memfd of a message is not sealed")
            size = os.fstat(memory).st_size
            if size > MAX_MESSAGE_BYTES:
                raise ControlError(f"a message has {size} bytes; at most {MAX_MESSAGE_BYTES} are possible")
            data = os.pread(memory, size, 0)
        except OSError as error:
            raise ControlError(f"the memfd of a message cannot be read: {error}") from None
        finally:
            os.close(memory)
        return _parse(data)


def close_fds(fds: Sequence[int]) -> None:
    """Close descriptors that this process owns."""
    for fd in fds:
        os.close(fd)


def _seals() -> int:
    return fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def _sealed_memory(data: bytes) -> int:
    memory = os.memfd_create("tensorferry-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _seals())
    except BaseException:
        os.close(memory)
        raise
    return memory


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
    return list(fds)


def _parse(data: bytes) -> tuple[str, dict[str, Any]]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ControlError(f"a packet of {len(data)} bytes is no JSON: {error}") from None
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise ControlError(f"a packet of {len(data)} bytes is no JSON object with a kind")
    return kind, fields
