"""A scripted CUDA driver with one allocation, which every handle opens."""

from __future__ import annotations

from collections.abc import Callable

from tensorferry.server.inference.shared_memory.cuda_driver import INVALID_HANDLE, CudaDriver, CudaError

ADDRESS = 1 << 20


class ScriptedDriver(CudaDriver):
    """A driver with `devices` devices and an allocation of `nbytes` bytes, which `handle` opens, or any if it is None.

    `opened` counts the openings. Set `fails` to the result of the next `open`. `meanwhile` is called in `open`.
    """

    def __init__(self, nbytes: int = 64, devices: int = 2, handle: bytes | None = None) -> None:
        super().__init__()
        self.content = bytearray(index % 256 for index in range(nbytes))
        self.opened = 0
        self.fails = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self._count = devices
        self._handle = handle

    def missing(self) -> str | None:
        return None

    def count(self) -> int:
        return self._count

    def open(self, device: int, handle: bytes) -> tuple[int, int]:
        fails = self.fails or (INVALID_HANDLE if handle != (self._handle or handle) else 0)
        if fails:
            raise CudaError("cuIpcOpenMemHandle", fails, "scripted")
        self.opened += 1
        self.meanwhile()
        return ADDRESS, len(self.content)

    def close(self, device: int, address: int) -> None:
        assert address == ADDRESS
        self.opened -= 1

    def read(self, device: int, address: int, nbytes: int) -> bytes:
        return bytes(self.content[self._part(address, nbytes)])

    def write(self, device: int, address: int, data: memoryview) -> None:
        self.content[self._part(address, data.nbytes)] = data

    def _part(self, address: int, nbytes: int) -> slice:
        start = address - ADDRESS
        assert 0 <= start <= start + nbytes <= len(self.content), "outside the allocation"
        return slice(start, start + nbytes)
