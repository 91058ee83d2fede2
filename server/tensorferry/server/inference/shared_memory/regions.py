"""Shared memory regions that clients register. Requests take inputs from them and have outputs written to them.

Regions are of system memory or of CUDA memory, with one table of names and the same interface. Error messages keep
Triton's wording, because clients recognise errors by it.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tensorferry.server.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    LimitError,
    NotFoundError,
    UnsupportedError,
    truncate,
)
from tensorferry.server.inference.shared_memory.cuda import CudaSharedMemory, open_cuda_memory
from tensorferry.server.inference.shared_memory.cuda_driver import CudaDriver
from tensorferry.server.inference.shared_memory.system import (
    DIRECTORY,
    SystemSharedMemory,
    open_system_memory,
)
from tensorferry.server.wire.parameters import parameter_value

RegionMemory: TypeAlias = SystemSharedMemory | CudaSharedMemory

_REGION = "shared_memory_region"
_BYTE_SIZE = "shared_memory_byte_size"
_OFFSET = "shared_memory_offset"

_MAX_NAME_LENGTH = 1024
# Each region of system memory keeps a file open, and connections need files too.
_MAX_REGIONS = 4096
_FILES_PER_REGION = 2

# Requests have signed offsets and sizes. Triton reads them as unsigned; so do the checks here.
_UINT64_MAX = (1 << 64) - 1

_DISABLED = (
    "Client shared memory is disabled. Start the server with --allow-shared-memory to let clients register regions; "
    "or send the tensors"
)


@dataclass(slots=True, eq=False)
class Region:
    """A registered memory. The lock of `Regions` guards `users` and `unregistered`."""

    memory: RegionMemory
    users: int = 0
    # Unregistered while requests use it; closed after the last of them.
    unregistered: bool = False

    @property
    def name(self) -> str:
        """The name that the client chose."""
        return self.memory.name


class Span(NamedTuple):
    """A tensor's place in a region: offset and size in bytes."""

    region: Region
    offset: int
    nbytes: int

    def read(self) -> bytes:
        """Return a copy of the bytes."""
        return self.region.memory.read(self.offset, self.nbytes)

    def write(self, data: memoryview) -> None:
        """Write these bytes there. They must fit."""
        self.region.memory.write(self.offset, data)


class Regions:
    """The regions by name. Thread-safe.

    Without `allowed` none can be registered. `max_bytes` bounds the inputs of one request in shared memory together,
    because they are copied before the queue can refuse them.
    """

    def __init__(
        self,
        *,
        allowed: bool = False,
        max_bytes: int = 1 << 30,
        directory: Path = DIRECTORY,
        cuda: CudaDriver | None = None,
    ) -> None:
        self.allowed = allowed
        self.max_bytes = max_bytes
        self._directory = directory
        self._cuda = cuda or CudaDriver()
        # Guards _regions, and users and unregistered of each. No memory is opened, closed or read while it is held.
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}

    @property
    def has_cuda(self) -> bool:
        """Whether regions of CUDA memory can be registered."""
        return self.allowed and self._cuda.missing() is None

    def register_system(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Register `nbytes` at `offset` of the file that the key names."""
        self._register(name, lambda: open_system_memory(self._directory, name, key, offset, nbytes))

    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        """Register the first `nbytes` of the device memory of a CUDA IPC handle."""
        self._register(name, lambda: open_cuda_memory(self._cuda, name, handle, device, nbytes))

    def _register(self, name: str, open_memory: Callable[[], RegionMemory]) -> None:
        self.check_allowed()
        if not 0 < len(name) <= _MAX_NAME_LENGTH:
            raise InvalidRequestError(
                f"cannot register shared memory region with a name of {len(name)} characters; it must have 1 to "
                f"{_MAX_NAME_LENGTH}"
            )
        with self._lock:
            self._check_can_register_locked(name)
        memory = open_memory()
        try:
            with self._lock:
                self._check_can_register_locked(name)
                self._regions[name] = Region(memory)
        except BaseException:
            memory.close()
            raise

    def unregister(self, name: str, kind: type[RegionMemory]) -> None:
        """Unregister the region of this name and type: no further request gets it.

        It is closed, and its name is free, after the last request that uses it. The name "" means all of the type. An
        unknown name is no error.
        """
        self.check_allowed()
        self._remove(name, kind)

    def close(self) -> None:
        """Unregister all regions."""
        self._remove("", RegionMemory)

    def _remove(self, name: str, kind: Any) -> None:
        unused = []
        with self._lock:
            for region in list(self._regions.values()):
                if name in ("", region.name) and isinstance(region.memory, kind):
                    if region.users:
                        region.unregistered = True
                    else:
                        unused.append(self._regions.pop(region.name))
        for region in unused:
            region.memory.close()

    def regions(self) -> Sequence[Region]:
        """Return all regions, also unregistered ones that requests still use."""
        with self._lock:
            return list(self._regions.values())

    def acquire(self, name: str) -> Region:
        """Return the region of this name. It stays open until it is released."""
        with self._lock:
            region = self._regions.get(name)
            if region is not None and not region.unregistered:
                region.users += 1
                return region
        reason = "" if self.allowed else f". {_DISABLED}"
        if region is not None:
            reason = ", which is unregistered and only kept for requests that began before: register another"
        raise NotFoundError(f"Unable to find shared memory region: {truncate(name)!r}{reason}")

    def release(self, region: Region) -> None:
        """Release an acquired region."""
        with self._lock:
            region.users -= 1
            unused = region.unregistered and not region.users
            if unused:
                del self._regions[region.name]
        if unused:
            region.memory.close()

    def check_allowed(self) -> None:
        """Raise UnsupportedError, which names the flag, if shared memory is not allowed."""
        if not self.allowed:
            raise UnsupportedError(_DISABLED)

    def _check_can_register_locked(self, name: str) -> None:
        if name in self._regions:
            raise AlreadyExistsError(
                f"shared memory region {truncate(name)!r} already in manager: unregister it first, or choose another name"
            )
        limit = min(_MAX_REGIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _FILES_PER_REGION)
        if len(self._regions) >= limit:
            raise LimitError(
                f"{limit} shared memory regions are registered, which is the most that this server keeps (it may open "
                f"{_FILES_PER_REGION} times as many files): unregister some"
            )


class RegionLease:
    """The regions that one request uses until it is done. Not thread-safe."""

    __slots__ = ("_acquired", "regions")

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self._acquired: list[Region] = []

    def __bool__(self) -> bool:
        return bool(self._acquired)

    def span(self, tensor: Any) -> Span | None:
        """Return the place that a tensor's parameters name; None if they name no region.

        `tensor` is an input or a requested output.
        """
        parameters = tensor.parameters
        of = f" for tensor {tensor.name!r}"
        if _REGION not in parameters:
            for key in (_OFFSET, _BYTE_SIZE):
                if key in parameters:
                    raise InvalidRequestError(
                        f"{key!r} can not be specified without {_REGION!r} parameter{of}"
                    )
            return None
        name: str = parameter_value(parameters[_REGION], _REGION, "string_param", of=of)
        offset = (
            parameter_value(parameters[_OFFSET], _OFFSET, "int64_param", of=of)
            if _OFFSET in parameters
            else 0
        )
        if _BYTE_SIZE not in parameters:
            raise InvalidRequestError(
                f"{_BYTE_SIZE!r} must be specified along with {_REGION!r} parameter{of}"
            )
        nbytes = parameter_value(parameters[_BYTE_SIZE], _BYTE_SIZE, "int64_param", of=of)
        region = self.regions.acquire(name)
        self._acquired.append(region)
        _check_bounds(region, offset & _UINT64_MAX, nbytes & _UINT64_MAX)
        return Span(region, offset, nbytes)

    def release(self) -> None:
        """Release the regions. Idempotent."""
        acquired, self._acquired = self._acquired, []
        for region in acquired:
            self.regions.release(region)


def _check_bounds(region: Region, offset: int, nbytes: int) -> None:
    size = region.memory.nbytes
    has = f"region {truncate(region.name)!r} has {size} bytes"
    if offset >= size:
        raise InvalidRequestError(
            f"Invalid offset for shared memory region: {truncate(region.name)!r}: {offset}, but {has}"
        )
    if nbytes > _UINT64_MAX - offset:
        raise InvalidRequestError(
            f"Integer overflow detected: byte_size ({nbytes}) + offset ({offset}) exceeds maximum value ({_UINT64_MAX}) for "
            f"{has}"
        )
    if offset + nbytes > size:
        raise InvalidRequestError(
            f"Invalid offset + byte size for shared memory region: {truncate(region.name)!r}: {offset} + {nbytes}, but {has}"
        )
