"""The files of a link: one of memory and two to signal through, without a name, so that nothing is left behind."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import NamedTuple

from tensorferry.server.link.errors import LinkError
from tensorferry.server.link.layout import ALIGNMENT, HEADER, MAGIC, VERSION, Layout, layout_of

# No process can shrink the file, which would make the other one's next access a fatal signal.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class LinkFiles(NamedTuple):
    """File descriptors of a link: shared memory, and an eventfd for each direction."""

    memory: int
    to_engine: int
    to_front_end: int

    def duplicate(self) -> LinkFiles:
        """Return other descriptors of the same files."""
        copies: list[int] = []
        try:
            copies.extend(os.dup(file) for file in self)
        except OSError:
            _close(copies)
            raise
        return LinkFiles(*copies)

    def close(self) -> None:
        """Close the descriptors."""
        _close(self)


def create_link(
    slots: int = 4096, request_bytes: int = 256 << 20, response_bytes: int = 256 << 20
) -> LinkFiles:
    """Create the files of a link with `slots` requests in flight at most.

    Messages above 4 KiB share `request_bytes` in one direction and `response_bytes` in the other, both rounded up.
    The memory is sparse: only what was written takes room. The descriptors are not inherited by default.
    """
    layout = layout_of(slots, _rounded(request_bytes), _rounded(response_bytes))
    files: list[int] = []
    try:
        memory = os.memfd_create("tensorferry-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        files.append(memory)
        os.ftruncate(memory, layout.size)
        os.pwrite(
            memory,
            HEADER.pack(MAGIC, VERSION, layout.slots, layout.request_bytes, layout.response_bytes),
            0,
        )
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        # The engine waits with a selector, the front-end's receiving thread by reading.
        files.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        files.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError:
        _close(files)
        raise
    return LinkFiles(*files)


def map_link(memory: int) -> tuple[mmap.mmap, Layout]:
    """Map the memory of a link, and return it with its layout. Raise LinkError if it is none, or of another version."""
    try:
        size = os.fstat(memory).st_size
        seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    except OSError as error:
        raise LinkError(f"the file is not the memory of a link: {error.strerror}") from error
    if seals & _SEALS != _SEALS:
        raise LinkError(f"the memory of the link is not sealed (seals {seals:#x}, expected {_SEALS:#x})")
    # Read once: the other process can change the header at any time.
    header = os.pread(memory, HEADER.size, 0)
    if len(header) < HEADER.size:
        raise LinkError(f"the memory of the link has only {size} bytes")
    magic, version, slots, request_bytes, response_bytes = HEADER.unpack(header)
    if magic != MAGIC:
        raise LinkError(f"the file is not the memory of a link: it begins with {magic!r}")
    if version != VERSION:
        raise LinkError(f"the link has version {version}, this process has version {VERSION}")
    try:
        layout = layout_of(slots, request_bytes, response_bytes)
    except ValueError as error:
        raise LinkError(f"the header of the link is invalid: {error}") from None
    if layout.size != size:
        raise LinkError(f"the memory of the link has {size} bytes, its header says {layout.size}")
    return mmap.mmap(memory, size), layout


class Descriptor:
    """A file descriptor that is closed with the last reference to this object.

    A thread keeps a reference while it uses the number. So the number is never another file's by then.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _close(files: list[int] | LinkFiles) -> None:
    for file in files:
        os.close(file)
