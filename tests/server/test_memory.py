"""Memory on a CUDA device, over a scripted CUDA runtime that behaves as cuda-bindings does."""

# ruff: noqa: N801, N815 (CUDA's own names)

from __future__ import annotations

import ctypes
import enum
import gc
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest

from tensorferry.server.errors import StartError
from tensorferry.server.memory import CudaMemory


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class Runtime(types.ModuleType):
    """Host and device memory are both of this process; a copy happens when its stream is waited for."""

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

    def _allocate(self, kind: str, nbytes: int) -> tuple[Any, ...]:
        assert getattr(self.device, "id", None) == 3, "CUDA would take device 0"
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
        self.streams[len(self.streams) + 100] = []
        return cudaError_t.cudaSuccess, max(self.streams)

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


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime, package = Runtime(), types.ModuleType("cuda.bindings")
    package.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    return runtime


def test_there_and_back_on_a_stream_of_each_thread(runtime: Runtime) -> None:
    memory = CudaMemory(3)
    failed: list[BaseException] = []

    def use(memory: CudaMemory) -> None:
        try:
            host, there, back = memory.host(64), memory.device(64), memory.host(64)
            ctypes.memset(host.address, 7, 64)
            memory.load(there.address, host.address, 64)
            memory.fetch(back.address, there.address, 60)
            assert ctypes.string_at(back.address, 64) == b"\7" * 60 + b"\0" * 4
        except BaseException as error:
            failed.append(error)

    use(memory)
    thread = threading.Thread(target=use, args=(memory,))
    thread.start()
    thread.join(30)
    assert failed == []
    kinds = [kind for _, kind in runtime.kinds]
    assert kinds == [cudaMemcpyKind.cudaMemcpyHostToDevice, cudaMemcpyKind.cudaMemcpyDeviceToHost] * 2
    assert len({stream for stream, _ in runtime.kinds}) == 2
    gc.collect()
    assert runtime.blocks == {}, "freed with the last reference"
    assert len(runtime.streams) == 1, "the other went with its thread"
    del memory
    gc.collect()
    assert runtime.streams == {}


def test_an_error_is_raised_by_its_name(runtime: Runtime) -> None:
    memory = CudaMemory(3)
    runtime.error = cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(RuntimeError, match=r"^CUDA failure 2: cudaErrorMemoryAllocation$"):
        memory.device(64)


def test_a_driver_that_is_too_old(runtime: Runtime) -> None:
    runtime.error = cudaError_t.cudaErrorInsufficientDriver
    with pytest.raises(StartError, match="does not work here: CUDA failure 35: cudaErrorInsufficientDriver"):
        CudaMemory(3)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(StartError, match="the package cuda-bindings is not installed"):
        CudaMemory(0)
