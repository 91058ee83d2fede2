"""Allocator of extents."""

from __future__ import annotations

from random import Random

from tensorferry.server.link.extents import ExtentAllocator

MIB = 1 << 20


class Rig:
    """An allocator, and what it gave back."""

    def __init__(self, size: int, keep: int = 0) -> None:
        self.given_back: list[tuple[int, int]] = []
        self.extents = ExtentAllocator(
            size, keep, lambda offset, size: self.given_back.append((offset, size))
        )


def test_first_fit() -> None:
    extents = Rig(MIB).extents
    assert [extents.allocate(5000) for _ in range(3)] == [0, 8192, 16384]
    extents.free(0, 5000)
    extents.free(8192, 5000)
    assert extents.allocate(16384) == 0, "two holes have become one"
    assert extents.allocate(1) == 24576


def test_a_hole_joins_those_before_and_after() -> None:
    extents = Rig(3 * 4096).extents
    for offset in (0, 4096, 8192):
        assert extents.allocate(4096) == offset
    assert extents.allocate(1) is None
    for offset in (0, 8192, 4096):
        extents.free(offset, 4096)
    assert extents.allocate(3 * 4096) == 0


def test_no_hole_is_large_enough() -> None:
    extents = Rig(MIB).extents
    assert extents.allocate(MIB + 1) is None
    assert extents.allocate(MIB) == 0
    assert extents.allocate(1) is None
    assert Rig(0).extents.allocate(1) is None


def test_memory_above_what_is_kept_is_given_back() -> None:
    rig = Rig(64 * MIB, keep=2 * MIB)
    offsets = [rig.extents.allocate(MIB) for _ in range(8)]
    assert offsets == [index * MIB for index in range(8)]
    rig.extents.free(7 * MIB, MIB)
    rig.extents.free(6 * MIB, MIB)
    assert rig.given_back == []
    rig.extents.free(5 * MIB, MIB)
    assert rig.given_back == [(7 * MIB, MIB)]
    rig.extents.free(3 * MIB, MIB)
    assert rig.given_back == [(7 * MIB, MIB)], "a hole below an extent in use stays"
    rig.extents.free(4 * MIB, MIB)
    assert rig.given_back[1:] == [(5 * MIB, 2 * MIB)]


def test_memory_that_is_used_again_is_given_back_again() -> None:
    rig = Rig(64 * MIB, keep=MIB)
    for _ in range(3):
        rig.extents.allocate(8 * MIB)
        rig.extents.free(0, 8 * MIB)
    assert rig.given_back == [(MIB, 7 * MIB)] * 3


def test_random_extents_never_overlap_and_all_come_back() -> None:
    random = Random(1)
    size = 4 * MIB
    rig = Rig(size, keep=64 << 10)
    used: dict[int, int] = {}
    touched = 0
    for _ in range(20_000):
        given = len(rig.given_back)
        if used and random.random() < 0.5:
            offset = random.choice(list(used))
            rig.extents.free(offset, used.pop(offset))
            highest = max((start + length for start, length in used.items()), default=0)
            for start, length in rig.given_back[given:]:
                assert start >= highest, "memory in use was given back"
                assert start + length == touched
                touched = start
            assert touched <= max(highest, 0) + (128 << 10) or highest < max(used, default=0)
        else:
            length = random.randrange(1, 200_000)
            new = rig.extents.allocate(length)
            if new is None:
                continue
            end = new + length
            assert end <= size
            assert all(end <= start or start + other <= new for start, other in used.items())
            used[new] = length
            touched = max(touched, -(-(-(-end // 4096) * 4096) // 65536) * 65536)
    for offset, length in used.items():
        rig.extents.free(offset, length)
    assert rig.extents.allocate(size) == 0
