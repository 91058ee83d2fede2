"""Regions of GPU memory, with a scripted driver, beside regions of system memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.server.cuda_driver import ScriptedDriver
from support.server.regions import extension, input_in, names

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    LimitError,
    NotFoundError,
    NotReadyError,
    ServerError,
    UnsupportedError,
)
from tensorferry.server.methods.shared_memory import SharedMemoryMethods
from tensorferry.server.shared_memory import cuda_driver
from tensorferry.server.shared_memory.cuda import CudaSharedMemory
from tensorferry.server.shared_memory.regions import RegionLease, Regions
from tensorferry.server.shared_memory.system import SystemSharedMemory

HANDLE = bytes(64)


@pytest.fixture
def driver() -> ScriptedDriver:
    return ScriptedDriver()


@pytest.fixture
def both(driver: ScriptedDriver, regions: Regions, tmp_path: Path) -> Regions:
    """Regions of system memory and of CUDA memory."""
    return Regions(allowed=True, directory=tmp_path, cuda=driver)


def test_regions_of_both_types_are_read_and_written(both: Regions, driver: ScriptedDriver) -> None:
    both.register_system("system", "key", 0, 64)
    both.register_cuda("device", HANDLE, 1, 64)
    for name in ("system", "device"):
        span = RegionLease(both).span(input_in(name, 4, 10))
        assert span is not None
        assert span.read() == bytes([10, 11, 12, 13])
        span.write(memoryview(b"new"))
        assert span.read() == b"new\x0d"
    assert driver.content[10:14] == b"new\x0d"


def test_a_name_is_unique_among_both_types(both: Regions, driver: ScriptedDriver) -> None:
    both.register_cuda("c", HANDLE, 0, 64)
    both.register_system("s", "key", 0, 64)
    with pytest.raises(AlreadyExistsError):
        both.register_system("c", "key", 0, 64)
    with pytest.raises(AlreadyExistsError):
        both.register_cuda("s", HANDLE, 0, 64)
    assert driver.opened == 1


def test_a_region_whose_name_is_taken_meanwhile_is_closed(both: Regions, driver: ScriptedDriver) -> None:
    driver.meanwhile = lambda: both.register_system("r", "key", 0, 8)
    with pytest.raises(AlreadyExistsError):
        both.register_cuda("r", HANDLE, 0, 64)
    assert driver.opened == 0


@pytest.mark.parametrize("nbytes", [0, 65])
def test_device_memory_that_is_too_small_is_closed(
    both: Regions, driver: ScriptedDriver, nbytes: int
) -> None:
    with pytest.raises(InvalidRequestError, match=f"{nbytes} bytes, of an allocation of 64 bytes"):
        both.register_cuda("r", HANDLE, 0, nbytes)
    assert (driver.opened, names(both)) == (0, [])


def test_device_memory_is_closed_after_its_last_use(both: Regions, driver: ScriptedDriver) -> None:
    both.register_cuda("r", HANDLE, 0, 64)
    lease = RegionLease(both)
    lease.span(input_in(nbytes=1))
    both.unregister("r", SystemSharedMemory)
    lease.release()
    assert (driver.opened, names(both)) == (1, ["r"])
    lease.span(input_in(nbytes=1))
    both.unregister("r", CudaSharedMemory)
    assert (driver.opened, names(both)) == (1, ["r"])
    lease.release()
    assert (driver.opened, names(both)) == (0, [])


def test_all_regions_are_closed_at_the_end(both: Regions, driver: ScriptedDriver) -> None:
    both.register_cuda("c", HANDLE, 0, 64)
    both.register_system("s", "key", 0, 64)
    both.close()
    assert (driver.opened, names(both)) == (0, [])


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (1, InvalidRequestError),
        (101, InvalidRequestError),
        (201, InvalidRequestError),
        (2, LimitError),
        (711, LimitError),
        (801, UnsupportedError),
        (304, UnsupportedError),
        (700, NotReadyError),
        (999, NotReadyError),
    ],
)
def test_each_result_of_the_driver_is_an_error_of_its_class(
    both: Regions, driver: ScriptedDriver, result: int, kind: type[ServerError]
) -> None:
    driver.fails = result
    with pytest.raises(
        kind, match=r"failed to register CUDA shared memory region 'r': .*cuIpcOpenMemHandle: scripted"
    ):
        both.register_cuda("r", HANDLE, 0, 64)
    driver.fails = 0
    both.register_cuda("r", HANDLE, 0, 64)


def test_the_methods_of_both_types(both: Regions) -> None:
    methods = extension(both)
    both.register_system("s", "key", 0, 8)
    methods["CudaSharedMemoryRegister"](
        pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=HANDLE, device_id=1, byte_size=16)
    )
    for name in ("", "c"):
        status = methods["CudaSharedMemoryStatus"](pb.CudaSharedMemoryStatusRequest(name=name))
        assert list(status.regions) == ["c"]
        region = status.regions["c"]
        assert (region.name, region.device_id, region.byte_size) == ("c", 1, 16)
    for method, name, message in (
        ("Cuda", "other", "Unable to find cuda shared memory region: 'other'"),
        ("Cuda", "s", "The region named 's' is registered as system shared memory, not CUDA shared memory"),
        ("System", "c", "The region named 'c' is registered as CUDA shared memory, not system shared memory"),
    ):
        request = getattr(pb, f"{method}SharedMemoryStatusRequest")(name=name)
        with pytest.raises(NotFoundError, match=message):
            methods[f"{method}SharedMemoryStatus"](request)
    assert SharedMemoryMethods(both).names == ("system_shared_memory", "cuda_shared_memory")
    methods["CudaSharedMemoryUnregister"](pb.CudaSharedMemoryUnregisterRequest())
    assert names(both) == ["s"]


def test_without_cuda(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda-nowhere.so.1")
    with pytest.raises(
        UnsupportedError,
        match=r"CUDA shared memory region: 'c', GPUs not supported: .* libcuda-nowhere.so.1, is not here",
    ):
        regions.register_cuda("c", HANDLE, 0, 64)
    assert SharedMemoryMethods(regions).names == ("system_shared_memory",)
    methods = extension(regions)
    assert not methods["CudaSharedMemoryStatus"](pb.CudaSharedMemoryStatusRequest()).regions
    methods["CudaSharedMemoryUnregister"](pb.CudaSharedMemoryUnregisterRequest())
