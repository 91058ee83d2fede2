"""Files of a link: seals, the header, ownership of descriptors."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.open_files import open_files
from support.server.link_pair import NO_ROOM, pair

from tensorferry.server.link import EngineLink, FrontEndLink, LinkError, LinkFiles, create_link
from tensorferry.server.link.layout import ALIGNMENT, HEADER, layout_of

SIDES: list[Callable[[LinkFiles], object]] = [FrontEndLink, lambda files: EngineLink(files, no_room=NO_ROOM)]


def test_no_process_can_shrink_or_grow_the_memory() -> None:
    files = create_link(1)
    size = os.fstat(files.memory).st_size
    for length in (0, size - 4096, size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(files.memory, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(files.memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    files.close()


def test_memory_is_sparse() -> None:
    files = create_link()
    status = os.fstat(files.memory)
    assert status.st_size > 512 << 20
    assert status.st_blocks * 512 <= 64 << 10
    files.close()


def test_regions_are_rounded_up() -> None:
    files = create_link(1, 1, ALIGNMENT + 1)
    assert os.fstat(files.memory).st_size == layout_of(1, ALIGNMENT, 2 * ALIGNMENT).size
    files.close()


def test_descriptors_are_not_inherited() -> None:
    files = create_link(1)
    assert not any(os.get_inheritable(file) for file in files)
    files.close()


@pytest.mark.parametrize(
    ("slots", "request_bytes", "response_bytes"),
    [(0, 0, 0), (-1, 0, 0), ((1 << 20) + 1, 0, 0), (1, -1 << 20, 0), (1, 0, 1 << 36)],
)
def test_sizes_out_of_range_are_refused(slots: int, request_bytes: int, response_bytes: int) -> None:
    before = open_files()
    with pytest.raises(ValueError, match=r"link has|region of extents"):
        create_link(slots, request_bytes, response_bytes)
    assert not open_files() - before


def test_parts_of_the_layout_do_not_overlap() -> None:
    for slots in (1, 7, 4096):
        layout = layout_of(slots, 1 << 20, 2 << 20)
        offsets = layout[3:]
        assert list(offsets) == sorted(offsets)
        assert layout.responses - layout.requests >= slots * 4096
        assert layout.request_extents - layout.responses >= slots * 4096
        assert layout.request_extents % ALIGNMENT == layout.response_extents % ALIGNMENT == 0


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("header", "why"),
    [
        ((b"ABCDEFGH", 1, 4, 0, 0), "not the memory of a link"),
        ((b"TFLINK\r\n", 2, 4, 0, 0), "version 2"),
        ((b"TFLINK\r\n", 1, 0, 0, 0), "slots"),
        ((b"TFLINK\r\n", 1, 1 << 30, 0, 0), "slots"),
        ((b"TFLINK\r\n", 1, 4, 100, 0), "multiple"),
        ((b"TFLINK\r\n", 1, 4, 0, 1 << 60), "at most"),
        ((b"TFLINK\r\n", 1, 64, ALIGNMENT, 0), "its header says"),
        ((b"TFLINK\r\n", 1, 4, 0, 0), "its header says"),
    ],
)
def test_a_wrong_header_is_refused(
    side: Callable[[LinkFiles], object], header: tuple[object, ...], why: str
) -> None:
    before = open_files()
    files = create_link(64, 0, 0)
    os.pwrite(files.memory, HEADER.pack(*header), 0)
    with pytest.raises(LinkError, match=why) as raised:
        side(files)
    del raised
    assert not open_files() - before, "the descriptors were taken over"


@pytest.mark.parametrize("side", SIDES)
def test_other_files_are_refused(side: Callable[[LinkFiles], object], tmp_path: Path) -> None:
    with create_files(os.memfd_create("unsealed")) as files, pytest.raises(LinkError, match="not sealed"):
        side(files)
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with create_files(os.open(path, os.O_RDWR)) as files, pytest.raises(LinkError, match="not the memory"):
        side(files)
    memory = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with create_files(memory) as files, pytest.raises(LinkError, match="only 0 bytes"):
        side(files)


class create_files:  # noqa: N801
    """A context with a link's eventfds and some other memory, whose descriptors a side takes over."""

    def __init__(self, memory: int) -> None:
        self._memory = memory

    def __enter__(self) -> LinkFiles:
        good = create_link(1, 0, 0)
        os.close(good.memory)
        return good._replace(memory=self._memory)

    def __exit__(self, *_: object) -> None:
        pass


def test_nothing_is_left_behind() -> None:
    before, memory = open_files(), set()
    for _ in range(3):
        with pair() as both:
            memory.add(os.fstat(both.files.memory).st_ino)
            both.round_trip(b"m" * 10_000, b"r" * 10_000)
    del both
    assert not open_files() - before
    assert not [name for name in os.listdir("/dev/shm") if "tensorferry-link" in name]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert not [line for line in maps if "memfd:tensorferry-link" in line[-1] and int(line[4]) in memory]


def test_memory_is_shared_by_both_sides() -> None:
    with pair() as both, mmap.mmap(both.files.memory, os.fstat(both.files.memory).st_size) as third:
        both.front_end.submit(b"find this message")
        assert third.find(b"find this message") > 0
