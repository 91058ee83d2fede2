"""Regions of shared memory: which files they may be, what fits in them, and when they are closed.

Regions of GPU memory, with a scripted driver, are beside those of system memory.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from support.open_files import open_files
from support.server.cuda_driver import ScriptedDriver
from support.server.regions import input_in, names

from tensorferry.server.errors import AlreadyExistsError, InvalidRequestError, LimitError, NotFoundError
from tensorferry.server.inference.shared_memory.regions import RegionLease, Regions, Span
from tensorferry.server.inference.shared_memory.system import SystemSharedMemory


def is_open(path: Path) -> bool:
    file = path.stat().st_ino
    return any(identity == f"{path} {file}" for _, identity in open_files())


def span_of(regions: Regions, **place: int) -> Span:
    """The place of a tensor in the region `r`."""
    span = RegionLease(regions).span(input_in(**place))
    assert span is not None
    return span


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "cannot register shared memory region 'r' - invalid shm key ''"),
        (".", "invalid shm key '.'"),
        ("..", "invalid shm key '..'"),
        ("../outside", "invalid shm key '../outside'"),
        ("directory/inside", "invalid shm key 'directory/inside'"),
        ("key/", "invalid shm key 'key/'"),
        ("nul\0", "invalid shm key 'nul\\x00'"),
        ("x" * 256, "of at most 255 bytes"),
    ],
)
def test_a_key_that_does_not_name_one_file_is_refused(regions: Regions, key: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        regions.register_system("r", key, 0, 8)
    assert message in str(caught.value)
    assert names(regions) == []


def test_a_key_leads_to_regular_files_only(regions: Regions, tmp_path: Path) -> None:
    outside = tmp_path.parent / "outside"
    outside.write_bytes(bytes(64))
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = open_files()
    for key in ("link", "directory", "pipe", "missing"):
        with pytest.raises(NotFoundError, match=f"Unable to open shared memory region: '{key}'"):
            regions.register_system("r", key, 0, 8)
    assert not open_files() - before


@pytest.mark.parametrize("name", ["", "x" * 1025])
def test_an_empty_or_too_long_name_is_refused(regions: Regions, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"with a name of {len(name)} characters"):
        regions.register_system(name, "key", 0, 8)


def test_regions_leave_files_for_connections(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4, 4))
    for name in "ab":
        regions.register_system(name, "key", 0, 8)
    with pytest.raises(LimitError, match=r"^2 shared memory regions are registered, which is the most"):
        regions.register_system("c", "key", 0, 8)


def test_an_unregistered_region_is_closed_after_its_last_use(regions: Regions, tmp_path: Path) -> None:
    regions.register_system("r", "key", 0, 8)
    regions.register_system("idle", "key", 0, 8)
    first, second = RegionLease(regions), RegionLease(regions)
    first.span(input_in(nbytes=1))
    first.span(input_in(nbytes=1))
    span = second.span(input_in(nbytes=1))
    regions.unregister("", SystemSharedMemory)
    assert names(regions) == ["r"]
    first.release()
    first.release()
    assert span is not None
    assert span.read() == b"\0"
    # Until then its name is taken, as in Triton.
    with pytest.raises(AlreadyExistsError):
        regions.register_system("r", "key", 0, 8)
    assert names(regions) == ["r"]
    second.release()
    assert names(regions) == []
    assert not is_open(tmp_path / "key")
    regions.register_system("r", "key", 0, 8)


def test_no_further_request_gets_an_unregistered_region(regions: Regions) -> None:
    regions.register_system("r", "key", 0, 8)
    before, after = RegionLease(regions), RegionLease(regions)
    before.span(input_in(nbytes=1))
    regions.unregister("r", SystemSharedMemory)
    with pytest.raises(
        NotFoundError, match=r"^Unable to find shared memory region: 'r', which is unregistered"
    ):
        after.span(input_in(nbytes=1))
    after.release()
    before.release()
    assert names(regions) == []


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (input_in(offset=-1), "Invalid offset for shared memory region: 'r'"),
        (input_in(None, None, 8), "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor 'x'"),
        (input_in(None), "'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter for tensor 'x'"),
        (input_in({"int64_param": 1}), "invalid value type for 'shared_memory_region' parameter for tensor 'x', expected string_param"),
        (input_in(nbytes={"uint64_param": 1}), "invalid value type for 'shared_memory_byte_size' parameter for tensor 'x', expected int64_param"),
        (input_in(offset={"string_param": "1"}), "invalid value type for 'shared_memory_offset' parameter for tensor 'x', expected int64_param"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_wrong_places_are_refused(regions: Regions, tensor: Any, message: str) -> None:
    regions.register_system("r", "key", 0, 64)
    with pytest.raises(InvalidRequestError) as caught:
        RegionLease(regions).span(tensor)
    assert message in str(caught.value)


def test_a_failed_write_is_an_error(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    regions.register_system("r", "key", 0, 64)
    span = span_of(regions)

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(LimitError, match="region 'r' cannot be written to: No space left on device"):
        span.write(memoryview(b"x"))


def test_a_process_that_can_open_no_more_files_is_at_a_limit(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(LimitError, match="Unable to open shared memory region: 'key': Too many open files"):
        regions.register_system("r", "key", 0, 64)


def test_short_reads_and_writes_are_continued(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    regions.register_system("r", "key", 0, 64)
    span = span_of(regions, nbytes=10)
    pread, pwrite = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda file, n, at: pread(file, min(n, 3), at))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:3], at))
    assert span.read() == bytes(range(10))
    span.write(memoryview(b"0123456789"))
    assert span.read() == b"0123456789"


HANDLE = bytes(64)


@pytest.fixture
def driver() -> ScriptedDriver:
    return ScriptedDriver()


@pytest.fixture
def both(driver: ScriptedDriver, regions: Regions, tmp_path: Path) -> Regions:
    """Regions of system memory and of CUDA memory."""
    return Regions(allowed=True, directory=tmp_path, cuda=driver)


@pytest.mark.parametrize("key", ["key", "/key", "///key"])
def test_regions_of_both_types_are_read_and_written(both: Regions, driver: ScriptedDriver, key: str) -> None:
    both.register_system("system", key, 8, 32)
    both.register_cuda("device", HANDLE, 1, 64)
    for name, offset in (("system", 2), ("device", 10)):
        span = RegionLease(both).span(input_in(name, 4, offset))
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
