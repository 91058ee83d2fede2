"""Device memory of a client: of a real GPU, or of the driver's stand-in in `libcuda.c`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_STAND_IN = Path(__file__).with_name("libcuda.c")


def build_stand_in(directory: Path) -> Path | None:
    """Build the stand-in library in the directory, where a server finds it first; None without a C
    compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = directory / "libcuda.so.1"
    subprocess.run(
        [
            compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", str(_STAND_IN), "-o", str(library),
            "-lpthread", "-ldl",
        ],
        check=True,
    )  # fmt: skip
    return library


def gpu_is_here() -> bool:
    """Return whether this machine has an NVIDIA GPU, and a driver that works."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


class DeviceMemory:
    """Allocates on devices of this library, and reads and writes its allocations. Not thread-safe."""

    def __init__(self, library: str | Path) -> None:
        self._cuda = ctypes.CDLL(str(library))
        address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        for name, types in {
            "cuDevicePrimaryCtxRetain": (ctypes.POINTER(pointer), ctypes.c_int),
            "cuCtxPushCurrent_v2": (pointer,),
            "cuMemAlloc_v2": (ctypes.POINTER(address), size),
            "cuMemFree_v2": (address,),
            "cuIpcGetMemHandle": (pointer, address),
            "cuStreamCreate": (ctypes.POINTER(pointer), ctypes.c_uint),
            "cuStreamSynchronize": (pointer,),
            "cuMemcpyHtoDAsync_v2": (address, pointer, size, pointer),
            "cuMemcpyDtoHAsync_v2": (pointer, address, size, pointer),
        }.items():
            getattr(self._cuda, name).argtypes = types
        self._call("cuInit", 0)
        self._allocated: list[tuple[int, int]] = []

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cuda, name)(*arguments)
        assert result == 0, f"{name} gives {result}"

    @contextmanager
    def _on(self, device: int) -> Iterator[ctypes.c_void_p]:
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        try:
            self._call("cuStreamCreate", ctypes.byref(stream), 1)
            yield stream
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, nbytes: int, device: int = 0) -> tuple[int, bytes]:
        """Allocate memory; return its address, and the handle for another process."""
        address, handle = ctypes.c_uint64(), ctypes.create_string_buffer(64)
        with self._on(device):
            self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
            self._call("cuIpcGetMemHandle", handle, address)
        self._allocated.append((device, address.value))
        return address.value, handle.raw

    def put(self, address: int, data: bytes, device: int = 0) -> None:
        with self._on(device) as stream:
            self._call("cuMemcpyHtoDAsync_v2", address, data, len(data), stream)
            self._call("cuStreamSynchronize", stream)

    def get(self, address: int, nbytes: int, device: int = 0) -> bytes:
        data = ctypes.create_string_buffer(nbytes)
        with self._on(device) as stream:
            self._call("cuMemcpyDtoHAsync_v2", data, address, nbytes, stream)
            self._call("cuStreamSynchronize", stream)
        return data.raw

    def free_all(self) -> None:
        """Free all allocations."""
        for device, address in self._allocated:
            with self._on(device):
                self._call("cuMemFree_v2", address)
        self._allocated.clear()
