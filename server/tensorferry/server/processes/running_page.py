"""Page of memory in which a server process notes the requests that run. It outlives the process.

When the process ends by a signal, the supervisor reads which requests may have caused that.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

# Requests that can be noted at a time. Further ones are not noted.
_SLOTS = 1023
# The number of loads that go on.
_HEADER = struct.Struct("<Q")
# Its kind, its owner, and its mark or digest.
_SLOT = struct.Struct("<B7x8s16s")
_PAGE_BYTES = (_SLOTS + 1) * _SLOT.size

_FREE, _RUNS, _TRIED = range(3)


class Running(NamedTuple):
    """A request that runs. `owner` is a hash of its client and model.

    `digest` is the hash of the whole request if it is `tried` alone; otherwise of a sample.
    """

    owner: bytes
    digest: bytes
    tried: bool


def create_page() -> int:
    """Return the descriptor of a new page, whose size can never change."""
    page = os.memfd_create("tensorferry-running", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(page, _PAGE_BYTES)
    fcntl.fcntl(page, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return page


def read_page(page: int) -> tuple[bool, list[Running]]:
    """Return whether the process loads models, and the requests that run in it."""
    data = os.pread(page, _PAGE_BYTES, 0)
    slots = list(_SLOT.iter_unpack(data))[1:]
    running = [Running(owner, digest, kind == _TRIED) for kind, owner, digest in slots if kind != _FREE]
    return bool(_HEADER.unpack_from(data)[0]), running


def clear_page(page: int) -> None:
    """Remove what an ended process has noted."""
    os.pwrite(page, bytes(_PAGE_BYTES), 0)


class RunningPage:
    """The process's side of its page. Thread-safe. It closes the descriptor."""

    def __init__(self, page: int) -> None:
        self._memory = mmap.mmap(page, _PAGE_BYTES)
        os.close(page)
        # Places of slots in the memory. Its operations are atomic.
        self._free = deque(range(_SLOT.size, _PAGE_BYTES, _SLOT.size))
        # Guards the number of loads.
        self._lock = threading.Lock()

    def begin(self, running: Running) -> int:
        """Note a request, and return its place; 0 if there is none left."""
        try:
            place = self._free.pop()
        except IndexError:
            return 0
        _SLOT.pack_into(
            self._memory, place, _TRIED if running.tried else _RUNS, running.owner, running.digest
        )
        return place

    def end(self, place: int) -> None:
        """Remove the request at a place."""
        if place:
            self._memory[place] = _FREE
            self._free.append(place)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Note that a model is being loaded: native code may let no other thread run for minutes."""
        self._count_load(1)
        try:
            yield
        finally:
            self._count_load(-1)

    def _count_load(self, change: int) -> None:
        with self._lock:
            _HEADER.pack_into(self._memory, 0, _HEADER.unpack_from(self._memory)[0] + change)
