"""The CPU in the place of a device, with memory of its own."""

from __future__ import annotations

import ctypes

from tensorferry.server.gpu.pinned_memory import CpuDeviceMemory, MemoryBlock


class Device(CpuDeviceMemory):
    """The CPU, which counts its blocks and its copies, and can be out of memory. Its blocks are dirty."""

    def __init__(self) -> None:
        self.hosts: list[MemoryBlock] = []
        self.devices: list[MemoryBlock] = []
        self.loads = 0
        self.fetches = 0
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
        super().load(target, source, nbytes)

    def fetch(self, target: int, source: int, nbytes: int) -> None:
        self.fetches += 1
        super().fetch(target, source, nbytes)
