"""Inputs and outputs of one model in a region of shared memory: what both clients share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tensorferry.client.connection.cuda_memory import CudaMemory
from tensorferry.client.connection.device_arrays import DeviceArray, DeviceResult
from tensorferry.client.connection.system_memory import SystemMemory
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.client.messages.results import Answer, InferenceResult, Parameter
from tensorferry.client.messages.rpcs import Rpc, nothing
from tensorferry.client.messages.shared_layout import Layout, Place, Shapes, layout, without_outputs
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import Array

# Longest wait for the server when a region is unregistered.
RELEASE_SECONDS = 5.0
# Between two questions whether a request still uses the region: no call of the protocol waits for that.
RELEASE_POLL_SECONDS = 0.01

ArrayT = TypeVar("ArrayT")
ResultT = TypeVar("ResultT", bound=Answer[Any])


@dataclass(slots=True)
class SharedTensors(Generic[ArrayT, ResultT]):
    """A region of shared memory, the arrays of a model's inputs in it, and the calls that it needs.

    `in_use` asks whether a request still uses the unregistered region: one whose timeout has passed
    at the client can still run, and write its outputs. It is None if that does no harm.
    """

    layout: Layout
    memory: SystemMemory | CudaMemory
    # Over the memory.
    array: Callable[[Place], ArrayT]
    of_fields: Callable[[str, str, str, Mapping[str, Parameter], Mapping[str, ArrayT]], ResultT]
    register: Rpc[None]
    unregister: Rpc[None]
    in_use: Rpc[bool] | None = None
    inputs: Mapping[str, ArrayT] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = {place.name: self.array(place) for place in self.layout.inputs}

    def request(
        self, rows: int | None, request_id: str | None, parameters: Mapping[str, Parameter] | None
    ) -> pb.ModelInferRequest:
        """Return the request that runs the first rows, on a GPU after the work in its default stream."""
        request = self.layout.request(self.memory.key, rows, request_id, parameters)
        if isinstance(self.memory, CudaMemory):
            # The server's copies cannot wait for streams of this process.
            self.memory.wait()
        return request

    def result(self, answer: pb.ModelInferResponse) -> ResultT:
        """Return the result with outputs in the region."""
        # First, because `without_outputs` empties the answer.
        outputs = {place.name: self.array(place) for place in self.layout.filled(answer)}
        head = without_outputs(answer)
        return self.of_fields(head.model_name, head.model_version, head.id, head.parameters, outputs)


def shared_tensors(
    model: ModelMetadata, version: str, rows: int, shapes: Shapes | None, device: int | None
) -> SharedTensors[Any, Any]:
    """Return new memory for a model's tensors: of this GPU, or system memory for None."""
    places = layout(model, version, rows, shapes)
    return _in_system_memory(places) if device is None else _in_memory_of_gpu(places, device)


def _in_system_memory(places: Layout) -> SharedTensors[Array, InferenceResult]:
    memory = SystemMemory(places.nbytes)
    region = pb.SystemSharedMemoryRegisterRequest(
        name=memory.key, key=f"/{memory.key}", byte_size=memory.nbytes
    )
    name = pb.SystemSharedMemoryUnregisterRequest(name=memory.key)
    return SharedTensors(
        places,
        memory,
        lambda place: place.array(memory.buffer),
        InferenceResult,
        Rpc("SystemSharedMemoryRegister", region, nothing),
        Rpc("SystemSharedMemoryUnregister", name, nothing),
    )


def _in_memory_of_gpu(places: Layout, device: int) -> SharedTensors[DeviceArray, DeviceResult]:
    memory = CudaMemory(places.nbytes, device)
    region = pb.CudaSharedMemoryRegisterRequest(
        name=memory.key, raw_handle=memory.handle, device_id=memory.device, byte_size=memory.nbytes
    )
    name = pb.CudaSharedMemoryUnregisterRequest(name=memory.key)
    status = pb.CudaSharedMemoryStatusRequest()
    return SharedTensors(
        places,
        memory,
        lambda place: DeviceArray(memory, place),
        DeviceResult,
        Rpc("CudaSharedMemoryRegister", region, nothing),
        Rpc("CudaSharedMemoryUnregister", name, nothing),
        # CUDA's behaviour is undefined if used memory is freed.
        Rpc("CudaSharedMemoryStatus", status, lambda answer: memory.key in answer.regions),
    )
