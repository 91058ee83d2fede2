"""Inputs and outputs of one model in a region of shared memory: what both clients share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from tensorferry.client.connection.cuda_memory import CudaMemory
from tensorferry.client.connection.device_arrays import DeviceArray, DeviceResult
from tensorferry.client.connection.system_memory import SystemMemory
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.client.messages.results import Answer, InferenceResult, Parameter
from tensorferry.client.messages.rpcs import Rpc, nothing
from tensorferry.client.messages.shared_layout import Layout, Shapes, layout, without_outputs
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import Array

# Longest wait for the server when a region is unregistered.
RELEASE_SECONDS = 5.0
# Between two questions whether a request still uses the region: no call of the protocol waits for that.
RELEASE_POLL_SECONDS = 0.01

ArrayT = TypeVar("ArrayT")
ResultT = TypeVar("ResultT", bound=Answer[Any])


class SharedTensors(ABC, Generic[ArrayT, ResultT]):
    """A region of shared memory, the arrays of a model's inputs in it, and the calls that it needs.

    `in_use` asks whether a request still uses the unregistered region: one whose timeout has passed
    at the client can still run, and write its outputs. It is None if that does no harm.
    """

    inputs: Mapping[str, ArrayT]
    register: Rpc[None]
    unregister: Rpc[None]
    in_use: Rpc[bool] | None = None

    def __init__(self, places: Layout, key: str) -> None:
        self._layout = places
        self._key = key

    def request(
        self, rows: int | None, request_id: str | None, parameters: Mapping[str, Parameter] | None
    ) -> pb.ModelInferRequest:
        """Return the request that runs the first rows."""
        return self._layout.request(self._key, rows, request_id, parameters)

    @abstractmethod
    def result(self, answer: pb.ModelInferResponse) -> ResultT:
        """Return the result with outputs in the region."""

    @abstractmethod
    def release(self) -> None:
        """Remove the region, which is no longer registered."""


class SystemTensors(SharedTensors[Array, InferenceResult]):
    """Tensors in system memory. Arrays stay usable after `release`."""

    def __init__(self, places: Layout) -> None:
        self._memory = memory = SystemMemory(places.nbytes)
        super().__init__(places, memory.key)
        self.inputs = {place.name: place.array(memory.buffer) for place in places.inputs}
        region = pb.SystemSharedMemoryRegisterRequest(
            name=memory.key, key=f"/{memory.key}", byte_size=memory.nbytes
        )
        self.register = Rpc("SystemSharedMemoryRegister", region, nothing)
        name = pb.SystemSharedMemoryUnregisterRequest(name=memory.key)
        self.unregister = Rpc("SystemSharedMemoryUnregister", name, nothing)

    def result(self, answer: pb.ModelInferResponse) -> InferenceResult:
        """Return the result with outputs in the region."""
        places = self._layout.filled(answer)
        outputs = {place.name: place.array(self._memory.buffer) for place in places}
        return replace(without_outputs(answer), outputs=outputs)

    def release(self) -> None:
        """Remove the region's file, which can be done while the server has it open."""
        self._memory.unlink()


class CudaTensors(SharedTensors[DeviceArray, DeviceResult]):
    """Tensors in memory of a GPU. Arrays cannot be used after `release`."""

    def __init__(self, places: Layout, device: int) -> None:
        self._memory = memory = CudaMemory(places.nbytes, device)
        super().__init__(places, memory.key)
        self.inputs = {place.name: DeviceArray(memory, place) for place in places.inputs}
        region = pb.CudaSharedMemoryRegisterRequest(
            name=memory.key, raw_handle=memory.handle, device_id=memory.device, byte_size=memory.nbytes
        )
        self.register = Rpc("CudaSharedMemoryRegister", region, nothing)
        name = pb.CudaSharedMemoryUnregisterRequest(name=memory.key)
        self.unregister = Rpc("CudaSharedMemoryUnregister", name, nothing)
        # CUDA's behaviour is undefined if used memory is freed.
        status = pb.CudaSharedMemoryStatusRequest()
        self.in_use = Rpc("CudaSharedMemoryStatus", status, lambda answer: memory.key in answer.regions)

    def request(
        self, rows: int | None, request_id: str | None, parameters: Mapping[str, Parameter] | None
    ) -> pb.ModelInferRequest:
        """Return the request that runs the first rows, after the work in the GPU's default stream."""
        request = super().request(rows, request_id, parameters)
        # The server's copies cannot wait for streams of this process.
        self._memory.wait()
        return request

    def result(self, answer: pb.ModelInferResponse) -> DeviceResult:
        """Return the result with outputs in the region."""
        # First, because `without_outputs` empties the answer.
        places = self._layout.filled(answer)
        head = without_outputs(answer)
        outputs = {place.name: DeviceArray(self._memory, place) for place in places}
        return DeviceResult(head.model_name, head.model_version, head.id, head.parameters, outputs)

    def release(self) -> None:
        """Free the memory."""
        self._memory.close()


def shared_tensors(
    model: ModelMetadata, version: str, rows: int, shapes: Shapes | None, device: int | None
) -> SharedTensors[Any, Any]:
    """Return new memory for a model's tensors: of this GPU, or system memory for None."""
    places = layout(model, version, rows, shapes)
    return SystemTensors(places) if device is None else CudaTensors(places, device)
