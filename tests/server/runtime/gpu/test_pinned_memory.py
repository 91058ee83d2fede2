"""Memory of a CUDA device, with a scripted CUDA runtime."""

from __future__ import annotations

import ctypes
import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.server.cuda_runtime import Runtime, cudaError_t, cudaMemcpyKind, installed

from tensorferry.server.errors import StartError
from tensorferry.server.runtime.gpu.pinned_memory import DeviceMemory


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return installed(monkeypatch)


def test_each_thread_copies_on_its_own_stream(runtime: Runtime) -> None:
    memory = DeviceMemory(3)

    def use(memory: DeviceMemory) -> None:
        host, there, back = memory.host(64), memory.device(64), memory.host(64)
        ctypes.memset(host.address, 7, 64)
        memory.load(there.address, host.address, 64)
        memory.fetch(back.address, there.address, 60)
        assert ctypes.string_at(back.address, 64) == b"\7" * 60 + b"\0" * 4

    use(memory)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(use, memory).result()
    kinds = [kind for _, kind in runtime.kinds]
    assert kinds == [cudaMemcpyKind.cudaMemcpyHostToDevice, cudaMemcpyKind.cudaMemcpyDeviceToHost] * 2
    assert len({stream for stream, _ in runtime.kinds}) == 2
    gc.collect()
    assert runtime.blocks == {}, "freed with the last reference"
    assert len(runtime.streams) == 1, "the other stream ended with its thread"
    del memory
    gc.collect()
    assert runtime.streams == {}


def test_copies_between_any_memory_are_made_together(runtime: Runtime) -> None:
    memory = DeviceMemory(3)
    host, there, other = memory.host(8), memory.device(8), memory.device(8)
    ctypes.memset(host.address, 7, 8)
    memory.copy_all([(there.address, host.address, 8), (other.address, there.address, 3)])
    assert ctypes.string_at(other.address, 8) == b"\7" * 3 + b"\0" * 5
    assert {kind for _, kind in runtime.kinds} == {cudaMemcpyKind.cudaMemcpyDefault}


def test_an_error_carries_its_name(runtime: Runtime) -> None:
    memory = DeviceMemory(3)
    runtime.error = cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(RuntimeError, match=r"^CUDA failure 2: cudaErrorMemoryAllocation$"):
        memory.device(64)
    runtime.error = cudaError_t.cudaErrorInsufficientDriver
    with pytest.raises(StartError, match="does not work here: CUDA failure 35: cudaErrorInsufficientDriver"):
        DeviceMemory(3)


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(StartError, match="the package cuda-bindings is not installed"):
        DeviceMemory(0)
