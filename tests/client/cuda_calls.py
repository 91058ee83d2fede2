"""Calls of a client with memory of a GPU, made in a process of their own, which loads the driver or its stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from client import docstrings, either
from client.either import Client, call, close
from support.processes.server import running

from tensorferry import client as package
from tensorferry.client import (
    DeviceArray,
    DeviceResult,
    InferenceClient,
    InferenceError,
    InferenceResult,
    InvalidArgument,
    InvalidInput,
    ResourceExhausted,
    Unimplemented,
    aio,
)
from tensorferry.protos import inference_pb2 as pb

IMAGES = np.random.default_rng(1).integers(0, 17, (32, 8, 8), np.uint8)
KINDS: dict[str, type[Any]] = {"threads": InferenceClient, "asyncio": aio.InferenceClient}


def run(check: Callable[[Client], Awaitable[None]], kind: str, address: str) -> None:
    """Run one of the functions below with a client, and check that nothing is left."""

    async def checked() -> None:
        client = KINDS[kind](address)
        try:
            await check(client)
        finally:
            await close(client)

    asyncio.run(checked())
    assert allocations() == []
    assert current_context() == 0
    assert [active(device) for device in range(driver("cuDeviceGetCount"))][:1] == [False]
    with InferenceClient(address) as other:
        assert regions(other) == {}


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


def shared(client: Client, rows: int, **options: Any) -> AbstractAsyncContextManager[Any]:
    """Enter the memory of either client, on GPU 0 unless the options name another one."""
    return either.shared(client, "digits", rows, **{"device": 0, **options})


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set a variable that the stand-in reads."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


# With the stand-in and with a GPU.


async def results_are_those_of_arrays(client: Client) -> None:
    expected = await call(client, "infer", "digits", {"image": IMAGES})
    async with shared(client, 32) as memory:
        image = memory.inputs["image"]
        assert (type(image), image.shape, image.dtype, image.device) == (DeviceArray, (32, 8, 8), np.uint8, 0)
        image.copy_from(IMAGES)
        np.testing.assert_array_equal(image.numpy(), IMAGES)
        result = await call(memory, "infer", request_id="a", timeout=30, parameters={"explain": True})
        assert type(result) is DeviceResult
        assert set(result) == set(expected)
        assert len(result) == len(expected)
        for name, array in expected.items():
            copied = result[name].numpy()
            np.testing.assert_array_equal(copied, array)
            assert copied.dtype == result[name].dtype == array.dtype
        assert (result.id, result.model_name, result.parameters["batch_rows"]) == ("a", "digits", 32)
        on_host = result.numpy()
        assert type(on_host) is InferenceResult
        assert (on_host.id, on_host.model_version) == ("a", expected.model_version)
        np.testing.assert_array_equal(on_host["label"], expected["label"])
        # A view, so that its rows are not contiguous.
        image.copy_from(IMAGES[::-1][:3])
        part = await call(memory, "infer", rows=3)
        assert repr(part["label"]) == "DeviceArray(int64 [3] on GPU 0)"
        np.testing.assert_array_equal(part["label"].numpy(), expected["label"][::-1][:3])
        # A GPU may compute three rows by another kernel than 32.
        np.testing.assert_allclose(
            part["probabilities"].numpy(), expected["probabilities"][::-1][:3], atol=1e-3
        )
        np.testing.assert_array_equal(result["label"].numpy()[:3], part["label"].numpy())
        np.testing.assert_array_equal(image.numpy()[3:], IMAGES[3:])
    np.testing.assert_array_equal(on_host["label"], expected["label"])


async def the_region_is_registered(client: Client) -> None:
    with InferenceClient(client._arguments["target"]) as other:
        async with shared(client, 4) as memory, shared(client, 2):
            assert active(0)
            first, _ = sorted(regions(other).values(), key=lambda region: -int(region.byte_size))
            assert (first.device_id, first.byte_size) == (0, 4 * 64 + 64 + 4 * 10 * 4)
            assert len(regions(other)) == 2
            assert memory.inputs["image"].shape == (4, 8, 8)
        assert regions(other) == {}


async def work_in_the_default_stream_comes_first(client: Client) -> None:
    """As after a kernel of cupy or torch, whose launch returns before it has run."""
    expected = (await call(client, "infer", "digits", {"image": IMAGES}))["label"]
    context = driver("cuDevicePrimaryCtxRetain", driver("cuDeviceGet", 0))
    async with shared(client, 32) as memory:
        image = memory.inputs["image"]
        image.copy_from(np.zeros_like(IMAGES))
        address, _ = image.__cuda_array_interface__["data"]
        driver("cuCtxPushCurrent", context)
        try:
            driver("cuMemcpyHtoDAsync", address, IMAGES.ctypes.data, IMAGES.nbytes, 1)
        finally:
            driver("cuCtxPopCurrent")
        np.testing.assert_array_equal(
            (await call(memory, "infer"))["label"].numpy(),
            expected,
        )
    driver("cuDevicePrimaryCtxRelease", driver("cuDeviceGet", 0))


async def the_context_of_the_thread_stays(client: Client) -> None:
    gpu = driver("cuDeviceGet", driver("cuDeviceGetCount") - 1)
    mine = driver("cuDevicePrimaryCtxRetain", gpu)
    driver("cuCtxPushCurrent", mine)
    try:
        async with shared(client, 2) as memory:
            assert current_context() == int(mine)
            memory.inputs["image"].copy_from(IMAGES[:2])
            assert current_context() == int(mine)
            (await call(memory, "infer"))["label"].numpy()
            assert current_context() == int(mine)
        assert current_context() == int(mine)
        with pytest.raises(InvalidInput):
            async with shared(client, 2, device=99):
                raise AssertionError("created")
        assert current_context() == int(mine)
    finally:
        driver("cuCtxPopCurrent")
        driver("cuDevicePrimaryCtxRelease", gpu)


async def arrays_end_with_the_statement(client: Client) -> None:
    async with shared(client, 2) as memory:
        image = memory.inputs["image"]
        result = await call(memory, "infer")
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


async def a_failed_call_leaves_nothing(client: Client) -> None:
    with pytest.raises(RuntimeError, match="mine"):
        async with shared(client, 2):
            raise RuntimeError("mine")
    with pytest.raises(InvalidInput, match="rows expects an int from 1 to 2, got 3"):
        async with shared(client, 2) as memory:
            await call(memory, "infer", rows=3)
    with pytest.raises(InferenceError):
        async with shared(client, 2) as memory:
            await call(memory, "infer", timeout=1e-6)


async def wrong_arrays_are_refused(client: Client) -> None:
    async with shared(client, 2) as memory:
        image = memory.inputs["image"]
        image.copy_from(IMAGES[:0])
        for array, text in (
            (IMAGES[:2].astype(np.int8), "got int8 [2, 8, 8]: use array.astype('uint8')"),
            (IMAGES[:3], "expects uint8 [2, 8, 8] or fewer rows, got uint8 [3, 8, 8]: give another array"),
            (IMAGES[:2, :4], "got uint8 [2, 4, 8]: give another array"),
            (IMAGES[0, 0, 0:1], "got uint8 [1]: give another array"),
            (np.array(1, np.uint8), "got uint8 []: give another array"),
            ([1], "copy_from of tensor 'image' expects a numpy array, got [1] of type list"),
            (image, "copy_from of tensor 'image' expects a numpy array, got DeviceArray("),
        ):
            with pytest.raises(InvalidInput) as caught:
                image.copy_from(array)
            assert text in str(caught.value), caught.value
        with pytest.raises(TypeError, match=r"call its numpy\(\) for a copy"):
            np.asarray(image)


async def wrong_devices_are_refused(client: Client) -> None:
    count = driver("cuDeviceGetCount")
    for device in (-1, count, "0", True, 1.0):
        with pytest.raises(InvalidInput, match=f"device expects an int from 0 to {count - 1}, got "):
            async with shared(client, 2, device=device):
                raise AssertionError("created")


async def a_server_without_shared_memory_refuses(client: Client) -> None:
    with pytest.raises(Unimplemented, match="--allow-shared-memory"):
        async with shared(client, 2):
            raise AssertionError("registered")


async def a_closed_client_frees_the_memory(client: Client) -> None:
    with InferenceClient(client._arguments["target"]) as other:
        async with shared(client, 2):
            [name] = regions(other)
            await close(client)
        stub = other._endpoints.pick().stub
        stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name=name))


def a_server_that_is_gone(kind: str, *arguments: str) -> None:
    """A server of its own ends while the memory is in use."""

    async def checked() -> None:
        with running(*arguments, transport="lane") as server:
            client = KINDS[kind](server.address, retry=None)
            async with shared(client, 2) as memory:
                memory.inputs["image"].copy_from(IMAGES[:2])
                await call(memory, "infer")
                server.stop()
            await close(client)

    asyncio.run(checked())
    assert allocations() == []
    assert current_context() == 0
    assert not active(0)


# With the stand-in only.


async def the_interface_of_other_libraries(client: Client) -> None:
    """numpy can use the stand-in's memory as other libraries use that of a GPU."""

    def view(array: DeviceArray) -> Any:
        interface = array.__cuda_array_interface__
        assert (interface["version"], interface["stream"], interface["strides"]) == (3, None, None)
        assert interface["data"][1] is False
        return np.asarray(SimpleNamespace(__array_interface__={**interface, "version": 3}))

    expected = await call(client, "infer", "digits", {"image": IMAGES})
    async with shared(client, 32) as memory:
        view(memory.inputs["image"])[...] = IMAGES
        result = await call(memory, "infer")
        for name, array in expected.items():
            seen = view(result[name])
            assert (seen.shape, seen.dtype) == (array.shape, array.dtype)
            np.testing.assert_array_equal(seen, array)


async def memory_that_is_not_used(client: Client) -> None:
    async with shared(client, 2):
        pass


async def a_gpu_that_the_server_lacks(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="device_id is 1; this server has GPU 0 only"):
        async with shared(client, 2, device=1):
            raise AssertionError("registered")
    assert not active(1)


async def memory_that_cannot_be_had(client: Client) -> None:
    with pytest.raises(
        OSError, match=r"cuMemAlloc failed for \d+ bytes of .* GPU 0: CUDA_ERROR_OUT_OF_MEMORY, out of memory"
    ):
        async with shared(client, 1 << 24):
            raise AssertionError("created")
    exported = pytest.raises(
        OSError, match=r"cuIpcGetMemHandle failed for .* CUDA_ERROR_INVALID_VALUE, invalid"
    )
    with variable("STAND_IN_EXPORT", "1"), exported:
        async with shared(client, 2):
            raise AssertionError("created")
    opened = pytest.raises(ResourceExhausted, match="cuIpcOpenMemHandle: CUDA_ERROR_OUT_OF_MEMORY")
    with variable("STAND_IN_OPEN", "2"), opened:
        async with shared(client, 2):
            raise AssertionError("registered")


async def a_driver_without_a_gpu(client: Client) -> None:
    for name, value, text in (
        ("STAND_IN_GPUS", "0", "the NVIDIA driver finds no GPU"),
        ("STAND_IN_INIT", "100", "cuInit failed for .*: CUDA_ERROR_NO_DEVICE"),
    ):
        with variable(name, value), pytest.raises(OSError, match=text):
            async with shared(client, 2):
                raise AssertionError("created")


def run_examples(name: str, address: str) -> None:
    """Run the examples in a docstring."""
    names = {one: getattr(package, one) for one in package.__all__}
    with InferenceClient(address) as client:
        variables = {**names, "np": np, "client": client}
        asyncio.run(docstrings.run(dict(docstrings.public_objects())[name], variables, address))
