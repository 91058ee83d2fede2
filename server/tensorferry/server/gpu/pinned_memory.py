"""Memory that batches are copied through: page-locked on the host, and the device's own."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tensorferry.server.errors import StartError
from tensorferry.server.gpu import capture_lock

Array = npt.NDArray[Any]


class MemoryBlock:
    """A piece of memory by its address. Freed when the last reference to it is gone."""

    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(self, address: int, nbytes: int, free: Callable[[], object]) -> None:
        self.address = address
        self.nbytes = nbytes
        # Not as the interpreter ends: the device's driver goes before us, and takes it all.
        weakref.finalize(self, free).atexit = False


class DeviceMemory(Protocol):
    """Allocates for one device and copies to and from it. Every method is thread-safe.

    Copies are done when the call returns, and other threads may run Python meanwhile.
    """

    # As ONNX Runtime names the device of `device` blocks.
    device_type: str
    device_id: int

    def host(self, nbytes: int) -> MemoryBlock:
        """Host memory that the device copies from and to without a detour."""

    def device(self, nbytes: int) -> MemoryBlock:
        """The device's memory."""

    def load(self, target: int, source: int, nbytes: int) -> None:
        """Copies from the host's address `source` to the device's `target`."""

    def fetch(self, target: int, source: int, nbytes: int) -> None:
        """Copies from the device's address `source` to the host's `target`."""


class CpuDeviceMemory:
    """The CPU as a device beside the host: what is copied to it is copied within the host's memory."""

    device_type = "cpu"
    device_id = 0

    def host(self, nbytes: int) -> MemoryBlock:
        """Ordinary memory."""
        array = np.zeros(nbytes, np.uint8)
        return MemoryBlock(array.ctypes.data, nbytes, array.view)  # the finalizer keeps the array

    device = host

    def load(self, target: int, source: int, nbytes: int) -> None:
        """Copies."""
        ctypes.memmove(target, source, nbytes)

    fetch = load


class CudaDeviceMemory:
    """A CUDA device. StartError, which says what is missing, where it cannot be used."""

    device_type = "cuda"

    def __init__(self, device_id: int) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError:
            raise StartError(
                "the package cuda-bindings is not installed (pip install 'tensorferry[gpu]' has it)"
            ) from None
        self.device_id = device_id
        self._cuda = runtime
        # Each thread copies on a stream of its own: its copies wait for no other's, nor for a model's kernels.
        self._threads = threading.local()
        try:
            self._stream()
        except RuntimeError as error:
            raise StartError(f"the CUDA runtime of cuda-bindings does not work here: {error}") from None

    def host(self, nbytes: int) -> MemoryBlock:
        """Page-locked memory."""
        self._stream()
        with capture_lock.CUDA.using():
            address = int(self._done(self._cuda.cudaHostAlloc(nbytes, self._cuda.cudaHostAllocPortable)))
        cuda = self._cuda
        return MemoryBlock(address, nbytes, lambda: cuda.cudaFreeHost(address))

    def device(self, nbytes: int) -> MemoryBlock:
        """The device's memory."""
        self._stream()
        with capture_lock.CUDA.using():
            address = int(self._done(self._cuda.cudaMalloc(nbytes)))
        cuda = self._cuda
        return MemoryBlock(address, nbytes, lambda: cuda.cudaFree(address))

    def stream(self, *, first: bool) -> MemoryBlock:
        """A stream of no bytes whose kernels the device starts before those of others, or else after them."""
        self._done(self._cuda.cudaSetDevice(self.device_id))
        # The lower the number the sooner; a device without priorities has 0 for both.
        last, soonest = self._done(self._cuda.cudaDeviceGetStreamPriorityRange())
        flags, priority = self._cuda.cudaStreamNonBlocking, soonest if first else last
        handle = int(self._done(self._cuda.cudaStreamCreateWithPriority(flags, priority)))
        cuda = self._cuda
        return MemoryBlock(handle, 0, lambda: cuda.cudaStreamDestroy(handle))

    def load(self, target: int, source: int, nbytes: int) -> None:
        """Copies on the thread's stream."""
        self._copy(target, source, nbytes, self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def fetch(self, target: int, source: int, nbytes: int) -> None:
        """Copies on the thread's stream."""
        self._copy(target, source, nbytes, self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def _copy(self, target: int, source: int, nbytes: int, kind: Any) -> None:
        stream = self._stream()
        self._done(self._cuda.cudaMemcpyAsync(target, source, nbytes, kind, stream))
        self._done(self._cuda.cudaStreamSynchronize(stream))

    def _stream(self) -> Any:
        """The calling thread's stream; from then on, the thread's CUDA calls are to this device."""
        # Another library may have chosen another device on this thread meanwhile.
        self._done(self._cuda.cudaSetDevice(self.device_id))
        stream = getattr(self._threads, "stream", None)
        if stream is None:
            flags = self._cuda.cudaStreamNonBlocking
            stream = self._threads.stream = self._done(self._cuda.cudaStreamCreateWithFlags(flags))
            cuda, handle = self._cuda, int(stream)
            # Goes with the thread.
            self._threads.end = MemoryBlock(handle, 0, lambda: cuda.cudaStreamDestroy(handle))
        return stream

    def _done(self, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise RuntimeError(f"CUDA failure {int(error)}: {error.name}")
        return values[0] if len(values) == 1 else values
