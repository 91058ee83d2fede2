"""The CPU as a device with its own memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np

from tensorferry.server.runtime.gpu.pinned_memory import DeviceMemory, MemoryBlock


class CpuDeviceMemory(DeviceMemory):
    """Memory in which host and device blocks are both ordinary memory."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.device_id = 0

    def host(self, nbytes: int) -> MemoryBlock:
        array = np.zeros(nbytes, np.uint8)
        return MemoryBlock(array.ctypes.data, nbytes, array.view)  # the finalizer keeps the array alive

    device = host

    def load(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    fetch = load

    def copy_all(self, copies: Iterable[tuple[int, int, int]]) -> None:
        for target, source, nbytes in copies:
            ctypes.memmove(target, source, nbytes)


class CountingDeviceMemory(CpuDeviceMemory):
    """Device memory that counts blocks and copies and can run out. Host blocks start with nonzero bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: list[MemoryBlock] = []
        self.devices: list[MemoryBlock] = []
        self.loads = 0
        self.fetches = 0
        # Bytes of both.
        self.copied = 0
        self.full = False

    def host(self, nbytes: int) -> MemoryBlock:
        self.hosts.append(super().host(nbytes))
        ctypes.memset(self.hosts[-1].address, 0xA5, nbytes)
        return self.hosts[-1]

    def device(self, nbytes: int) -> MemoryBlock:
        if self.full:
            raise RuntimeError("CUDA failure 2: cudaErrorMemoryAllocation")
        self.devices.append(super().device(nbytes))
        return self.devices[-1]

    def load(self, target: int, source: int, nbytes: int) -> None:
        self.loads += 1
        self.copied += nbytes
        super().load(target, source, nbytes)

    def fetch(self, target: int, source: int, nbytes: int) -> None:
        self.fetches += 1
        self.copied += nbytes
        super().fetch(target, source, nbytes)
