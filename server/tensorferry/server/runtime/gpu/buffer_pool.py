"""A pool of memory buffers of one kind."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_log = logging.getLogger("tensorferry.server")


class _Sized(Protocol):
    """Memory in a pool."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""


_T = TypeVar("_T", bound=_Sized)


class BufferPool(Generic[_T]):
    """Pool of memory buffers with at most `max_bytes` in total. Thread-safe."""

    def __init__(self, allocate: Callable[[int], _T], max_bytes: int) -> None:
        self._allocate = allocate
        self._max_bytes = max_bytes
        # Guards _bytes and the keys of _free. Buffers are allocated under it. `release` does not take it, because
        # finalizers call `release` and may interrupt any line, also one that holds the lock.
        self._lock = threading.Lock()
        self._bytes = 0
        # Whether the last allocation failed. Of several failures the first is logged, because each batch may fail.
        self._failed = False
        self._free: dict[int, deque[_T]] = {}

    def acquire(self, nbytes: int) -> _T | None:
        """Return an uninitialised buffer of at least `nbytes` bytes; None if there is no memory for it."""
        size = size_class(nbytes)
        buffer = pop(self._free.get(size))
        if buffer is not None:
            return buffer
        try:
            with self._lock:
                self._free.setdefault(size, deque())
                if self._bytes + size > self._max_bytes:
                    for buffers in self._free.values():
                        while (unused := pop(buffers)) is not None:
                            self._bytes -= unused.nbytes
                if self._bytes + size > self._max_bytes:
                    return None
                buffer = self._allocate(size)
                self._failed = False
                self._bytes += size
                return buffer
        except (MemoryError, RuntimeError) as error:
            if not self._failed:
                self._failed = True
                _log.warning(
                    "no memory of %d bytes for a batch, which is copied through other memory as long as that is so: %s",
                    size,
                    error,
                )
            return None

    def release(self, buffer: _T) -> None:
        """Return a buffer to the pool."""
        self._free[buffer.nbytes].append(buffer)


def pop(buffers: deque[_T] | None) -> _T | None:
    """Return one of the buffers; None if there is none."""
    # Without a check first, because another thread may take the last buffer.
    try:
        return buffers.popleft() if buffers is not None else None
    except IndexError:
        return None


def size_class(nbytes: int) -> int:
    """Round up, so that buffers can be reused. At most a quarter is wasted, except for a few pages."""
    step = 1 << max(12, (nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step
