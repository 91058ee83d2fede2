"""Where everything lies in the memory of a link.

In this order: the header with the counters, a ring of entries for each direction, the records of the slots, the small
areas of the slots (requests, then responses), and the region of extents for each direction. An entry of a ring is one
integer of 64 bits, in the byte order of the machine:

- to the engine: the ticket (slot and generation) and the kind, one of SUBMIT, CANCEL, RELEASE;
- to the front-end: the slot, the code and the length of the response.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = b"TFLINK\r\n"
VERSION = 1
# Magic, version, slots, bytes of the request extents, bytes of the response extents.
HEADER = struct.Struct("=8sIIQQ")
HEADER_BYTES = 4096

# Integers of 64 bits in the header, which the front-end writes and the engine reads.
COUNTERS = 64
COUNTERS_AT = 512

# A message of at most this length lies in the small area of its slot, a longer one in an extent.
SMALL_BYTES = 4096

# Starts of regions are multiples of this, the largest page size of the supported machines.
ALIGNMENT = 1 << 16

# A ticket is the number of a slot and, above it, the generation of the request in that slot.
SLOT_BITS = 20
SLOT_MASK = (1 << SLOT_BITS) - 1
LARGEST_SLOTS = 1 << SLOT_BITS
GENERATION = 1 << SLOT_BITS
TICKET_BITS = 60
TICKET_MASK = (1 << TICKET_BITS) - 1

# Kinds of an entry to the engine, above the ticket.
SUBMIT = 1 << TICKET_BITS
CANCEL = 2 << TICKET_BITS
RELEASE = 3 << TICKET_BITS

# An entry to the front-end: the slot, the code above it, the length above both.
CODE_BITS = 8
LARGEST_CODE = (1 << CODE_BITS) - 1
LENGTH_SHIFT = SLOT_BITS + CODE_BITS
# Lengths must fit into the other bits of such an entry.
LARGEST_REGION_BYTES = 1 << 35

# The record of a slot. Its first half is the front-end's: bytes of the message, bytes of what is stored behind it, offset
# in the request extents, deadline. The second half is the engine's: two integers of 64 bits, at these indices of the
# record's eight: the ticket of the last request that began, and the offset of the response in the response extents.
RECORD = struct.Struct("=QQQd")
RECORD_BYTES = 64
RECORD_WORDS = 8
BEGUN_WORD = 4
RESPONSE_WORD = 5

# What is stored behind a message (the caller's name, metadata) is small.
LARGEST_EXTRA_BYTES = 1 << 20

# Entries of the ring to the engine, for each slot. The engine has read SUBMIT of a slot's request g before it responds,
# and the front-end submits g + 1 in that slot only after it has received the response. So the unread entries of a
# slot are at most CANCEL(g), RELEASE(g), SUBMIT(g + 1), CANCEL(g + 1), each once: the ring never overflows.
ENTRIES_TO_ENGINE = 4
# One unread response at most: the next request in a slot is submitted after the response was received.
ENTRIES_TO_FRONT_END = 1


class Layout(NamedTuple):
    """Sizes and offsets of a link's memory, in bytes; `slots` is a number."""

    slots: int
    request_bytes: int
    response_bytes: int
    ring_to_engine: int
    ring_to_front_end: int
    records: int
    requests: int
    responses: int
    request_extents: int
    response_extents: int
    size: int


def layout_of(slots: int, request_bytes: int, response_bytes: int) -> Layout:
    """Return the layout for these numbers. Raise ValueError if one is out of range."""
    if not 1 <= slots <= LARGEST_SLOTS:
        raise ValueError(f"a link has 1 to {LARGEST_SLOTS} slots, not {slots}")
    for size in (request_bytes, response_bytes):
        if not 0 <= size <= LARGEST_REGION_BYTES or size % ALIGNMENT:
            raise ValueError(
                f"a region of extents has at most {LARGEST_REGION_BYTES} bytes, a multiple of {ALIGNMENT}, not {size}"
            )
    ring_to_engine = HEADER_BYTES
    ring_to_front_end = ring_to_engine + 8 * ENTRIES_TO_ENGINE * slots
    records = _aligned(ring_to_front_end + 8 * ENTRIES_TO_FRONT_END * slots)
    requests = _aligned(records + RECORD_BYTES * slots)
    responses = requests + SMALL_BYTES * slots
    request_extents = _aligned(responses + SMALL_BYTES * slots)
    response_extents = request_extents + request_bytes
    return Layout(
        slots,
        request_bytes,
        response_bytes,
        ring_to_engine,
        ring_to_front_end,
        records,
        requests,
        responses,
        request_extents,
        response_extents,
        response_extents + response_bytes,
    )


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
