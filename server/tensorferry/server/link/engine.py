"""The engine's side of a link."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tensorferry.server.link.errors import LinkBroken
from tensorferry.server.link.extents import region_extents
from tensorferry.server.link.files import Descriptor, LinkFiles, map_link
from tensorferry.server.link.layout import (
    BEGUN_WORD,
    CANCEL,
    COUNTERS,
    COUNTERS_AT,
    ENTRIES_TO_FRONT_END,
    LARGEST_CODE,
    LARGEST_EXTRA_BYTES,
    LENGTH_SHIFT,
    RECORD,
    RECORD_BYTES,
    RECORD_WORDS,
    RELEASE,
    RESPONSE_WORD,
    SLOT_BITS,
    SLOT_MASK,
    SMALL_BYTES,
    SUBMIT,
    TICKET_BITS,
    TICKET_MASK,
)

# Ticket, message, deadline, and what was submitted beside the message.
# A plain tuple, because a named one costs as much as the rest of what is done for a request.
Submitted = tuple[int, bytes, float, bytes]


class Taken(NamedTuple):
    """What the front-end published. A cancelled ticket may be among those just submitted."""

    submitted: list[Submitted]
    cancelled: list[int]


class EngineLink:
    """Takes requests from a front-end and responds to them. Takes over `files`, also when it raises LinkError.

    Nothing in the memory is trusted, because the front-end is exposed to the network. Each value is read once, checked,
    and then used. The state of each slot is kept here, not there. What a hijacked front-end still can do, as a process
    of the same user: block a thread in `flush` by filling the eventfd.
    `respond`, `flush`, `mark_begun` and `close` may be called on any thread, `take` on one. Responses are published by
    `flush`. Publication is one write of an eventfd: its count says how many entries are new. So no index is shared,
    the kernel orders the accesses to memory (on every processor), and no wake-up is lost.
    `no_room` is code and payload of the answer where a response finds no room.
    """

    def __init__(self, files: LinkFiles, *, no_room: tuple[int, bytes], keep_bytes: int = 32 << 20) -> None:
        file, to_engine, to_front_end = map(Descriptor, files)
        if not 0 <= no_room[0] <= LARGEST_CODE or len(no_room[1]) > SMALL_BYTES:
            raise ValueError(f"no_room must have a code up to {LARGEST_CODE} and at most {SMALL_BYTES} bytes")
        memory, layout = map_link(file.number)
        view = memoryview(memory)
        ring_end = layout.ring_to_front_end + 8 * ENTRIES_TO_FRONT_END * layout.slots
        self.slots = layout.slots
        self._no_room = no_room
        self._layout = layout
        self._memory = memory
        self._counters = view[COUNTERS_AT : COUNTERS_AT + 8 * COUNTERS].cast("Q")
        self._requests = view[layout.ring_to_engine : layout.ring_to_front_end].cast("Q")
        self._ring = view[layout.ring_to_front_end : ring_end].cast("Q")
        self._entries = ENTRIES_TO_FRONT_END * layout.slots
        self._words = view[layout.records : layout.records + RECORD_BYTES * layout.slots].cast("Q")
        self._to_engine = to_engine
        # Next entry to read of the other ring. Only the taking thread uses it.
        self._head = 0
        # Guards the fields below. `take` sets tickets without it: until then, no other thread knows of them.
        # Held while a response is copied, never while an eventfd is used.
        self._lock = threading.Lock()
        self._closed = False
        self._to_front_end = to_front_end
        # The tickets to respond to, by slot; -1 where there is none.
        self._tickets = [-1] * layout.slots
        self._extents = region_extents(memory, layout.response_extents, layout.response_bytes, keep_bytes)
        # Ticket, offset and size of the extents that the front-end has not released, by slot.
        self._held: dict[int, tuple[int, int, int]] = {}
        # Next entry to write, and how many were written since the last flush.
        self._tail = 0
        self._unflushed = 0

    def fileno(self) -> int:
        """Return the descriptor to wait on, readable when `take` has something to return."""
        return self._to_engine.number

    @property
    def active(self) -> int:
        """Number of requests to respond to."""
        return sum(ticket >= 0 for ticket in self._tickets)

    def counters(self) -> list[int]:
        """Return the numbers that the front-end keeps, none after `close`."""
        with self._lock:
            return [] if self._closed else self._counters.tolist()

    def take(self) -> Taken:
        """Return what the front-end has published since the last call, at once. Nothing after `close`.

        Each submitted request needs one response, also if it is cancelled. Messages are copies, because the response to
        a cancelled request frees its memory while a batch may still read it.
        Raise LinkBroken if the front-end does not follow the protocol. The link must then be closed.
        """
        taken = Taken([], [])
        with self._lock:
            if self._closed:
                return taken
            memory, ring, held = self._memory, self._requests, self._held
        try:
            count = os.eventfd_read(self._to_engine.number)
        except BlockingIOError:
            return taken
        submit = taken.submitted.append
        layout, tickets, unpack = self._layout, self._tickets, RECORD.unpack_from
        for entry in self._read_ring(ring, count):
            ticket = entry & TICKET_MASK
            slot = ticket & SLOT_MASK
            kind = entry ^ ticket
            if slot >= layout.slots:
                raise LinkBroken(f"slot {slot} of {layout.slots}")
            if kind == SUBMIT:
                if tickets[slot] >= 0 or slot in held:
                    raise LinkBroken(f"slot {slot} was submitted again while it was in use")
                length, extra, offset, deadline = unpack(memory, layout.records + slot * RECORD_BYTES)
                if deadline != deadline:
                    raise LinkBroken("a deadline is not a number")
                total = length + extra
                if total <= SMALL_BYTES:
                    start = layout.requests + slot * SMALL_BYTES
                elif offset + total > layout.request_bytes or extra > LARGEST_EXTRA_BYTES:
                    raise LinkBroken(f"a message of {length} and {extra} bytes at {offset}")
                else:
                    start = layout.request_extents + offset
                end = start + length
                beside = memory[end : end + extra] if extra else b""
                submit((ticket, memory[start:end], deadline, beside))
                tickets[slot] = ticket
            elif kind == CANCEL:
                # Else it crossed the response.
                if tickets[slot] == ticket:
                    taken.cancelled.append(ticket)
            elif kind == RELEASE:
                self._release(ticket)
            else:
                raise LinkBroken(f"kind {kind >> TICKET_BITS} of an entry")
        return taken

    def mark_begun(self, tickets: Iterable[int]) -> None:
        """Tell the front-end that these requests run, so that no other engine may run them after this one's end."""
        with self._lock:
            if self._closed:
                return
            for ticket in tickets:
                self._words[(ticket & SLOT_MASK) * RECORD_WORDS + BEGUN_WORD] = ticket

    def respond(self, ticket: int, code: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Write the response to a request, to be published by `flush`. Its payload is the pieces, one after another.

        Without room for them the response is `no_room`. After `close` nothing is done. Raise ValueError if the request
        was responded to, or the code is not in 0 to 255.
        """
        if not 0 <= code <= LARGEST_CODE:
            raise ValueError(f"a code is at most {LARGEST_CODE}, not {code}")
        length = 0
        for piece in pieces:
            length += len(piece) if isinstance(piece, bytes) else piece.nbytes
        slot = ticket & SLOT_MASK
        with self._lock:
            if self._closed:
                return
            if self._tickets[slot] != ticket:
                raise ValueError(f"the request {ticket:#x} is not active")
            offset = self._extents.allocate(length) if length > SMALL_BYTES else None
            if offset is not None:
                at = self._layout.response_extents + offset
            else:
                at = self._layout.responses + slot * SMALL_BYTES
                if length > SMALL_BYTES:
                    code, payload = self._no_room
                    pieces, length = (payload,), len(payload)
            try:
                for piece in pieces:
                    end = at + (len(piece) if isinstance(piece, bytes) else piece.nbytes)
                    self._memory[at:end] = piece
                    at = end
            except BaseException:
                # A piece is not contiguous. The request stays active, so that the caller can still respond.
                if offset is not None:
                    self._extents.free(offset, length)
                raise
            if offset is not None:
                self._held[slot] = ticket, offset, length
                self._words[slot * RECORD_WORDS + RESPONSE_WORD] = offset
            self._tickets[slot] = -1
            self._ring[self._tail] = slot | code << SLOT_BITS | length << LENGTH_SHIFT
            self._tail = (self._tail + 1) % self._entries
            self._unflushed += 1

    def flush(self) -> None:
        """Publish the responses since the last flush."""
        with self._lock:
            count, self._unflushed = self._unflushed, 0
            if not count or self._closed:
                return
            signal = self._to_front_end
        # Outside the lock, so that no thread waits for a system call. Another thread may publish its count first: the
        # front-end then reads older entries for it, which are written already.
        os.eventfd_write(signal.number, count)

    def close(self) -> None:
        """Drop the link.

        The descriptor of `fileno` stays open as long as this object, so that it can be unregistered from a selector.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            del self._memory, self._counters, self._requests, self._ring, self._words
            del self._to_front_end, self._extents
            self._tickets = []

    def _release(self, ticket: int) -> None:
        slot = ticket & SLOT_MASK
        with self._lock:
            holder, offset, size = self._held.get(slot, (-1, 0, 0))
            if holder != ticket:
                raise LinkBroken(f"slot {slot} was released, but it holds no response of this request")
            del self._held[slot]
            if not self._closed:
                self._extents.free(offset, size)

    def _read_ring(self, ring: memoryview[int], count: int) -> list[int]:
        size = len(ring)
        if count > size:
            raise LinkBroken(f"{count} entries were published, but the ring has {size}")
        head = self._head
        end = head + count
        self._head = end % size
        if end <= size:
            return ring[head:end].tolist()
        return ring[head:].tolist() + ring[: end - size].tolist()
