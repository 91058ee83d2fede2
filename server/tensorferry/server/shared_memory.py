"""System shared memory: regions that clients register, take inputs from and have outputs placed in.

A region is read and written through its file rather than mapped. A client may cut the file short, or
its file system may be full, at any time: a system call then says so, where a mapping would kill the
server. And what was read is a copy, so what was checked of it stays true whatever the client does.

Messages keep the wording by which Triton's clients recognise them.
"""

from __future__ import annotations

import os
import resource
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    LimitError,
    NotFoundError,
    UnsupportedError,
)
from tensorferry.server.parameters import value_of

_REGION = "shared_memory_region"
_BYTE_SIZE = "shared_memory_byte_size"
_OFFSET = "shared_memory_offset"

# Where Linux has the files of POSIX shared memory.
_DIRECTORY = Path("/dev/shm")
# Triton's own, which its clients cannot register there.
_RESERVED_KEYS = "triton_python_backend_shm_region_"
_LONGEST_KEY = 255
_LONGEST_NAME = 1024
# Each keeps a file open; connections need some too.
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
    """A registered part of a shared memory file. Its owner's lock guards `users` and `leaving`."""

    name: str
    key: str
    offset: int
    nbytes: int
    file: int
    users: int = 0
    # Unregistered while requests use it: it goes with the last of them.
    leaving: bool = False


class Span(NamedTuple):
    """The place of a tensor in a region."""

    region: Region
    offset: int
    nbytes: int

    def read(self) -> bytes:
        """What is there now, copied."""
        region, at = self.region, self.region.offset + self.offset
        pieces: list[bytes] = []
        left = self.nbytes
        # Linux gives at most 2 GiB at a time.
        while left:
            piece = os.pread(region.file, left, at)
            if not piece:
                raise InvalidRequestError(_smaller(region))
            pieces.append(piece)
            left -= len(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def write(self, data: memoryview) -> None:
        """Puts these bytes there, which must fit."""
        region, at = self.region, self.region.offset + self.offset
        try:
            if os.fstat(region.file).st_size < at + len(data):
                raise InvalidRequestError(_smaller(region))
            while data:
                written = os.pwrite(region.file, data, at)
                data, at = data[written:], at + written
        except OSError as error:
            raise LimitError(
                f"shared memory region {region.name!r} cannot be written to: {error.strerror}"
            ) from None


def _smaller(region: Region) -> str:
    return f"shared memory region {region.name!r}: the file of key {region.key!r} has become smaller since it was registered"


class Regions:
    """The regions that clients registered, by name. Thread-safe.

    Where it is not `allowed` there are none, and never any. `max_bytes` is the most that the inputs
    of one request may have there together: they are copied before the queue can refuse them.
    """

    def __init__(
        self, *, allowed: bool = False, max_bytes: int = 1 << 30, directory: Path = _DIRECTORY
    ) -> None:
        self.allowed = allowed
        self.max_bytes = max_bytes
        self._directory = directory
        # Guards _regions, and users and leaving of each. No file is opened, closed or read under it.
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Makes `nbytes` from `offset` on of the file that the key names a region."""
        self._check_allowed()
        if not 0 < len(name) <= _LONGEST_NAME:
            raise InvalidRequestError(
                f"cannot register shared memory region with a name of {len(name)} characters; it must have 1 to "
                f"{_LONGEST_NAME}"
            )
        path = self._path_of(name, key)
        with self._lock:
            self._check_room_locked(name)
        file = _opened(path, key)
        try:
            size = os.fstat(file).st_size
            if not nbytes or offset + nbytes > size:
                raise InvalidRequestError(
                    f"failed to register shared memory region {name!r}: invalid args: {nbytes} bytes from offset {offset}, "
                    f"of a file of {size} bytes"
                )
            with self._lock:
                self._check_room_locked(name)
                self._regions[name] = Region(name, key, offset, nbytes, file)
        except BaseException:
            os.close(file)
            raise

    def unregister(self, name: str) -> None:
        """The region goes, at once or with the last request that uses it; "" for all, and no such one is none."""
        self._check_allowed()
        self._remove(name)

    def close(self) -> None:
        """All regions go."""
        self._remove("")

    def _remove(self, name: str) -> None:
        gone = []
        with self._lock:
            for region in list(self._regions.values()):
                if name in ("", region.name):
                    if region.users:
                        region.leaving = True
                    else:
                        gone.append(self._regions.pop(region.name))
        for region in gone:
            os.close(region.file)

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
        raise NotFoundError(f"Unable to find shared memory region: {name!r}{reason}")

    def release(self, region: Region) -> None:
        """Gives back what was acquired."""
        with self._lock:
            region.users -= 1
            gone = region.leaving and not region.users
            if gone:
                del self._regions[region.name]
        if gone:
            os.close(region.file)

    def _check_allowed(self) -> None:
        if not self.allowed:
            raise UnsupportedError(_DISABLED)

    def _check_room_locked(self, name: str) -> None:
        if name in self._regions:
            raise AlreadyExistsError(
                f"shared memory region {name!r} already in manager: unregister it first, or choose another name"
            )
        most = min(_MOST_REGIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE_OF_FILES)
        if len(self._regions) >= most:
            raise LimitError(
                f"{most} shared memory regions are registered, which is the most that this server keeps (it may open "
                f"{_SHARE_OF_FILES} times as many files): unregister some"
            )

    def _path_of(self, name: str, key: str) -> Path:
        """The one file that a key names: its directory is that of shared memory, and nothing leads out of it."""
        file = key.lstrip("/")
        if file.startswith(_RESERVED_KEYS):
            raise InvalidRequestError(
                f"cannot register shared memory region {name!r} with key {key!r} as the key contains the reserved prefix "
                f"{_RESERVED_KEYS!r}"
            )
        if (
            not file
            or "/" in file
            or "\0" in file
            or file in (".", "..")
            or len(file.encode()) > _LONGEST_KEY
        ):
            raise InvalidRequestError(
                f"cannot register shared memory region {name!r} - invalid shm key {key!r}: it must name one file, without "
                f"further slashes, of at most {_LONGEST_KEY} bytes"
            )
        return self._directory / file


def _opened(path: Path, key: str) -> int:
    try:
        # Neither a link that leads elsewhere is followed, nor a pipe waited for.
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise NotFoundError(f"Unable to open shared memory region: {key!r}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotFoundError(f"Unable to open shared memory region: {key!r}: it is no shared memory")
    return file


class Lease:
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
        name: str = value_of(given[_REGION], _REGION, "string_param", of=of)
        offset = value_of(given[_OFFSET], _OFFSET, "int64_param", of=of) if _OFFSET in given else 0
        if _BYTE_SIZE not in given:
            raise InvalidRequestError(
                f"{_BYTE_SIZE!r} must be specified along with {_REGION!r} parameter{of}"
            )
        nbytes = value_of(given[_BYTE_SIZE], _BYTE_SIZE, "int64_param", of=of)
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
    has = f"region {region.name!r} has {region.nbytes} bytes"
    if offset >= region.nbytes:
        raise InvalidRequestError(
            f"Invalid offset for shared memory region: {region.name!r}: {offset}, but {has}"
        )
    if nbytes > _UNSIGNED - offset:
        raise InvalidRequestError(
            f"Integer overflow detected: byte_size ({nbytes}) + offset ({offset}) exceeds maximum value ({_UNSIGNED}) for "
            f"{has}"
        )
    if offset + nbytes > region.nbytes:
        raise InvalidRequestError(
            f"Invalid offset + byte size for shared memory region: {region.name!r}: {offset} + {nbytes}, but {has}"
        )


class SharedMemory:
    """The methods of both shared memory extensions; regions are of system memory, none of CUDA's."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    @property
    def names(self) -> Sequence[str]:
        """Listed only where there can be regions."""
        return ("system_shared_memory",) if self._regions.allowed else ()

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """All six, that the answer is a reason where there can be none."""
        return {
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryStatus": self._status,
            "SystemSharedMemoryUnregister": self._unregister,
            "CudaSharedMemoryRegister": self._register_cuda,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryUnregister": self._unregister_cuda,
        }

    def _register(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def _status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._regions.regions():
            if request.name in ("", region.name):
                told = response.regions[region.name]
                told.name, told.key = region.name, region.key
                told.offset, told.byte_size = region.offset, region.nbytes
        if request.name and not response.regions:
            raise NotFoundError(f"Unable to find system shared memory region: {request.name!r}")
        return response

    def _unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._regions.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def _register_cuda(self, request: pb.CudaSharedMemoryRegisterRequest) -> NoReturn:
        raise UnsupportedError(
            f"failed to register CUDA shared memory region: {request.name!r}, GPUs not supported: this server takes "
            "tensors in system shared memory only"
        )

    def _cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        if any(region.name == request.name for region in self._regions.regions()):
            raise NotFoundError(
                f"The region named {request.name!r} is registered as system shared memory, not CUDA shared memory"
            )
        if request.name:
            raise NotFoundError(f"Unable to find cuda shared memory region: {request.name!r}")
        return pb.CudaSharedMemoryStatusResponse()

    def _unregister_cuda(
        self, request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        # There is none to unregister, which is no error; clients do it before they begin.
        if not self._regions.allowed:
            raise UnsupportedError(_DISABLED)
        return pb.CudaSharedMemoryUnregisterResponse()
