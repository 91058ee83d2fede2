"""Shared memory through which one process sends arrays to the other."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_FIRST_BYTES = 1 << 20
# Arrays begin at multiples of this, for vector instructions.
_ALIGNMENT = 64
# The number of the run that the writing process has begun; the first array follows.
_NUMBER = struct.Struct("<Q")


class ArrayRef(NamedTuple):
    """An array of numbers in the memory. `dtype` is numpy's text of it, or the dtype itself if the text would lose something."""

    dtype: str | np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


def create_memory(name: str) -> int:
    """Create the file, without a name in any directory, and return its descriptor.

    Neither process can shrink it: an access to memory that is gone would be a fatal signal in the other.
    """
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, _FIRST_BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(file)
        raise
    return file


class ArrayMemory:
    """One process's map of the memory; one of both writes. Not thread-safe.

    The file grows to what the largest batch needs. Pages that were never written take no room. It owns the descriptor.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._map = mmap.mmap(file, os.fstat(file).st_size)
        self._end = _ALIGNMENT

    def begin(self, number: int) -> None:
        """Begin the run of this number: the arrays of the one before may be overwritten."""
        self._end = _ALIGNMENT
        _NUMBER.pack_into(self._map, 0, number)

    @property
    def begun(self) -> int:
        """The number of the last run that the writing process has begun; 0 if none."""
        number: int = _NUMBER.unpack_from(self._map)[0]
        return number

    def put(self, array: Array) -> ArrayRef:
        """Copy an array of numbers, of any strides, into the memory."""
        offset = self._end
        end = offset + array.nbytes
        if end > len(self._map):
            os.ftruncate(self._file, max(2 * len(self._map), end))
            self._map_again()
        np.ndarray(array.shape, array.dtype, self._map, offset)[...] = array
        self._end = -(-end // _ALIGNMENT) * _ALIGNMENT
        dtype = array.dtype
        return ArrayRef(dtype.str if dtype.isbuiltin == 1 else dtype, array.shape, offset)

    def get(self, placed: ArrayRef) -> Array:
        """Return a copy of an array that the other process has put there: the next run overwrites the memory."""
        dtype = np.dtype(placed.dtype)
        needed = placed.offset + dtype.itemsize * math.prod(placed.shape)
        if needed > len(self._map):
            self._map_again()
        array: Array = np.ndarray(placed.shape, dtype, self._map, placed.offset)
        return array.copy()

    def close(self) -> None:
        """Close the file, and free its memory."""
        os.close(self._file)
        del self._map

    def _map_again(self) -> None:
        self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
