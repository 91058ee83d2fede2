"""Calls of a client with memory of a GPU, made in a process of their own, which loads the driver or its stand-in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from client import docstrings
from support.processes.server import running

from tensorferry import client as package
from tensorferry.client import (
    DeviceArray,
    DeviceResult,
    InferenceClient,
    InferenceResult,
    InvalidArgument,
    InvalidInput,
    ResourceExhausted,
    SharedMemory,
    Unimplemented,
)
from tensorferry.protos import inference_pb2 as pb

IMAGES = np.random.default_rng(1).integers(0, 17, (32, 8, 8), np.uint8)


def run(check: Callable[[InferenceClient], None], address: str) -> None:
    """Run one of the functions below with a client, and check that nothing is left."""
    with InferenceClient(address) as client:
        check(client)
    nothing_is_left()
    with InferenceClient(address) as other:
        assert regions(other) == {}


def nothing_is_left() -> None:
    assert allocations() == []
    assert current_context() == 0
    assert [active(device) for device in range(driver("cuDeviceGetCount"))][:1] == [False]


def driver(name: str, *arguments: Any) -> Any:
    """Call a function of the driver."""
    from cuda.bindings import driver

    result, *values = getattr(driver, name)(*arguments)
    assert result == driver.CUresult.CUDA_SUCCESS, f"{name}: {result}"
    return values[0] if len(values) == 1 else values


def allocations(process: int | None = None) -> list[str]:
    """Return the files of the stand-in with memory that a process, this one for None, allocated."""
    files = Path("/dev/shm").glob(f"tensorferry-cuda-{process or os.getpid()}-*")
    return sorted(path.name for path in files)


def current_context() -> int:
    driver("cuInit", 0)
    return int(driver("cuCtxGetCurrent"))


def active(device: int) -> bool:
    """Return whether this process has retained the primary context of the device."""
    _, is_active = driver("cuDevicePrimaryCtxGetState", driver("cuDeviceGet", device))
    return bool(is_active)


def regions(client: InferenceClient) -> dict[str, Any]:
    status = client._endpoints.pick().stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())
    return dict(status.regions)


def shared(client: InferenceClient, rows: int, device: Any = 0) -> SharedMemory[DeviceArray, DeviceResult]:
    return client.shared_memory("digits", rows, device=device)


def variable(name: str, value: str) -> Any:
    """Set a variable that the stand-in reads."""
    return mock.patch.dict(os.environ, {name: value})


# With the stand-in and with a GPU.


def results_are_those_of_arrays(client: InferenceClient) -> None:
    expected = client.infer("digits", {"image": IMAGES})
    with shared(client, 32) as memory:
        image = memory.inputs["image"]
        assert (type(image), image.shape, image.device) == (DeviceArray, (32, 8, 8), 0)
        assert image.dtype == np.uint8
        image.copy_from(IMAGES)
        np.testing.assert_array_equal(image.numpy(), IMAGES)
        result = memory.infer(request_id="a", timeout=30, parameters={"explain": True})
        assert type(result) is DeviceResult
        assert (result.id, result.model_name, result.parameters["batch_rows"]) == ("a", "digits", 32)
        on_host = result.numpy()
        assert type(on_host) is InferenceResult
        assert (on_host.id, on_host.model_version) == ("a", expected.model_version)
        assert set(result) == set(on_host) == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(on_host[name], array)
            assert on_host[name].dtype == result[name].dtype == array.dtype
        # A view, so that its rows are not contiguous.
        image.copy_from(IMAGES[::-1][:3])
        part = memory.infer(rows=3)
        assert repr(part["label"]) == "DeviceArray(int64 [3] on GPU 0)"
        np.testing.assert_array_equal(part["label"].numpy(), expected["label"][::-1][:3])
        np.testing.assert_array_equal(result["label"].numpy()[:3], part["label"].numpy())
        np.testing.assert_array_equal(image.numpy()[3:], IMAGES[3:])
    np.testing.assert_array_equal(on_host["label"], expected["label"])


def the_region_is_registered(client: InferenceClient) -> None:
    with InferenceClient(client._arguments["target"]) as other:
        with shared(client, 4) as memory, shared(client, 2):
            assert active(0)
            first, _ = sorted(regions(other).values(), key=lambda region: -int(region.byte_size))
            assert (first.device_id, first.byte_size) == (0, 4 * 64 + 64 + 4 * 10 * 4)
            assert len(regions(other)) == 2
            assert memory.inputs["image"].shape == (4, 8, 8)
        assert regions(other) == {}


def work_in_the_default_stream_comes_first(client: InferenceClient) -> None:
    """As after a kernel of cupy or torch, whose launch returns before it has run."""
    expected = client.infer("digits", {"image": IMAGES})["label"]
    context = driver("cuDevicePrimaryCtxRetain", driver("cuDeviceGet", 0))
    with shared(client, 32) as memory:
        image = memory.inputs["image"]
        image.copy_from(np.zeros_like(IMAGES))
        address, _ = image.__cuda_array_interface__["data"]
        driver("cuCtxPushCurrent", context)
        try:
            driver("cuMemcpyHtoDAsync", address, IMAGES.ctypes.data, IMAGES.nbytes, 1)
        finally:
            driver("cuCtxPopCurrent")
        np.testing.assert_array_equal(
            memory.infer()["label"].numpy(),
            expected,
        )
    driver("cuDevicePrimaryCtxRelease", driver("cuDeviceGet", 0))


def the_context_of_the_thread_stays(client: InferenceClient) -> None:
    gpu = driver("cuDeviceGet", driver("cuDeviceGetCount") - 1)
    mine = driver("cuDevicePrimaryCtxRetain", gpu)
    driver("cuCtxPushCurrent", mine)
    try:
        with shared(client, 2) as memory:
            assert current_context() == int(mine)
            memory.inputs["image"].copy_from(IMAGES[:2])
            assert current_context() == int(mine)
            memory.infer()["label"].numpy()
            assert current_context() == int(mine)
        assert current_context() == int(mine)
        with pytest.raises(InvalidInput), shared(client, 2, device=99):
            raise AssertionError("created")
        assert current_context() == int(mine)
    finally:
        driver("cuCtxPopCurrent")
        driver("cuDevicePrimaryCtxRelease", gpu)


def arrays_end_with_the_statement(client: InferenceClient) -> None:
    with shared(client, 2) as memory:
        image = memory.inputs["image"]
        result = memory.infer()
    assert image.shape == (2, 8, 8)
    for use in (
        image.numpy,
        result.numpy,
        lambda: image.copy_from(IMAGES[:2]),
        lambda: image.copy_from(IMAGES[:0]),
        lambda: image.__cuda_array_interface__,
    ):
        with pytest.raises(RuntimeError, match="freed at the end of its `with` statement"):
            use()
    with pytest.raises(RuntimeError, match="exists only inside its `with` statement"):
        _ = memory.inputs


def wrong_arrays_are_refused(client: InferenceClient) -> None:
    with shared(client, 2) as memory:
        image = memory.inputs["image"]
        image.copy_from(IMAGES[:0])
        wrong: Any
        for wrong, text in (
            (IMAGES[:2].astype(np.int8), "got int8 [2, 8, 8]: use array.astype('uint8')"),
            (IMAGES[:3], "expects uint8 [2, 8, 8] or fewer rows, got uint8 [3, 8, 8]: give another array"),
            (IMAGES[:2, :4], "got uint8 [2, 4, 8]: give another array"),
            (IMAGES[0, 0, 0:1], "got uint8 [1]: give another array"),
            (np.array(1, np.uint8), "got uint8 []: give another array"),
            ([1], "copy_from of tensor 'image' expects a numpy array, got [1] of type list"),
            (image, "copy_from of tensor 'image' expects a numpy array, got DeviceArray("),
        ):
            with pytest.raises(InvalidInput) as caught:
                image.copy_from(wrong)
            assert text in str(caught.value), caught.value
        with pytest.raises(TypeError, match=r"call its numpy\(\) for a copy"):
            np.asarray(image)


def wrong_devices_are_refused(client: InferenceClient) -> None:
    count = driver("cuDeviceGetCount")
    for device in (-1, count, "0", True, 1.0):
        with (
            pytest.raises(InvalidInput, match=f"device expects an int from 0 to {count - 1}, got "),
            shared(client, 2, device=device),
        ):
            raise AssertionError("created")


def a_server_without_shared_memory_refuses(client: InferenceClient) -> None:
    with pytest.raises(Unimplemented, match="no shared memory"), shared(client, 2):
        raise AssertionError("registered")


def a_closed_client_frees_the_memory(client: InferenceClient) -> None:
    with InferenceClient(client._arguments["target"]) as other:
        with shared(client, 2):
            [name] = regions(other)
            client.close()
        stub = other._endpoints.pick().stub
        stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name=name))


def a_server_that_is_gone(*arguments: str) -> None:
    """A server of its own ends while the memory is in use."""
    with (
        running(*arguments, transport="lane") as server,
        InferenceClient(server.address, retry=None) as client,
        shared(client, 2) as memory,
    ):
        memory.inputs["image"].copy_from(IMAGES[:2])
        memory.infer()
        server.stop()
    nothing_is_left()


# With the stand-in only.


def the_interface_of_other_libraries(client: InferenceClient) -> None:
    """numpy can use the stand-in's memory as other libraries use that of a GPU."""

    def view(array: DeviceArray) -> Any:
        interface = array.__cuda_array_interface__
        assert (interface["version"], interface["stream"], interface["strides"]) == (3, None, None)
        assert interface["data"][1] is False
        return np.asarray(SimpleNamespace(__array_interface__={**interface, "version": 3}))

    expected = client.infer("digits", {"image": IMAGES})
    with shared(client, 32) as memory:
        view(memory.inputs["image"])[...] = IMAGES
        result = memory.infer()
        for name, array in expected.items():
            seen = view(result[name])
            assert (seen.shape, seen.dtype) == (array.shape, array.dtype)
            np.testing.assert_array_equal(seen, array)


def memory_that_is_not_used(client: InferenceClient) -> None:
    with shared(client, 2):
        pass


def a_gpu_that_the_server_lacks(client: InferenceClient) -> None:
    with (
        pytest.raises(InvalidArgument, match="device_id is 1; this server has GPU 0 only"),
        shared(client, 2, device=1),
    ):
        raise AssertionError("registered")
    assert not active(1)


def memory_that_cannot_be_had(client: InferenceClient) -> None:
    with (
        pytest.raises(
            OSError,
            match=r"cuMemAlloc failed for \d+ bytes of .* GPU 0: CUDA_ERROR_OUT_OF_MEMORY, out of memory",
        ),
        shared(client, 1 << 24),
    ):
        raise AssertionError("created")
    exported = pytest.raises(
        OSError, match=r"cuIpcGetMemHandle failed for .* CUDA_ERROR_INVALID_VALUE, invalid"
    )
    with variable("STAND_IN_EXPORT", "1"), exported, shared(client, 2):
        raise AssertionError("created")
    opened = pytest.raises(ResourceExhausted, match="cuIpcOpenMemHandle: CUDA_ERROR_OUT_OF_MEMORY")
    with variable("STAND_IN_OPEN", "2"), opened, shared(client, 2):
        raise AssertionError("registered")


def a_driver_without_a_gpu(client: InferenceClient) -> None:
    for name, value, text in (
        ("STAND_IN_GPUS", "0", "the NVIDIA driver finds no GPU"),
        ("STAND_IN_INIT", "100", "cuInit failed for .*: CUDA_ERROR_NO_DEVICE"),
    ):
        with variable(name, value), pytest.raises(OSError, match=text), shared(client, 2):
            raise AssertionError("created")


def run_examples(name: str, address: str) -> None:
    """Run the examples in a docstring."""
    names = {one: getattr(package, one) for one in package.__all__}
    with InferenceClient(address) as client:
        variables = {**names, "np": np, "client": client}
        asyncio.run(docstrings.run(dict(docstrings.public_objects())[name], variables, address))


WITH_A_GPU = [
    results_are_those_of_arrays, the_region_is_registered, work_in_the_default_stream_comes_first,
    the_context_of_the_thread_stays, arrays_end_with_the_statement,
    wrong_arrays_are_refused, wrong_devices_are_refused, a_closed_client_frees_the_memory,
]  # fmt: skip
WITH_THE_STAND_IN = [
    the_interface_of_other_libraries, a_gpu_that_the_server_lacks, memory_that_cannot_be_had, a_driver_without_a_gpu,
]  # fmt: skip
