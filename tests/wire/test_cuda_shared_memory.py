"""Tensors in CUDA shared memory, over the wire, from another process than the server.

Each test runs with a stand-in for the driver's library, which the server loads instead of the real
one; and with the real one if there is a GPU.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.processes import models
from support.processes.server import ServerProcess, running
from support.wire.device_memory import DeviceMemory, build_stand_in, gpu_is_here
from support.wire.inputs import given, tensor, wanted
from tritonclient.utils import InferenceServerException

SIXTEEN = np.arange(16, dtype=np.int32).reshape(1, 16)

# Handles of the stand-in that fail.
OPENING, COPYING, CLOSING = 40, 44, 48
INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS, NOT_SUPPORTED = 1, 2, 700, 801


class Served(NamedTuple):
    server: ServerProcess
    memory: DeviceMemory
    client: triton.InferenceServerClient


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = build_stand_in(tmp_path_factory.mktemp("cuda"))
    if library is None:
        pytest.skip("NO C COMPILER: CUDA shared memory was not tested with the stand-in for the driver")
    return library


@pytest.fixture(scope="module", params=["stand-in", "gpu"])
def library(request: pytest.FixtureRequest) -> Path:
    if request.param == "stand-in":
        return Path(request.getfixturevalue("stand_in"))
    if not gpu_is_here():
        pytest.skip("NO GPU: CUDA shared memory was not tested with a real one")
    return Path("libcuda.so.1")


@pytest.fixture(scope="module")
def server(transport: str, library: Path, model_dir: Path) -> Iterator[ServerProcess]:
    echoes = models.echoes(model_dir, "INT32")
    # Models cannot use the stand-in, so they run on the CPU.
    device = ("--device", "cpu") if library.is_absolute() else ()
    variables = {"LD_LIBRARY_PATH": str(library.parent)} if library.is_absolute() else {}
    with running(
        *("--allow-shared-memory", *device, *echoes), transport=transport, variables=variables
    ) as server:
        yield server


@pytest.fixture
def served(server: ServerProcess, library: Path) -> Iterator[Served]:
    memory = DeviceMemory(library)
    with triton.InferenceServerClient(server.address) as client:
        yield Served(server, memory, client)
        client.unregister_cuda_shared_memory()
        client.unregister_system_shared_memory()
        assert names(client) == []
    memory.free_all()


def names(client: triton.InferenceServerClient) -> list[str]:
    return sorted(client.get_cuda_shared_memory_status().regions)


def register(served: Served, name: str, handle: bytes, nbytes: int = 64, device: int = 0) -> None:
    # tritonclient takes the handle in base64, and sends it unchanged.
    served.client.register_cuda_shared_memory(name, base64.b64encode(handle), device, nbytes)


def region(served: Served, name: str, nbytes: int = 64) -> int:
    """Register a region of this name; return the address of its memory in this process."""
    address, handle = served.memory.allocate(nbytes)
    register(served, name, handle, nbytes)
    return address


def test_input_and_output_in_device_memory(served: Served) -> None:
    source, target = region(served, "in"), region(served, "out")
    for times in range(1, 4):
        served.memory.put(source, (SIXTEEN * times).tobytes())
        result = served.client.infer("echo-INT32", [given("in", [1, 16], 64)], outputs=[wanted("out", 64)])
        assert list(result.get_response().raw_output_contents) == [b""]
        assert served.memory.get(target, 64) == (SIXTEEN * times).tobytes()


def test_device_memory_and_sent_tensors_and_no_rows(served: Served) -> None:
    source, target = region(served, "in"), region(served, "out")
    served.memory.put(source, SIXTEEN.tobytes())
    result = served.client.infer("echo-INT32", [given("in", [2, 8], 64)])
    np.testing.assert_array_equal(result.as_numpy("y"), SIXTEEN.reshape(2, 8))
    served.client.infer("echo-INT32", [tensor("x", SIXTEEN, "INT32")], outputs=[wanted("out", 64)])
    assert served.memory.get(target, 64) == SIXTEEN.tobytes()
    result = served.client.infer("echo-INT32", [given("in", [0, 16], 0)], outputs=[wanted("out", 64)])
    assert list(result.get_output("y").shape) == [0, 16]


def test_register_status_unregister(served: Served) -> None:
    client = served.client
    client.unregister_cuda_shared_memory("a")
    _, handle = served.memory.allocate(64)
    register(served, "a", handle)
    # Several regions may share their memory.
    register(served, "b", handle, 32)
    status = client.get_cuda_shared_memory_status("b").regions["b"]
    assert (status.name, status.device_id, status.byte_size) == ("b", 0, 32)
    with pytest.raises(InferenceServerException, match="shared memory region 'a' already in manager"):
        register(served, "a", handle)
    assert names(client) == ["a", "b"]
    client.unregister_system_shared_memory()
    client.unregister_system_shared_memory("a")
    assert names(client) == ["a", "b"]
    assert not client.get_system_shared_memory_status().regions
    with pytest.raises(
        InferenceServerException,
        match="The region named 'a' is registered as CUDA shared memory, not system shared memory",
    ):
        client.get_system_shared_memory_status("a")
    client.unregister_cuda_shared_memory("a")
    assert names(client) == ["b"]
    client.unregister_cuda_shared_memory()
    assert names(client) == []
    with pytest.raises(InferenceServerException, match="Unable to find cuda shared memory region: 'a'"):
        client.get_cuda_shared_memory_status("a")


def refused(served: Served, handle: bytes, nbytes: int = 64, device: int = 0) -> tuple[str, str]:
    """Return code and message of a region that cannot be registered."""
    with pytest.raises(InferenceServerException) as caught:
        register(served, "a", handle, nbytes, device)
    assert names(served.client) == []
    return str(caught.value.status()).removeprefix("StatusCode."), str(caught.value.message())


def test_invalid_regions(served: Served) -> None:
    _, handle = served.memory.allocate(64)
    failed = "failed to register CUDA shared memory region 'a': invalid args"
    for case, text in (
        ((handle, 1 << 40), f"{failed}: {1 << 40} bytes, of an allocation of "),
        ((handle, (1 << 64) - 1), f"{failed}: {(1 << 64) - 1} bytes, of an allocation of "),
        ((handle, 0), f"{failed}: 0 bytes, of an allocation of "),
        ((handle[:63],), f"{failed}: raw_handle has 63 bytes; it must be a cudaIpcMemHandle_t, of 64 bytes"),
        ((base64.b64encode(handle),), "raw_handle has 88 bytes"),
        ((b"",), "raw_handle has 0 bytes"),
        ((handle, 64, 99), f"{failed}: device_id is 99; this server has GPU 0"),
        ((handle, 64, -1), f"{failed}: device_id is -1"),
        ((bytes(64),), f"{failed}: cuIpcOpenMemHandle: CUDA_ERROR_"),
    ):
        code, message = refused(served, *case)
        assert (code, text in message) == ("INVALID_ARGUMENT", True), message
    # Each was closed again, so the memory can still be registered.
    register(served, "a", handle)


def test_tritons_own_utilities(served: Served, library: Path) -> None:
    """With the functions of tritonclient that its users call."""
    if library.is_absolute():
        pytest.skip("tritonclient allocates on a real GPU only")
    pytest.importorskip("cuda.bindings", reason="NO cuda-bindings: tritonclient's utilities were not tested")
    import tritonclient.utils.cuda_shared_memory as shm

    source, target = (shm.create_shared_memory_region(name, 64, 0) for name in ("in", "out"))
    try:
        shm.set_shared_memory_region(source, [SIXTEEN])
        served.client.register_cuda_shared_memory("in", shm.get_raw_handle(source), 0, 64)
        served.client.register_cuda_shared_memory("out", shm.get_raw_handle(target), 0, 64)
        served.client.infer("echo-INT32", [given("in", [1, 16], 64)], outputs=[wanted("out", 64)])
        np.testing.assert_array_equal(shm.get_contents_as_numpy(target, np.int32, [1, 16]), SIXTEEN)
    finally:
        served.client.unregister_cuda_shared_memory()
        for handle in (source, target):
            shm.destroy_shared_memory_region(handle)


# The rest needs failures that only the stand-in has.


def failing(handle: bytes, at: int, result: int) -> bytes:
    spoiled = bytearray(handle)
    struct.pack_into("<i", spoiled, at, result)
    return bytes(spoiled)


@pytest.fixture
def scripted(served: Served, library: Path) -> Served:
    if not library.is_absolute():
        pytest.skip("a real GPU does not fail on demand")
    return served


@pytest.mark.parametrize(
    ("result", "code", "text"),
    [
        (INVALID_VALUE, "INVALID_ARGUMENT", "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE, invalid argument"),
        (OUT_OF_MEMORY, "RESOURCE_EXHAUSTED", "cuIpcOpenMemHandle: CUDA_ERROR_OUT_OF_MEMORY, out of memory"),
        (NOT_SUPPORTED, "UNIMPLEMENTED", "let processes share no memory"),
        (ILLEGAL_ADDRESS, "UNAVAILABLE", "the GPU does not work: cuIpcOpenMemHandle: result 700"),
    ],
)
def test_errors_of_opening(scripted: Served, result: int, code: str, text: str) -> None:
    _, handle = scripted.memory.allocate(64)
    got, message = refused(scripted, failing(handle, OPENING, result))
    assert (got, text in message) == (code, True), message


@pytest.mark.parametrize(
    ("result", "code", "text"),
    [
        (INVALID_VALUE, "INVALID_ARGUMENT", "has its memory been freed?"),
        (ILLEGAL_ADDRESS, "UNAVAILABLE", "the GPU does not work"),
    ],
)
def test_errors_of_a_copy(scripted: Served, result: int, code: str, text: str) -> None:
    _, handle = scripted.memory.allocate(64)
    register(scripted, "a", failing(handle, COPYING, result))
    sent = tensor("x", SIXTEEN, "INT32")
    for inputs, outputs, done in (
        ([given("a", [1, 16], 64)], None, "read"),
        ([sent], [wanted("a", 64)], "written to"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            scripted.client.infer("echo-INT32", inputs, outputs=outputs)
        assert caught.value.status() == f"StatusCode.{code}"
        assert f"CUDA shared memory region 'a' cannot be {done}" in str(caught.value.message())
        assert text in str(caught.value.message())
    np.testing.assert_array_equal(scripted.client.infer("echo-INT32", [sent]).as_numpy("y"), SIXTEEN)


def test_a_region_that_cannot_be_closed_is_still_unregistered(scripted: Served) -> None:
    _, handle = scripted.memory.allocate(64)
    register(scripted, "a", failing(handle, CLOSING, INVALID_VALUE))
    scripted.client.unregister_cuda_shared_memory("a")
    assert names(scripted.client) == []


def test_memory_of_another_device(scripted: Served) -> None:
    address, handle = scripted.memory.allocate(64, device=1)
    scripted.memory.put(address, SIXTEEN.tobytes(), device=1)
    code, message = refused(scripted, handle)
    assert (code, "allocated on this device" in message) == ("INVALID_ARGUMENT", True), message
    register(scripted, "a", handle, device=1)
    assert scripted.client.get_cuda_shared_memory_status("a").regions["a"].device_id == 1
    result = scripted.client.infer("echo-INT32", [given("a", [1, 16], 64)])
    np.testing.assert_array_equal(result.as_numpy("y"), SIXTEEN)


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("STAND_IN_GPUS", "0", "the NVIDIA driver finds no GPU"),
        ("STAND_IN_INIT", "2", "the NVIDIA driver does not start: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_a_driver_without_a_gpu(
    stand_in: Path, transport: str, echo_model: Path, variable: str, value: str, reason: str
) -> None:
    variables = {"LD_LIBRARY_PATH": str(stand_in.parent), variable: value}
    options = ("--allow-shared-memory", "--device", "cpu")
    with (
        running(*options, echo_model, transport=transport, variables=variables) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        with pytest.raises(InferenceServerException, match=f"GPUs not supported: {reason}") as caught:
            client.register_cuda_shared_memory("c", base64.b64encode(bytes(64)), 0, 64)
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
        extensions = client.get_server_metadata().extensions
        assert ("system_shared_memory" in extensions, "cuda_shared_memory" in extensions) == (True, False)
        assert not client.get_cuda_shared_memory_status().regions
