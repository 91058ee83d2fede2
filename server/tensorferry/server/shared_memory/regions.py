"""Shared memory regions: what clients register, take inputs from and have outputs placed in.

Regions are of system memory or of CUDA's. They have one table of names, and are read and written alike.
Messages keep the wording by which Triton's clients recognise them.
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
from tensorferry.server.shared_memory.cuda import CudaSharedMemory, open_cuda_memory
from tensorferry.server.shared_memory.cuda_driver import CudaDriver
from tensorferry.server.shared_memory.system import DIRECTORY, SystemSharedMemory, open_system_memory
from tensorferry.server.wire.parameters import parameter_value

RegionMemory: TypeAlias = SystemSharedMemory | CudaSharedMemory

_REGION = "shared_memory_region"
_BYTE_SIZE = "shared_memory_byte_size"
_OFFSET = "shared_memory_offset"

_LONGEST_NAME = 1024
# Those of system memory each keep a file open; connections need some too.
_MOST_REGIONS = 4096
_SHARE_OF_FILES = 2

# Offsets and sizes are signed in requests and unsigned to Triton, whose order of checks is kept.
_UNSIGNED = (1 << 64) - 1

_DISABLED = (
    "Client shared memory is disabled. Start the server with --allow-shared-memory to let clients register regions; "
    "or send the tensors"
)


@dataclass(slots=True, eq=False)
class Region:
    """A registered memory. Its owner's lock guards `users` and `unregistered`."""

    memory: RegionMemory
    users: int = 0
    # Unregistered while requests use it: it goes with the last of them.
    unregistered: bool = False

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.memory.name


class Span(NamedTuple):
    """The place of a tensor in a region."""

    region: Region
    offset: int
    nbytes: int

    def read(self) -> bytes:
        """What is there now, copied."""
        return self.region.memory.read(self.offset, self.nbytes)

    def write(self, data: memoryview) -> None:
        """Puts these bytes there, which must fit."""
        self.region.memory.write(self.offset, data)


class Regions:
    """The regions that clients registered, by name. Thread-safe.

    Where it is not `allowed` there are none, and never any. `max_bytes` is the most that the inputs
    of one request may have there together: they are copied before the queue can refuse them.
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
        # Guards _regions, and users and leaving of each. No memory is opened, closed or read under it.
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}

    @property
    def has_cuda(self) -> bool:
        """Whether there can be regions of CUDA's."""
        return self.allowed and self._cuda.missing() is None

    def register_system(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Makes `nbytes` from `offset` on of the file that the key names a region."""
        self._register(name, lambda: open_system_memory(self._directory, name, key, offset, nbytes))

    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        """Makes the first `nbytes` of the device memory that a CUDA IPC handle stands for a region."""
        self._register(name, lambda: open_cuda_memory(self._cuda, name, handle, device, nbytes))

    def _register(self, name: str, open_memory: Callable[[], RegionMemory]) -> None:
        self.check_allowed()
        if not 0 < len(name) <= _LONGEST_NAME:
            raise InvalidRequestError(
                f"cannot register shared memory region with a name of {len(name)} characters; it must have 1 to "
                f"{_LONGEST_NAME}"
            )
        with self._lock:
            self._check_room_locked(name)
        memory = open_memory()
        try:
            with self._lock:
                self._check_room_locked(name)
                self._regions[name] = Region(memory)
        except BaseException:
            memory.close()
            raise

    def unregister(self, name: str, kind: type[RegionMemory]) -> None:
        """The region goes if it is of this kind, at once or with the last request that uses it.

        "" stands for all of the kind; that there is no such one is no error.
        """
        self.check_allowed()
        self._remove(name, kind)

    def close(self) -> None:
        """All regions go."""
        self._remove("", RegionMemory)

    def _remove(self, name: str, kind: Any) -> None:
        gone = []
        with self._lock:
            for region in list(self._regions.values()):
                if name in ("", region.name) and isinstance(region.memory, kind):
                    if region.users:
                        region.unregistered = True
                    else:
                        gone.append(self._regions.pop(region.name))
        for region in gone:
            region.memory.close()

    def regions(self) -> Sequence[Region]:
        """All regions, those too that go with the last request that uses them."""
        with self._lock:
            return list(self._regions.values())

    def acquire(self, name: str) -> Region:
        """The region, which stays at least until it is released."""
        with self._lock:
            region = self._regions.get(name)
            if region is not None:
                region.users += 1
                return region
        reason = "" if self.allowed else f". {_DISABLED}"
        raise NotFoundError(f"Unable to find shared memory region: {truncate(name)!r}{reason}")

    def release(self, region: Region) -> None:
        """Gives back what was acquired."""
        with self._lock:
            region.users -= 1
            gone = region.unregistered and not region.users
            if gone:
                del self._regions[region.name]
        if gone:
            region.memory.close()

    def check_allowed(self) -> None:
        """UnsupportedError where there can be no regions; it names the flag."""
        if not self.allowed:
            raise UnsupportedError(_DISABLED)

    def _check_room_locked(self, name: str) -> None:
        if name in self._regions:
            raise AlreadyExistsError(
                f"shared memory region {truncate(name)!r} already in manager: unregister it first, or choose another name"
            )
        most = min(_MOST_REGIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE_OF_FILES)
        if len(self._regions) >= most:
            raise LimitError(
                f"{most} shared memory regions are registered, which is the most that this server keeps (it may open "
                f"{_SHARE_OF_FILES} times as many files): unregister some"
            )


class RegionLease:
    """The regions that one request uses, held until it is done. Of one thread at a time."""

    __slots__ = ("_held", "regions")

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self._held: list[Region] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def span(self, tensor: Any) -> Span | None:
        """Where the parameters of an input or a requested output place it; None where that is in no region."""
        given = tensor.parameters
        of = f" for tensor {tensor.name!r}"
        if _REGION not in given:
            for key in (_OFFSET, _BYTE_SIZE):
                if key in given:
                    raise InvalidRequestError(
                        f"{key!r} can not be specified without {_REGION!r} parameter{of}"
                    )
            return None
        name: str = parameter_value(given[_REGION], _REGION, "string_param", of=of)
        offset = parameter_value(given[_OFFSET], _OFFSET, "int64_param", of=of) if _OFFSET in given else 0
        if _BYTE_SIZE not in given:
            raise InvalidRequestError(
                f"{_BYTE_SIZE!r} must be specified along with {_REGION!r} parameter{of}"
            )
        nbytes = parameter_value(given[_BYTE_SIZE], _BYTE_SIZE, "int64_param", of=of)
        region = self.regions.acquire(name)
        self._held.append(region)
        _check_bounds(region, offset & _UNSIGNED, nbytes & _UNSIGNED)
        return Span(region, offset, nbytes)

    def release(self) -> None:
        """The request is done. Idempotent."""
        held, self._held = self._held, []
        for region in held:
            self.regions.release(region)


def _check_bounds(region: Region, offset: int, nbytes: int) -> None:
    size = region.memory.nbytes
    has = f"region {truncate(region.name)!r} has {size} bytes"
    if offset >= size:
        raise InvalidRequestError(
            f"Invalid offset for shared memory region: {truncate(region.name)!r}: {offset}, but {has}"
        )
    if nbytes > _UNSIGNED - offset:
        raise InvalidRequestError(
            f"Integer overflow detected: byte_size ({nbytes}) + offset ({offset}) exceeds maximum value ({_UNSIGNED}) for "
            f"{has}"
        )
    if offset + nbytes > size:
        raise InvalidRequestError(
            f"Invalid offset + byte size for shared memory region: {truncate(region.name)!r}: {offset} + {nbytes}, but {has}"
        )
