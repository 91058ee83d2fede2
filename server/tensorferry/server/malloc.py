"""glibc's allocator. On a system with another C library nothing is set."""

from __future__ import annotations

import ctypes
import os

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# The largest value that glibc accepts.
_LARGEST_REUSED_BYTES = 32 << 20
_KEPT_BYTES = 128 << 20


def reuse_large_buffers() -> None:
    """Make glibc reuse the memory of large messages. Call this before other threads start.

    By default glibc returns most large buffers to the system, and the kernel clears each page of the next one. Buffers
    also move between threads, so an arena for each thread would keep memory that the other threads need. The user's own
    settings of the allocator are kept.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_THRESHOLD, _LARGEST_REUSED_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
