"""Memory for batches, page-locked on the host and on the device, and CUDA streams with a priority."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.runtime.gpu import capture_lock
from tensorferry.server.system.install_command import install_command

_log = logging.getLogger("tensorferry.server")


class MemoryBlock:
    """Memory block with an address. The last reference to it frees it."""

    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(self, address: int, nbytes: int, free: Callable[[], object]) -> None:
        self.address = address
        self.nbytes = nbytes
        # Not at interpreter exit: the device's driver is unloaded earlier and has freed everything.
        weakref.finalize(self, free).atexit = False


class DeviceMemory:
    """Allocator of a CUDA device, and copies to and from it. StartError says what is missing if the device cannot be used.

    Every method is thread-safe. A copy is complete when the call returns. The GIL is released meanwhile.
    """

    # ONNX Runtime's name for the device of `device` blocks.
    device_type = "cuda"

    def __init__(self, device_id: int) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError:
            raise StartError(
                f"the package cuda-bindings is not installed ({install_command('gpu')} has it)"
            ) from None
        self.device_id = device_id
        self._cuda = runtime
        # Each thread has its own copy stream: its copies wait neither for other copies nor for a model's kernels.
        self._threads = threading.local()
        try:
            self._stream()
        except RuntimeError as error:
            raise StartError(f"the CUDA runtime of cuda-bindings does not work here: {error}") from None

    def host(self, nbytes: int) -> MemoryBlock:
        """Allocate page-locked memory, which the device can copy from and to directly."""
        cuda = self._cuda
        return self._allocated(nbytes, cuda.cudaFreeHost, cuda.cudaHostAlloc, cuda.cudaHostAllocPortable)

    def device(self, nbytes: int) -> MemoryBlock:
        """Allocate device memory."""
        return self._allocated(nbytes, self._cuda.cudaFree, self._cuda.cudaMalloc)

    def _allocated(
        self,
        nbytes: int,
        free: Callable[[int], object],
        allocate: Callable[..., tuple[Any, ...]],
        *flags: Any,
    ) -> MemoryBlock:
        self._stream()
        with capture_lock.CUDA.using():
            address = int(self._done(allocate(nbytes, *flags)))
        return MemoryBlock(address, nbytes, partial(free, address))

    def stream(self, *, first: bool) -> MemoryBlock:
        """Create a stream, a block of 0 bytes. The device starts its kernels before those of other streams, or after."""
        self._done(self._cuda.cudaSetDevice(self.device_id))
        # A lower number means a higher priority. A device without priorities has 0 for both.
        lowest, highest = self._done(self._cuda.cudaDeviceGetStreamPriorityRange())
        flags, priority = self._cuda.cudaStreamNonBlocking, highest if first else lowest
        handle = int(self._done(self._cuda.cudaStreamCreateWithPriority(flags, priority)))
        return MemoryBlock(handle, 0, partial(self._cuda.cudaStreamDestroy, handle))

    def load(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the host address `source` to the device address `target`, on the calling thread's stream."""
        self._copy([(target, source, nbytes)], self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def fetch(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the device address `source` to the host address `target`, on the calling thread's stream."""
        self._copy([(target, source, nbytes)], self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def copy_all(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Make copies of `nbytes` from `source` to `target`, each on a host or a device, on the calling thread's stream."""
        self._copy(copies, self._cuda.cudaMemcpyKind.cudaMemcpyDefault)

    def _copy(self, copies: Iterable[tuple[int, int, int]], kind: Any) -> None:
        stream = self._stream()
        for target, source, nbytes in copies:
            self._done(self._cuda.cudaMemcpyAsync(target, source, nbytes, kind, stream))
        self._done(self._cuda.cudaStreamSynchronize(stream))

    def _stream(self) -> Any:
        """Return the calling thread's stream, and make this device the thread's current one."""
        # Another library may have selected another device on this thread.
        self._done(self._cuda.cudaSetDevice(self.device_id))
        stream = getattr(self._threads, "stream", None)
        if stream is None:
            flags = self._cuda.cudaStreamNonBlocking
            stream = self._threads.stream = self._done(self._cuda.cudaStreamCreateWithFlags(flags))
            # Destroyed when the thread ends.
            destroy = partial(self._cuda.cudaStreamDestroy, int(stream))
            self._threads.stream_owner = MemoryBlock(int(stream), 0, destroy)
        return stream

    def _done(self, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise RuntimeError(f"CUDA failure {int(error)}: {error.name}")
        return values[0] if len(values) == 1 else values


def create_stream(device: str, first: bool | None, path: Path) -> MemoryBlock | None:
    """Create a stream for a model on this device, whose kernels start before or after those of other streams.

    ONNX Runtime creates its streams without a priority, and a stream's priority cannot be changed later. None if the model
    needs none, or, with a warning, if that fails.
    """
    if first is None or device == "cpu":
        return None
    try:
        return DeviceMemory(int(device.partition(":")[2])).stream(first=first)
    except (StartError, RuntimeError) as error:
        _log.warning("%s on %s runs without a priority: %s", path, device, error)
        return None


def keep_until_closed(session: Any, stream: MemoryBlock) -> None:
    """Keep the stream until ONNX Runtime's session is freed. Bindings may keep the session longer than the server."""
    weakref.finalize(getattr(session, "_sess", session), lambda stream: None, stream).atexit = False
