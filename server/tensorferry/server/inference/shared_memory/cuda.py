"""CUDA shared memory: a client's exported device memory, copied to and from the host."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tensorferry.server.errors import (
    InvalidRequestError,
    LimitError,
    NotReadyError,
    ServerError,
    UnsupportedError,
    truncate,
)
from tensorferry.server.inference.shared_memory import cuda_driver
from tensorferry.server.inference.shared_memory.cuda_driver import (
    HANDLE_BYTES,
    CudaDriver,
    CudaError,
    CudaMissingError,
)

_log = logging.getLogger("tensorferry.server")

# The driver's results for a wrong handle or memory that is gone.
_CLIENT_ERRORS = {
    cuda_driver.INVALID_VALUE,
    cuda_driver.INVALID_DEVICE,
    cuda_driver.INVALID_CONTEXT,
    cuda_driver.MAP_FAILED,
    cuda_driver.PEER_ACCESS_UNSUPPORTED,
    cuda_driver.INVALID_HANDLE,
}
_NO_ROOM_ERRORS = {cuda_driver.OUT_OF_MEMORY, cuda_driver.TOO_MANY_PEERS}
_UNSUPPORTED_ERRORS = {cuda_driver.OPERATING_SYSTEM, cuda_driver.NOT_SUPPORTED}


@dataclass(frozen=True, slots=True)
class CudaSharedMemory:
    """Device memory that a client exported. Its owner closes it after the last use."""

    name: str
    device: int
    nbytes: int
    address: int
    driver: CudaDriver

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of the bytes."""
        try:
            return self.driver.read(self.device, self.address + offset, nbytes)
        except CudaError as error:
            raise self._error("read", error) from error

    def write(self, offset: int, data: memoryview) -> None:
        """Copy these bytes there, before this returns."""
        try:
            self.driver.write(self.device, self.address + offset, data)
        except CudaError as error:
            raise self._error("written to", error) from error

    def close(self) -> None:
        """Release the memory. The driver's errors are logged."""
        try:
            self.driver.close(self.device, self.address)
        except CudaError as error:
            _log.warning("CUDA shared memory region %r cannot be closed: %s", self.name, error)

    def _error(self, done: str, error: CudaError) -> ServerError:
        return _as_server_error(
            f"CUDA shared memory region {truncate(self.name)!r} cannot be {done}",
            error,
            "has its memory been freed? Unregister a region first",
        )


def open_cuda_memory(
    driver: CudaDriver, name: str, handle: bytes, device: int, nbytes: int
) -> CudaSharedMemory:
    """Open the memory that a client exported by a cudaIpcMemHandle_t. Raises a ServerError."""
    failed = f"failed to register CUDA shared memory region {truncate(name)!r}"
    try:
        count = driver.count()
    except CudaMissingError as missing:
        # The wording of a Triton built without CUDA.
        raise UnsupportedError(
            f"failed to register CUDA shared memory region: {truncate(name)!r}, GPUs not supported: {missing}"
        ) from None
    if len(handle) != HANDLE_BYTES:
        raise InvalidRequestError(
            f"{failed}: invalid args: raw_handle has {len(handle)} bytes; it must be a cudaIpcMemHandle_t, of "
            f"{HANDLE_BYTES} bytes, as it is (not in base64)"
        )
    if not 0 <= device < count:
        raise InvalidRequestError(
            f"{failed}: invalid args: device_id is {device}; this server has GPU 0 to {count - 1}"
            if count > 1
            else f"{failed}: invalid args: device_id is {device}; this server has GPU 0 only"
        )
    try:
        address, size = driver.open(device, handle)
    except CudaError as error:
        raise _as_server_error(
            failed,
            error,
            "raw_handle must be of memory that another process of this machine has allocated on this device, and not freed",
        ) from error
    memory = CudaSharedMemory(name, device, nbytes, address, driver)
    if not 0 < nbytes <= size:
        memory.close()
        raise InvalidRequestError(f"{failed}: invalid args: {nbytes} bytes, of an allocation of {size} bytes")
    return memory


def _as_server_error(what: str, error: CudaError, hint: str) -> ServerError:
    if error.code in _CLIENT_ERRORS:
        return InvalidRequestError(f"{what}: invalid args: {error}; {hint}")
    if error.code in _NO_ROOM_ERRORS:
        return LimitError(f"{what}: {error}")
    if error.code in _UNSUPPORTED_ERRORS:
        return UnsupportedError(
            f"{what}: {error}: this GPU, its driver or the containers of server and client let processes share no memory"
        )
    return NotReadyError(f"{what}: the GPU does not work: {error}")
