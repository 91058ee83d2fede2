"""Memory of an NVIDIA GPU, as a server of this machine opens it.

NVIDIA's package cuda-bindings calls the driver. It is imported when memory is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from collections.abc import Iterator
from typing import Any

from tensorferry.client.messages import arguments
from tensorferry.protos.tensors import Array

# sizeof(CUipcMemHandle).
_HANDLE_BYTES = 64
# Smaller memory can be part of a block of this size, and a handle opens the whole block to the other
# process (CUDA programming guide, "Interprocess Communication").
_BLOCK_BYTES = 2 << 20


class CudaMemory:
    """New memory of a GPU. `key` is a name that no other memory has, `handle` the driver's handle for other processes.

    It is in the GPU's primary context, which torch, cupy and numba use, too. The context is current
    only during calls; then the calling thread has the context that it had before. Copies are made in
    the default stream, so after all work there, and are complete when the call returns.

    Raises ImportError without cuda-bindings, InvalidInput for an unknown device, and OSError for a
    failed call of the driver.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError:
            raise ImportError(
                "shared memory of a GPU needs cuda-bindings, which is not installed: pip install cuda-bindings"
            ) from None
        self._driver: Any = driver
        self._stream = driver.CUstream(driver.CU_STREAM_LEGACY)
        self.key = f"tensorferry-{uuid.uuid4().hex}"
        self.nbytes = nbytes
        self.device = device
        self._call("cuInit", 0)
        if not (count := self._call("cuDeviceGetCount")):
            raise OSError("CUDA: the NVIDIA driver finds no GPU: use device=None for system memory")
        arguments.integer("device", device, 0, count - 1)
        with contextlib.ExitStack() as undo:
            gpu = self._call("cuDeviceGet", device)
            self._context = self._call("cuDevicePrimaryCtxRetain", gpu)
            undo.callback(self._call, "cuDevicePrimaryCtxRelease", gpu)
            with self._current():
                # None after `close`.
                self._address: int | None = int(
                    self._call("cuMemAlloc", -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)
                )
            undo.callback(self._free)
            with self._current():
                handle = self._call("cuIpcGetMemHandle", self._address)
            # The bindings have no attribute for the bytes.
            self.handle = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
            self._undo = undo.pop_all()

    @property
    def address(self) -> int:
        """Address of the first byte; RuntimeError after `close`."""
        if self._address is None:
            raise RuntimeError(
                f"this memory of GPU {self.device} was freed at the end of its `with` statement: copy what you need"
                " inside the statement, by numpy() for example"
            )
        return self._address

    def write(self, offset: int, array: Array) -> None:
        """Copy a contiguous array there."""
        self._copy("cuMemcpyHtoDAsync", self.address + offset, array.ctypes.data, array.nbytes)

    def read(self, offset: int, array: Array) -> None:
        """Fill a contiguous array with the bytes there."""
        self._copy("cuMemcpyDtoHAsync", array.ctypes.data, self.address + offset, array.nbytes)

    def wait(self) -> None:
        """Wait for the work in the GPU's default stream."""
        with self._current():
            self._call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._undo.close()

    def _copy(self, call: str, target: int, source: int, nbytes: int) -> None:
        if not nbytes:
            return
        with self._current():
            self._call(call, target, source, nbytes, self._stream)
            self._call("cuStreamSynchronize", self._stream)

    def _free(self) -> None:
        address, self._address = self._address, None
        with self._current():
            self._call("cuMemFree", address)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the GPU's primary context the thread's context."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver, and return what it returns beside its result code."""
        try:
            code, *values = getattr(self._driver, name)(*arguments)
        except RuntimeError as error:
            # The bindings do not find the driver's library, or not this function in it.
            raise OSError(f"CUDA: {name}: {error}") from error
        if code != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(code)
            described = f", {text.decode(errors='replace')}" if text else ""
            raise OSError(
                f"CUDA: {name} failed for {self.nbytes} bytes of shared memory on GPU {self.device}: {code.name}{described}"
            )
        return values[0] if values else None
