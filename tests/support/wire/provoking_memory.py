"""Use and registration of shared memory that give each error of docs/reference/protocol.md."""

from __future__ import annotations

from typing import Any

from support.wire.provoking import KEY, Provoked, Served, set_
from support.wire.rig import PATIENCE

from tensorferry.protos import inference_pb2 as pb

PROVOKED = Provoked()
when, spoiled = PROVOKED.when, PROVOKED.spoiled


def placed(tensor: Any, region: str = "r", nbytes: int | None = 16, offset: int = 0) -> None:
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_offset"].int64_param = offset
    if nbytes is not None:
        tensor.parameters["shared_memory_byte_size"].int64_param = nbytes


def input_placed(request: pb.ModelInferRequest, **where: Any) -> None:
    placed(request.inputs[1], **where)
    del request.raw_input_contents[1]


def output_placed(request: pb.ModelInferRequest, **where: Any) -> Any:
    output = request.outputs.add(name="y")
    placed(output, **where)
    return output


spoiled("the region is unknown")(lambda r: input_placed(r, region="other"))
spoiled("the offset is beyond the region")(lambda r: input_placed(r, offset=64))
spoiled("the tensor ends beyond the region")(lambda r: input_placed(r, offset=49))
spoiled("offset and size overflow")(lambda r: output_placed(r, nbytes=-32, offset=32))
spoiled("a tensor in shared memory has no size")(lambda r: input_placed(r, nbytes=None))
spoiled("a tensor in shared memory has the wrong size")(lambda r: input_placed(r, nbytes=32))


@spoiled("a tensor in shared memory has contents")
def _(request: pb.ModelInferRequest) -> None:
    input_placed(request)
    request.inputs[1].contents.fp32_contents.extend([0] * 4)


spoiled("an output does not fit its place")(lambda r: output_placed(r, nbytes=15))
spoiled("classes are requested in shared memory")(
    lambda r: set_(output_placed(r).parameters["classification"], int64_param=1)
)


def registered(case: str, name: str, key: str, nbytes: int = 8) -> None:
    def provoke(served: Served) -> Any:
        request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=nbytes)
        return served.stub.SystemSharedMemoryRegister(request, timeout=PATIENCE)

    when(case)(provoke)


registered("a region is registered twice", "r", KEY)
registered("a region ends beyond its memory", "s", KEY, 65)
registered("a key names no file", "s", "/tensorferry-nothing")
registered("a key is not a file name", "s", "/")
registered("a key is reserved", "s", "/triton_python_backend_shm_region_1")


@when("the status of an unknown region")
def _(served: Served) -> Any:
    request = pb.SystemSharedMemoryStatusRequest(name="other")
    return served.stub.SystemSharedMemoryStatus(request, timeout=PATIENCE)


@when("CUDA shared memory where there is no GPU")
def _(served: Served) -> Any:
    request = pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=bytes(64), byte_size=8)
    return served.stub.CudaSharedMemoryRegister(request, timeout=PATIENCE)


@when("shared memory is off")
def _(served: Served) -> Any:
    request = pb.SystemSharedMemoryRegisterRequest(name="r", key=KEY, byte_size=8)
    return served.plain.SystemSharedMemoryRegister(request, timeout=PATIENCE)
