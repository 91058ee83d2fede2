"""What each side does when the other one does not follow the protocol."""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator

import pytest
from support.server.link_pair import Pair, pair

from tensorferry.server.link import LinkBroken
from tensorferry.server.link.layout import (
    CANCEL,
    CODE_BITS,
    GENERATION,
    RECORD,
    RECORD_BYTES,
    RELEASE,
    SLOT_BITS,
    SUBMIT,
    Layout,
    layout_of,
)

SLOTS = 8
MIB = 1 << 20
TICKET = GENERATION | 3


class Hijacked:
    """A link and its memory, to write anything there."""

    def __init__(self, both: Pair) -> None:
        self.both = both
        self.layout: Layout = layout_of(SLOTS, MIB, MIB)
        self.memory = mmap.mmap(both.files.memory, self.layout.size)

    def to_engine(self, *entries: int, at: int = 0, count: int | None = None) -> None:
        struct.pack_into(f"={len(entries)}Q", self.memory, self.layout.ring_to_engine + 8 * at, *entries)
        os.eventfd_write(self.both.files.to_engine, len(entries) if count is None else count)

    def to_front_end(self, *entries: int, count: int | None = None) -> None:
        struct.pack_into(f"={len(entries)}Q", self.memory, self.layout.ring_to_front_end, *entries)
        os.eventfd_write(self.both.files.to_front_end, len(entries) if count is None else count)

    def record(
        self, length: int, extra: int = 0, offset: int = 0, deadline: float = math.inf, slot: int = 3
    ) -> None:
        RECORD.pack_into(
            self.memory, self.layout.records + RECORD_BYTES * slot, length, extra, offset, deadline
        )

    def response_offset(self, offset: int, slot: int = 0) -> None:
        struct.pack_into("=Q", self.memory, self.layout.records + RECORD_BYTES * slot + 40, offset)


@pytest.fixture
def hijacked() -> Iterator[Hijacked]:
    with pair(slots=SLOTS) as both:
        hijacked = Hijacked(both)
        yield hijacked
        hijacked.memory.close()


ENTRIES: list[tuple[str, Callable[[Hijacked], None]]] = [
    ("slot 8 of 8", lambda link: link.to_engine(SUBMIT | SLOTS)),
    ("slot 1048575 of 8", lambda link: link.to_engine(CANCEL | (1 << SLOT_BITS) - 1)),
    ("kind 0", lambda link: link.to_engine(TICKET)),
    ("kind 4", lambda link: link.to_engine(4 << 60 | TICKET)),
    ("kind 15", lambda link: link.to_engine(15 << 60 | TICKET)),
    ("while it was in use", lambda link: link.to_engine(SUBMIT | TICKET, SUBMIT | TICKET)),
    ("while it was in use", lambda link: link.to_engine(SUBMIT | TICKET, SUBMIT | TICKET + GENERATION)),
    ("was released", lambda link: link.to_engine(RELEASE | TICKET)),
    ("was released", lambda link: link.to_engine(SUBMIT | TICKET, RELEASE | TICKET)),
    ("33 entries", lambda link: link.to_engine(count=33)),
    ("18446744073709551614 entries", lambda link: link.to_engine(count=(1 << 64) - 2)),
]
RECORDS: list[tuple[str, tuple[int, int, int, float]]] = [
    ("not a number", (10, 0, 0, math.nan)),
    ("message", (MIB, 0, 4096, math.inf)),
    ("message", (MIB + 1, 0, 0, math.inf)),
    ("message", (0, MIB + 1, 0, math.inf)),
    ("message", (5000, 0, MIB - 4999, math.inf)),
    ("message", (5000, 0, (1 << 64) - 1, math.inf)),
    ("message", ((1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 1, math.inf)),
    ("message", ((1 << 64) - 4096, 4196, 0, math.inf)),
]


@pytest.mark.parametrize(("why", "write"), ENTRIES)
def test_the_engine_refuses_entries(hijacked: Hijacked, why: str, write: Callable[[Hijacked], None]) -> None:
    write(hijacked)
    with pytest.raises(LinkBroken, match=why):
        hijacked.both.engine.take()


@pytest.mark.parametrize(("why", "record"), RECORDS)
def test_the_engine_refuses_records(
    hijacked: Hijacked, why: str, record: tuple[int, int, int, float]
) -> None:
    hijacked.record(*record)
    hijacked.to_engine(SUBMIT | TICKET)
    with pytest.raises(LinkBroken, match=why):
        hijacked.both.engine.take()


def test_the_engine_copies_no_more_than_a_megabyte_beside_a_message() -> None:
    with pair(slots=1, request_bytes=4 * MIB) as both:
        both.front_end.submit(b"m", extra=b"e" * MIB)
        both.front_end.flush()
        assert len(both.engine.take().submitted[0][3]) == MIB
    with pair(slots=1, request_bytes=4 * MIB) as both:
        both.front_end.submit(b"m", extra=b"e" * MIB)
        both.front_end.flush()
        layout = layout_of(1, 4 * MIB, MIB)
        os.pwrite(both.files.memory, RECORD.pack(1, MIB + 1, 0, math.inf), layout.records)
        with pytest.raises(LinkBroken, match="message"):
            both.engine.take()


def test_the_last_byte_of_the_region_is_valid(hijacked: Hijacked) -> None:
    hijacked.memory[hijacked.layout.response_extents - 1] = 7
    hijacked.record(5000, 0, MIB - 5000)
    hijacked.to_engine(SUBMIT | TICKET)
    ((_, message, *_),) = hijacked.both.engine.take().submitted
    assert (len(message), message[-1]) == (5000, 7)
    del message


def test_a_slot_is_not_submitted_before_its_response_is_released(hijacked: Hijacked) -> None:
    hijacked.to_engine(SUBMIT | TICKET)
    engine = hijacked.both.engine
    engine.take()
    engine.respond(TICKET, 0, [b"r" * 5000])
    hijacked.to_engine(RELEASE | TICKET, SUBMIT | TICKET, at=1)
    assert len(engine.take().submitted) == 1
    engine.respond(TICKET, 0, [b"r" * 5000])
    hijacked.to_engine(SUBMIT | TICKET, at=3)
    with pytest.raises(LinkBroken, match="in use"):
        engine.take()


def test_a_response_is_released_only_once_and_by_its_ticket(hijacked: Hijacked) -> None:
    hijacked.to_engine(SUBMIT | TICKET)
    engine = hijacked.both.engine
    engine.take()
    engine.respond(TICKET, 0, [b"r" * 5000])
    hijacked.to_engine(RELEASE | TICKET + GENERATION, at=1)
    with pytest.raises(LinkBroken, match="was released"):
        engine.take()
    hijacked.to_engine(RELEASE | TICKET, RELEASE | TICKET, at=2)
    with pytest.raises(LinkBroken, match="was released"):
        engine.take()


def test_cancellations_of_other_generations_are_ignored(hijacked: Hijacked) -> None:
    hijacked.to_engine(CANCEL | TICKET, SUBMIT | TICKET, CANCEL | TICKET + GENERATION, CANCEL | TICKET)
    taken = hijacked.both.engine.take()
    assert ([request[0] for request in taken.submitted], taken.cancelled) == ([TICKET], [TICKET])


def test_the_header_is_not_read_again(hijacked: Hijacked) -> None:
    hijacked.memory[: 1 << 12] = b"\xff" * 4096
    assert hijacked.both.round_trip(b"m" * 5000, b"r" * 5000)[1][2] == b"r" * 5000


def test_a_front_end_that_never_releases_gets_no_more_large_responses(hijacked: Hijacked) -> None:
    engine = hijacked.both.engine
    hijacked.to_engine(*(SUBMIT | GENERATION | slot for slot in range(SLOTS)))
    for ticket, *_ in engine.take().submitted:
        engine.respond(ticket, 0, [b"r" * 300_000])
    engine.flush()
    assert engine.active == 0


def entry(slot: int, length: int) -> int:
    return slot | length << SLOT_BITS + CODE_BITS


@pytest.mark.parametrize(
    ("entries", "count", "why"),
    [
        ([entry(SLOTS, 0)], 1, "no request is in flight"),
        ([entry(5, 0)], 1, "no request is in flight"),
        ([entry(0, MIB + 1)], 1, "outside its region"),
        ([entry(0, (1 << 36) - 1)], 1, "outside its region"),
        ([], 9, "9 responses at once"),
    ],
)
def test_the_front_end_refuses_responses(
    hijacked: Hijacked, entries: list[int], count: int, why: str
) -> None:
    front_end = hijacked.both.front_end
    ticket = front_end.submit(b"m")
    hijacked.to_front_end(*entries, count=count)
    for _ in range(2):
        with pytest.raises(LinkBroken, match=why):
            front_end.receive()
    assert front_end.outstanding() == [(ticket, None)]


def test_responses_before_a_violation_are_not_lost(hijacked: Hijacked) -> None:
    front_end = hijacked.both.front_end
    first, second = (front_end.submit(b"m") for _ in range(2))
    hijacked.to_front_end(entry(0, 2), entry(0, 2), entry(1, 2))
    assert [response[0] for response in front_end.receive()] == [first]
    with pytest.raises(LinkBroken):
        front_end.receive()
    assert front_end.outstanding() == [(second, None)]


def test_a_response_outside_its_region_by_offset(hijacked: Hijacked) -> None:
    hijacked.both.front_end.submit(b"m")
    hijacked.response_offset((1 << 64) - 5000)
    hijacked.to_front_end(entry(0, 5000))
    with pytest.raises(LinkBroken, match="outside its region"):
        hijacked.both.front_end.receive()
