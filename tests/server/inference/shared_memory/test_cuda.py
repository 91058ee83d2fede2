"""Regions of GPU memory, with a scripted driver, beside regions of system memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.server.cuda_driver import ScriptedDriver
from support.server.regions import input_in, names

from tensorferry.server.errors import AlreadyExistsError, InvalidRequestError
from tensorferry.server.inference.shared_memory.regions import RegionLease, Regions

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
