"""glibc's allocator. On a system with another C library nothing is set."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# The largest value that glibc accepts.
_LARGEST_REUSED_BYTES = 32 << 20
_KEPT_BYTES = 128 << 20

# Free memory is read this often. What was free at each reading for this long is given back, if it is much.
_READ_SECONDS = 5.0
_UNUSED_SECONDS = 20.0


def reuse_large_buffers() -> None:
    """Make glibc reuse the memory of large messages. Call this before other threads start.

    By default glibc returns most large buffers to the system, and the kernel clears each page of the next one. Buffers
    also move between threads, so an arena for each thread would keep memory that the other threads need. The user's own
    settings of the allocator are kept.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _is_configured():
        return
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_THRESHOLD, _LARGEST_REUSED_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def _is_configured() -> bool:
    """Whether the user has settings of the allocator."""
    return any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)


def give_back() -> None:
    """Let glibc return free memory to the system. Other threads wait meanwhile if they allocate: 0.4 s for 1 GB."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    # Eight other sizes come first.
    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def _free_bytes() -> int:
    """Return the bytes that glibc has from the system and that are not allocated; 0 if it does not say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None or _is_configured():
        return 0
    mallinfo.restype = _Mallinfo
    return int(mallinfo().fordblks)


class UnusedMemory:
    """Gives back the memory of a burst, which glibc keeps if an allocated block lies behind it.

    A server whose large messages go on needs the memory again, so only what was free all the time is given back. One
    thread at a time calls `check`.
    """

    def __init__(
        self, free_bytes: Callable[[], int] = _free_bytes, give_back: Callable[[], None] = give_back
    ) -> None:
        self._free_bytes = free_bytes
        self._give_back = give_back
        self._next_read = self._since = -math.inf
        self._least_free = 0

    def check(self, now: float) -> float:
        """Give back what was not needed for a while; return when to check again."""
        if now >= self._next_read:
            self._next_read = now + _READ_SECONDS
            free = self._free_bytes()
            self._least_free = min(self._least_free, free)
            if now - self._since >= _UNUSED_SECONDS:
                if self._least_free > _KEPT_BYTES:
                    self._give_back()
                self._since, self._least_free = now, free
        return self._next_read
