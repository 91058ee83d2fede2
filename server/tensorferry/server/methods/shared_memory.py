"""The methods of the extensions `system_shared_memory` and `cuda_shared_memory`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import NotFoundError, truncate
from tensorferry.server.inference.shared_memory.cuda import CudaSharedMemory
from tensorferry.server.inference.shared_memory.regions import RegionMemory, Regions
from tensorferry.server.inference.shared_memory.system import SystemSharedMemory

_Kind = TypeVar("_Kind", SystemSharedMemory, CudaSharedMemory)

# The names in Triton's error messages.
_TYPE_NAMES = {SystemSharedMemory: "system shared memory", CudaSharedMemory: "CUDA shared memory"}


class SharedMemoryMethods:
    """Registers, lists and unregisters regions of both types. Thread-safe."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    @property
    def names(self) -> Sequence[str]:
        """The extensions for which regions can be registered."""
        system = ("system_shared_memory",) if self._regions.allowed else ()
        return (*system, "cuda_shared_memory") if self._regions.has_cuda else system

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return all six methods. A type that is not available is explained in their errors."""
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
        for memory in self._registered(request.name, SystemSharedMemory):
            status = response.regions[memory.name]
            status.name, status.key = memory.name, memory.key
            status.offset, status.byte_size = memory.offset, memory.nbytes
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
        for memory in self._registered(request.name, CudaSharedMemory):
            status = response.regions[memory.name]
            status.name, status.device_id, status.byte_size = memory.name, memory.device, memory.nbytes
        return response

    def _unregister_cuda(
        self, request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        self._regions.unregister(request.name, CudaSharedMemory)
        return pb.CudaSharedMemoryUnregisterResponse()

    def _registered(self, name: str, kind: type[_Kind]) -> Sequence[_Kind]:
        """Return the region of this name; for "" all of the type. NotFoundError for an unknown name."""
        memories: Sequence[RegionMemory] = [region.memory for region in self._regions.regions()]
        matching = [memory for memory in memories if isinstance(memory, kind) and name in ("", memory.name)]
        if matching or not name:
            return matching
        for memory in memories:
            if memory.name == name:
                raise NotFoundError(
                    f"The region named {truncate(name)!r} is registered as {_TYPE_NAMES[type(memory)]}, not {_TYPE_NAMES[kind]}"
                )
        # Triton writes "cuda" here.
        raise NotFoundError(
            f"Unable to find {_TYPE_NAMES[kind].replace('CUDA', 'cuda')} region: {truncate(name)!r}"
        )
