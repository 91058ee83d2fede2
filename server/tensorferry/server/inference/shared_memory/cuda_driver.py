"""The CUDA driver's calls for shared memory, from `libcuda`, which every machine with an NVIDIA GPU has.

Neither CUDA's toolkit nor ONNX Runtime's CUDA provider is needed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

HANDLE_BYTES = 64

_LIBRARY = "libcuda.so.1"

# The driver's results with a meaning here. The names are those of cuda.h.
SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
MAP_FAILED = 205
PEER_ACCESS_UNSUPPORTED = 217
OPERATING_SYSTEM = 304
INVALID_HANDLE = 400
TOO_MANY_PEERS = 711
NOT_SUPPORTED = 801

# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: allows access to memory of another GPU.
_LAZY_PEER_ACCESS = 1
# CU_STREAM_NON_BLOCKING: the stream does not wait for other streams, so not for models either.
_NON_BLOCKING = 1


class CudaError(Exception):
    """A failed call of the driver. `code` is its result; the message names call and result."""

    def __init__(self, call: str, code: int, described: str) -> None:
        super().__init__(f"{call}: {described}")
        self.code = code


class CudaMissingError(Exception):
    """CUDA is not available. The message says why."""


class _Device(NamedTuple):
    context: ctypes.c_void_p
    stream: ctypes.c_void_p


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_ADDRESS = ctypes.c_uint64  # CUdeviceptr
_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
_UINT = ctypes.c_uint

# Argument types by exported name. Without them ctypes would cut addresses to 32 bits.
_ARGUMENT_TYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuDeviceGetCount": (ctypes.POINTER(_INT),),
    "cuDeviceGet": (ctypes.POINTER(_INT), _INT),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_POINTER), _INT),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_POINTER),),
    "cuStreamCreate": (ctypes.POINTER(_POINTER), _UINT),
    "cuStreamSynchronize": (_POINTER,),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_ADDRESS), _Handle, _UINT),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_ADDRESS), ctypes.POINTER(_SIZE), _ADDRESS),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _ADDRESS, _SIZE, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _POINTER, _SIZE, _POINTER),
    "cuGetErrorName": (_INT, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (_INT, ctypes.POINTER(ctypes.c_char_p)),
}

# As C code does: make a bytes object and fill it before it is used elsewhere. This saves a copy.
_new_bytes: Any = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_address_of: Any = ctypes.pythonapi.PyBytes_AsString
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = (ctypes.py_object,)


class CudaDriver:
    """Opens other processes' device memory, copies from and to it, and closes it. Thread-safe.

    The driver is loaded at the first use. A device's primary context, which is also ONNX Runtime's, is retained from the
    first handle opened on it until the process ends. Copies have their own stream on each device, so they wait for no
    model, and are complete when the call returns.

    Every method but `missing` raises CudaMissingError without CUDA, and CudaError for a failed call.
    """

    def __init__(self) -> None:
        # Guards all fields below. Held while the driver is loaded and a device prepared, never during a copy.
        self._lock = threading.Lock()
        self._library: Any = None
        self._missing: str | None = None
        self._count = 0
        self._devices: dict[int, _Device] = {}

    def missing(self) -> str | None:
        """Return why CUDA is not available; None if it is."""
        with self._lock:
            if self._library is None and self._missing is None:
                self._missing = self._load_locked()
            return self._missing

    def count(self) -> int:
        """Return the number of devices, which are numbered from 0."""
        self._check()
        return self._count

    def open(self, device: int, handle: bytes) -> tuple[int, int]:
        """Open the memory that another process exported, by a handle of HANDLE_BYTES, on the memory's device.

        Return its address in this process, and the bytes from there to its end.
        """
        with self._current(device):
            address, base, size = _ADDRESS(), _ADDRESS(), _SIZE()
            ipc_handle = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), ipc_handle, _LAZY_PEER_ACCESS)
            try:
                self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address.value)
            except CudaError:
                self._call("cuIpcCloseMemHandle", address.value)
                raise
        return address.value, base.value + size.value - address.value

    def close(self, device: int, address: int) -> None:
        """Close opened memory."""
        with self._current(device):
            self._call("cuIpcCloseMemHandle", address)

    def read(self, device: int, address: int, nbytes: int) -> bytes:
        """Return a copy of device memory."""
        if not nbytes:
            return b""
        data: bytes = _new_bytes(None, nbytes)
        with self._current(device) as stream:
            self._call("cuMemcpyDtoHAsync_v2", _address_of(data), address, nbytes, stream)
            self._call("cuStreamSynchronize", stream)
        return data

    def write(self, device: int, address: int, data: memoryview) -> None:
        """Copy bytes to device memory."""
        if not data.nbytes:
            return
        # By numpy, because ctypes gives no address of read-only memory.
        source = np.frombuffer(data, np.uint8)
        with self._current(device) as stream:
            self._call("cuMemcpyHtoDAsync_v2", address, source.ctypes.data, source.nbytes, stream)
            self._call("cuStreamSynchronize", stream)

    def _load_locked(self) -> str | None:
        try:
            library = ctypes.CDLL(_LIBRARY)
            for name, types in _ARGUMENT_TYPES.items():
                getattr(library, name).argtypes = types
        except OSError:
            return f"the NVIDIA driver's library, {_LIBRARY}, is not here"
        except AttributeError as error:
            return f"the NVIDIA driver is too old: {error}"
        count = ctypes.c_int()
        result = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
        if result not in (SUCCESS, NO_DEVICE):
            return f"the NVIDIA driver does not start: {_describe(library, result)}"
        if not count.value:
            return "the NVIDIA driver finds no GPU"
        self._library, self._count = library, count.value
        return None

    def _check(self) -> None:
        if (reason := self.missing()) is not None:
            raise CudaMissingError(reason)

    @contextmanager
    def _current(self, device: int) -> Iterator[ctypes.c_void_p]:
        """Make the device's context this thread's, and yield the stream for copies."""
        self._check()
        with self._lock:
            prepared = self._devices.get(device)
            if prepared is None:
                prepared = self._devices[device] = self._prepare_locked(device)
        self._call("cuCtxPushCurrent_v2", prepared.context)
        try:
            yield prepared.stream
        finally:
            # Restores the context, because this thread may run a model next.
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _prepare_locked(self, device: int) -> _Device:
        number, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._call("cuCtxPushCurrent_v2", context)
        try:
            self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        return _Device(context, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != SUCCESS:
            raise CudaError(name.partition("_")[0], result, _describe(self._library, result))


def _describe(library: Any, result: int) -> str:
    """Return the driver's name and text for a result."""
    texts = []
    for function in (library.cuGetErrorName, library.cuGetErrorString):
        text = ctypes.c_char_p()
        if function(result, ctypes.byref(text)) == SUCCESS and text.value:
            texts.append(text.value.decode(errors="replace"))
    return ", ".join(texts) or f"result {result}"
