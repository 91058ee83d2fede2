"""Fuzzing of a link: one side writes anything into the shared memory, the other one must not be harmed.

    PYTHONPATH=tests python -m support.server.link_fuzz [--entries 1000000] [--seed 1]

An engine reads random and mutated entries, records, headers and counts; a front-end likewise. Neither may raise
anything but LinkBroken (LinkError for a header), nor return a byte from outside the region that it may read.
"""

from __future__ import annotations

import argparse
import mmap
import os
import struct
import time
from collections import Counter
from random import Random

from support.server.link_pair import NO_ROOM

from tensorferry.server.link import EngineLink, FrontEndLink, LinkBroken, LinkError, create_link
from tensorferry.server.link.layout import (
    CANCEL,
    GENERATION,
    HEADER,
    LENGTH_SHIFT,
    MAGIC,
    RECORD,
    RECORD_BYTES,
    RELEASE,
    RESPONSE_WORD,
    SLOT_BITS,
    SLOT_MASK,
    SMALL_BYTES,
    SUBMIT,
    TICKET_MASK,
    VERSION,
    layout_of,
)

SLOTS = 6
REGION = 1 << 18
LAYOUT = layout_of(SLOTS, REGION, REGION)
# Numbers at which checks go wrong.
EDGES = sorted(
    {
        number + delta
        for number in (1, SLOTS, 4096, REGION, 1 << 20, 1 << 31, 1 << 32, 1 << 36, 1 << 60, 1 << 63, 1 << 64)
        for delta in (-2, -1, 0, 1)
        if 0 <= number + delta < 1 << 64
    }
)
FLOATS = (0.0, -1.0, 5.0, float("inf"), float("-inf"), float("nan"))
# After this many bursts a link that still works is replaced.
LIFE = 200


class Fuzzer:
    """Fuzzes both sides, the same way for one seed. `outcomes` counts what came of it."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        # How wild the present link is treated, up to 1: some should live long.
        self._wildness = 1.0
        self.outcomes: Counter[str] = Counter()

    def run(self, entries: int) -> None:
        """Write at least `entries` entries into the rings."""
        while self.outcomes["entries"] < entries:
            for _ in range(4):
                self._fuzz_header()
                self._fuzz_engine(entries)
            self._fuzz_front_end(entries)

    def _rarely(self, probability: float) -> bool:
        return self._random.random() < probability * self._wildness

    def _number(self) -> int:
        kind = self._random.randrange(4)
        if kind == 0:
            return self._random.choice(EDGES)
        if kind == 1:
            return self._random.getrandbits(64)
        return self._random.randrange(5000 if kind == 2 else 2 * REGION)

    def _fuzz_header(self) -> None:
        files = create_link(SLOTS, REGION, REGION)
        header = bytearray(HEADER.pack(MAGIC, VERSION, SLOTS, REGION, REGION))
        choice = self._random.randrange(3)
        if choice == 1:
            header[self._random.randrange(len(header))] ^= 1 << self._random.randrange(8)
        elif choice == 2:
            struct.pack_into(
                "=IIQQ",
                header,
                8,
                VERSION,
                self._number() & 0xFFFFFFFF,
                self._number() & ~0xFFFF,
                self._number() & ~0xFFFF,
            )
        os.pwrite(files.memory, header, 0)
        try:
            FrontEndLink(files.duplicate())
            EngineLink(files.duplicate(), no_room=NO_ROOM)
            self.outcomes["header: accepted"] += 1
        except LinkError:
            self.outcomes["header: refused"] += 1
        files.close()

    def _fuzz_engine(self, entries: int) -> None:
        """Fuzz one engine until it refuses the link."""
        random = self._random
        self._wildness = random.choice((0.05, 0.3, 1.0))
        files = create_link(SLOTS, REGION, REGION)
        engine = EngineLink(files.duplicate(), no_room=NO_ROOM, keep_bytes=0)
        memory = mmap.mmap(files.memory, LAYOUT.size)
        ring = memoryview(memory)[LAYOUT.ring_to_engine : LAYOUT.ring_to_front_end].cast("Q")
        memory[LAYOUT.request_extents : LAYOUT.response_extents] = random.randbytes(REGION)
        memory[LAYOUT.requests : LAYOUT.responses] = random.randbytes(SLOTS * SMALL_BYTES)
        responses = memoryview(memory)[LAYOUT.ring_to_front_end :][: 8 * SLOTS].cast("Q")
        tail = answered = 0
        active: set[int] = set()
        held: set[int] = set()
        for _ in range(LIFE):
            burst = random.randint(1, 4)
            submitted: set[int] = set()
            for _ in range(burst):
                entry = self._entry(active | submitted, held)
                if entry >> 60 == 1 and (slot := entry & SLOT_MASK) < SLOTS and not self._rarely(0.05):
                    self._write_record(memory, slot)
                    submitted.add(entry & TICKET_MASK)
                ring[tail] = entry
                tail = (tail + 1) % len(ring)
            self.outcomes["entries"] += burst
            count = burst
            if self._rarely(0.02):
                count = min(max(1, self._number()), (1 << 64) - 2)
                tail = (tail - burst + count) % len(ring)
            if self._rarely(0.02):
                self._scribble(memory)
            os.eventfd_write(files.to_engine, count)
            try:
                taken = engine.take()
            except LinkBroken:
                self.outcomes["engine: broken"] += 1
                break
            for ticket, message, deadline, extra in taken.submitted:
                assert ticket not in active
                assert deadline == deadline
                active.add(ticket)
                self._check_message(memory, ticket & SLOT_MASK, message, extra)
                self.outcomes["engine: submitted"] += 1
            for ticket in taken.cancelled:
                assert ticket in active
                self.outcomes["engine: cancelled"] += 1
            del taken
            for ticket in random.sample(sorted(active), random.randint(0, len(active))):
                engine.mark_begun([ticket])
                size = random.choice((0, 10, 4096, 4097, 50_000, 200_000, REGION + 1))
                engine.respond(ticket, random.randrange(256), [bytes(size)])
                active.remove(ticket)
                if responses[answered % SLOTS] >> LENGTH_SHIFT > SMALL_BYTES:
                    held.add(ticket)
                    self.outcomes["engine: large response"] += 1
                answered += 1
            engine.flush()
            if self.outcomes["entries"] >= entries:
                break
        assert engine.active <= SLOTS
        for ticket in sorted(active):
            engine.respond(ticket, 0, [b"late"])
        engine.flush()
        engine.close()
        ring.release()
        responses.release()
        memory.close()
        files.close()

    def _entry(self, active: set[int], held: set[int]) -> int:
        random = self._random
        if self._rarely(0.02):
            return random.getrandbits(64)
        if self._rarely(0.02):
            return random.randrange(16) << 60 | random.randrange(3) << SLOT_BITS | random.randrange(SLOTS + 2)
        choice = random.random()
        if choice < 0.2 and active:
            return CANCEL | random.choice(sorted(active))
        if choice < 0.25:
            return CANCEL | random.randrange(3) << SLOT_BITS | random.randrange(SLOTS)
        if choice < 0.6 and held:
            ticket = random.choice(sorted(held))
            if not self._rarely(0.02):
                held.remove(ticket)
            return RELEASE | ticket
        busy = {ticket & SLOT_MASK for ticket in active | held}
        free = [slot for slot in range(SLOTS) if slot not in busy]
        slot = random.choice(free) if free and not self._rarely(0.02) else random.randrange(SLOTS)
        if not free and not self._rarely(0.1):
            return CANCEL | slot
        # Any generation, also one that was used.
        return SUBMIT | random.choice((1, 2, random.randrange(1 << 40))) * GENERATION | slot

    def _write_record(self, memory: mmap.mmap, slot: int) -> None:
        random = self._random
        at = LAYOUT.records + RECORD_BYTES * slot
        length, extra = random.choice((0, 100, 4096, 4097, 9000, 100_000)), random.choice((0, 0, 100, 4096))
        offset = random.randrange(REGION - length - extra + 1)
        deadline = random.random() * 100
        RECORD.pack_into(memory, at, length, extra, offset, deadline)
        if self._rarely(0.05):
            struct.pack_into("=Q", memory, at + 8 * random.randrange(3), self._number())
        elif self._rarely(0.02):
            struct.pack_into("=d", memory, at + 24, random.choice(FLOATS))

    def _scribble(self, memory: mmap.mmap) -> None:
        """Overwrite something anywhere before the extents."""
        at = self._random.randrange(LAYOUT.requests - 8)
        memory[at : at + 8] = self._random.randbytes(8)

    @staticmethod
    def _check_message(memory: mmap.mmap, slot: int, message: bytes, extra: bytes) -> None:
        length, beside, offset, _ = RECORD.unpack_from(memory, LAYOUT.records + RECORD_BYTES * slot)
        total = length + beside
        assert (len(message), len(extra)) == (length, beside)
        if total <= SMALL_BYTES:
            start, end = LAYOUT.requests + slot * SMALL_BYTES, LAYOUT.requests + (slot + 1) * SMALL_BYTES
        else:
            start, end = LAYOUT.request_extents + offset, LAYOUT.response_extents
        assert start + total <= end
        assert message == memory[start : start + length]
        assert extra == memory[start + length : start + total]

    def _fuzz_front_end(self, entries: int) -> None:
        """Fuzz one front-end until it refuses the link."""
        random = self._random
        self._wildness = random.choice((0.05, 0.3, 1.0))
        files = create_link(SLOTS, REGION, REGION)
        front_end = FrontEndLink(files.duplicate(), keep_bytes=0)
        memory = mmap.mmap(files.memory, LAYOUT.size)
        ring = memoryview(memory)[LAYOUT.ring_to_front_end :][: 8 * SLOTS].cast("Q")
        memory[LAYOUT.response_extents : LAYOUT.size] = random.randbytes(REGION)
        memory[LAYOUT.responses : LAYOUT.responses + SLOTS * SMALL_BYTES] = random.randbytes(
            SLOTS * SMALL_BYTES
        )
        tail = 0
        for _ in range(LIFE):
            while front_end.in_flight < SLOTS:
                front_end.submit(bytes(random.choice((10, 4096, 9000))))
            front_end.flush()
            os.eventfd_read(files.to_engine)
            burst = random.randint(1, 3)
            expected: dict[int, bytes] = {}
            wrong = False
            tickets = [ticket for ticket, _ in front_end.outstanding()]
            for ticket in random.sample(tickets, burst):
                slot = ticket & SLOT_MASK
                length = random.choice((0, 100, 4096, 4097, 100_000))
                offset = random.randrange(REGION - length + 1)
                if self._rarely(0.03):
                    wrong = True
                    slot, length, offset = random.randrange(SLOTS + 2), self._number() >> 28, self._number()
                if slot < SLOTS:
                    at = LAYOUT.records + RECORD_BYTES * slot + 8 * RESPONSE_WORD
                    struct.pack_into("=Q", memory, at, offset)
                start = (
                    LAYOUT.responses + slot * SMALL_BYTES
                    if length <= SMALL_BYTES
                    else LAYOUT.response_extents + offset
                )
                if start + length <= LAYOUT.size:
                    expected[slot] = memory[start : start + length]
                ring[tail] = slot | random.randrange(256) << SLOT_BITS | length << LENGTH_SHIFT
                tail = (tail + 1) % SLOTS
            self.outcomes["entries"] += burst
            count = random.randint(1, 2 * SLOTS) if self._rarely(0.02) else burst
            tail = (tail - burst + count) % SLOTS
            os.eventfd_write(files.to_front_end, count)
            try:
                responses = front_end.receive()
            except LinkBroken:
                self.outcomes["front-end: broken"] += 1
                break
            for ticket, _, payload, _ in responses:
                assert ticket in tickets
                if count == burst and not wrong:
                    assert payload == expected[ticket & SLOT_MASK]
                self.outcomes["front-end: received"] += 1
            if self.outcomes["entries"] >= entries:
                break
        ring.release()
        memory.close()
        front_end.release()
        files.close()


def main() -> None:
    """Fuzz, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    fuzzer = Fuzzer(arguments.seed)
    started = time.monotonic()
    fuzzer.run(arguments.entries)
    for outcome, number in sorted(fuzzer.outcomes.items()):
        print(f"{number:10,}  {outcome}")
    print(f"{time.monotonic() - started:10.1f}  seconds")


if __name__ == "__main__":
    main()
