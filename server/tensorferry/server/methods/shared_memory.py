"""The methods of both shared memory extensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import NotFoundError, truncate
from tensorferry.server.shared_memory.cuda import CudaSharedMemory
from tensorferry.server.shared_memory.regions import RegionMemory, Regions
from tensorferry.server.shared_memory.system import SystemSharedMemory

_Kind = TypeVar("_Kind", SystemSharedMemory, CudaSharedMemory)

# As Triton's messages call each kind, where it is the one that is meant.
_CALLED = {SystemSharedMemory: "system shared memory", CudaSharedMemory: "CUDA shared memory"}


class SharedMemoryMethods:
    """Registers regions of both kinds, tells of them and unregisters them. Thread-safe."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    @property
    def names(self) -> Sequence[str]:
        """Listed only where there can be such regions."""
        system = ("system_shared_memory",) if self._regions.allowed else ()
        return (*system, "cuda_shared_memory") if self._regions.has_cuda else system

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
        self._regions.register_system(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def _status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for memory in self._found(request.name, SystemSharedMemory):
            told = response.regions[memory.name]
            told.name, told.key = memory.name, memory.key
            told.offset, told.byte_size = memory.offset, memory.nbytes
        return response

    def _unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._regions.unregister(request.name, SystemSharedMemory)
        return pb.SystemSharedMemoryUnregisterResponse()

    def _register_cuda(
        self, request: pb.CudaSharedMemoryRegisterRequest
    ) -> pb.CudaSharedMemoryRegisterResponse:
        self._regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    def _cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for memory in self._found(request.name, CudaSharedMemory):
            told = response.regions[memory.name]
            told.name, told.device_id, told.byte_size = memory.name, memory.device, memory.nbytes
        return response

    def _unregister_cuda(
        self, request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        self._regions.unregister(request.name, CudaSharedMemory)
        return pb.CudaSharedMemoryUnregisterResponse()

    def _found(self, name: str, kind: type[_Kind]) -> Sequence[_Kind]:
        """All of the kind, or the one of this name, which must be there."""
        memories: Sequence[RegionMemory] = [region.memory for region in self._regions.regions()]
        found = [memory for memory in memories if isinstance(memory, kind) and name in ("", memory.name)]
        if found or not name:
            return found
        for memory in memories:
            if memory.name == name:
                raise NotFoundError(
                    f"The region named {truncate(name)!r} is registered as {_CALLED[type(memory)]}, not {_CALLED[kind]}"
                )
        # With a small letter here, as there.
        raise NotFoundError(
            f"Unable to find {_CALLED[kind].replace('CUDA', 'cuda')} region: {truncate(name)!r}"
        )
