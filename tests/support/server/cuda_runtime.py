"""Scripted CUDA runtime with the interface of cuda-bindings. Only device 3 exists."""

# ruff: noqa: N801, N815 (CUDA's own names)

from __future__ import annotations

import ctypes
import enum
import itertools
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDefault = 4


class Runtime(types.ModuleType):
    """Runtime whose host and device memory are ordinary memory. A copy happens when its stream is synchronised."""

    cudaError_t = cudaError_t
    cudaMemcpyKind = cudaMemcpyKind
    cudaHostAllocPortable = 1
    cudaStreamNonBlocking = 1

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.blocks: dict[int, tuple[str, Any]] = {}
        self.streams: dict[int, list[tuple[int, int, int]]] = {}
        self.kinds: list[tuple[int, int]] = []
        self.device = threading.local()
        self.error = cudaError_t.cudaSuccess
        self.numbers = itertools.count(100)
        self.priorities: dict[int, int] = {}

    def _allocate(self, kind: str, nbytes: int) -> tuple[Any, ...]:
        assert getattr(self.device, "id", None) == 3, "without cudaSetDevice, CUDA uses device 0"
        if self.error:
            return self.error, None
        array = np.zeros(nbytes, np.uint8)
        self.blocks[array.ctypes.data] = kind, array
        return cudaError_t.cudaSuccess, array.ctypes.data

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        self.device.id = device
        return (
            self.error if self.error != cudaError_t.cudaErrorMemoryAllocation else cudaError_t.cudaSuccess,
        )

    def cudaHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        assert flags == self.cudaHostAllocPortable
        return self._allocate("host", nbytes)

    def cudaMalloc(self, nbytes: int) -> tuple[Any, ...]:
        return self._allocate("device", nbytes)

    def cudaFreeHost(self, address: int) -> tuple[Any, ...]:
        assert self.blocks.pop(address)[0] == "host"
        return (cudaError_t.cudaSuccess,)

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        assert self.blocks.pop(address)[0] == "device"
        return (cudaError_t.cudaSuccess,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == self.cudaStreamNonBlocking
        stream = next(self.numbers)
        self.streams[stream] = []
        return cudaError_t.cudaSuccess, stream

    def cudaDeviceGetStreamPriorityRange(self) -> tuple[Any, ...]:
        assert getattr(self.device, "id", None) == 3
        return cudaError_t.cudaSuccess, 0, -5

    def cudaStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Any, ...]:
        _, stream = self.cudaStreamCreateWithFlags(flags)
        self.priorities[stream] = priority
        return self.error, stream

    def cudaStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        del self.streams[stream]
        return (cudaError_t.cudaSuccess,)

    def cudaMemcpyAsync(
        self, target: int, source: int, nbytes: int, kind: int, stream: int
    ) -> tuple[Any, ...]:
        self.streams[stream].append((target, source, nbytes))
        self.kinds.append((stream, kind))
        return (cudaError_t.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        for copy in self.streams[stream]:
            ctypes.memmove(*copy)
        self.streams[stream].clear()
        return (cudaError_t.cudaSuccess,)


def installed(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Install a scripted runtime in place of the package."""
    runtime, package = Runtime(), types.ModuleType("cuda.bindings")
    package.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    return runtime
