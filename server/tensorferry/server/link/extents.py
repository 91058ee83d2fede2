"""Allocator of extents: the parts of a region of shared memory in which messages above 4 KiB lie."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable

from tensorferry.server.link.layout import ALIGNMENT

# Extents are multiples of this.
_UNIT = 4096


class ExtentAllocator:
    """First fit with coalescing, in the memory of the process that writes the region. Not thread-safe.

    First fit keeps extents at low offsets. Above the highest extent in use, at most `keep_bytes` stay in memory: what
    is more goes to `give_back(offset, size)`, which frees the pages. So memory follows the load, without a system call
    for each extent.
    """

    def __init__(self, size: int, keep_bytes: int, give_back: Callable[[int, int], None]) -> None:
        self.size = size
        self._keep_bytes = -(-keep_bytes // ALIGNMENT) * ALIGNMENT
        self._give_back = give_back
        # The free holes, in order of their offsets: no two are adjacent.
        self._starts = [0] if size else []
        self._ends = [size] if size else []
        # No page at or above this offset is in memory. A multiple of ALIGNMENT.
        self._touched = 0

    def allocate(self, size: int) -> int | None:
        """Return the offset of a new extent of `size` bytes, or None if no hole is large enough."""
        size = -(-size // _UNIT) * _UNIT
        starts, ends = self._starts, self._ends
        for index, start in enumerate(starts):
            end = start + size
            if end <= ends[index]:
                if end == ends[index]:
                    del starts[index], ends[index]
                else:
                    starts[index] = end
                if end > self._touched:
                    self._touched = -(-end // ALIGNMENT) * ALIGNMENT
                return start
        return None

    def free(self, start: int, size: int) -> None:
        """Free the extent of `size` bytes at `start`, which `allocate` returned for this size."""
        end = start + -(-size // _UNIT) * _UNIT
        starts, ends = self._starts, self._ends
        index = bisect_left(starts, start)
        if index < len(starts) and starts[index] == end:
            end = ends[index]
            del starts[index], ends[index]
        if index and ends[index - 1] == start:
            ends[index - 1] = end
        else:
            starts.insert(index, start)
            ends.insert(index, end)
        if end == self.size:
            self._shrink(starts[-1])

    def _shrink(self, used: int) -> None:
        """Give back memory above `used`, the end of the highest extent in use, but for what is kept."""
        bound = -(-used // ALIGNMENT) * ALIGNMENT + self._keep_bytes
        if self._touched > bound:
            self._give_back(bound, self._touched - bound)
            self._touched = bound


def region_extents(memory: mmap.mmap, start: int, size: int, keep_bytes: int) -> ExtentAllocator:
    """Return an allocator for the region of `size` bytes at `start` in shared memory."""

    def give_back(offset: int, length: int) -> None:
        memory.madvise(mmap.MADV_REMOVE, start + offset, length)

    return ExtentAllocator(size, keep_bytes, give_back)
