"""The front-end's side of a link."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

from tensorferry.server.link.errors import LinkBroken, LinkClosed, LinkError, LinkFull
from tensorferry.server.link.extents import region_extents
from tensorferry.server.link.files import Descriptor, LinkFiles, map_link
from tensorferry.server.link.layout import (
    BEGUN_WORD,
    CANCEL,
    COUNTERS,
    COUNTERS_AT,
    ENTRIES_TO_ENGINE,
    ENTRIES_TO_FRONT_END,
    GENERATION,
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
    TICKET_MASK,
)

# Ticket, code, payload, and the context that the request was submitted with.
# A plain tuple, because a named one costs as much as the rest of what is done for a response.
Response = tuple[int, int, bytes, Any]

# Added to the eventfd by `close`. Counts of entries are always lower.
_CLOSING = 1 << 32


class FrontEndLink:
    """Sends requests to the engine and receives their responses. Takes over `files`, also when it raises LinkError.

    Thread-safe, but only one thread may receive. Requests and cancellations are written to the ring and published by
    `flush`. Publication is one write of an eventfd: its count says how many entries are new. So no index is shared,
    the kernel orders the accesses to memory (on every processor), and no wake-up is lost.
    """

    def __init__(self, files: LinkFiles, *, keep_bytes: int = 32 << 20) -> None:
        file, to_engine, to_front_end = map(Descriptor, files)
        memory, layout = map_link(file.number)
        view = memoryview(memory)
        ring_end = layout.ring_to_front_end + 8 * ENTRIES_TO_FRONT_END * layout.slots
        self.slots = layout.slots
        self._to_engine = to_engine
        self._to_front_end = to_front_end
        self._memory = memory
        self._layout = layout
        self._ring = view[layout.ring_to_engine : layout.ring_to_front_end].cast("Q")
        self._entries = ENTRIES_TO_ENGINE * layout.slots
        self._responses = view[layout.ring_to_front_end : ring_end].cast("Q")
        self._words = view[layout.records : layout.records + RECORD_BYTES * layout.slots].cast("Q")
        #: Numbers that the engine reads; written by the front-end. Their meaning is the caller's.
        self.counters = view[COUNTERS_AT : COUNTERS_AT + 8 * COUNTERS].cast("Q")
        self._contexts: list[Any] = [None] * layout.slots
        # The tickets in flight by slot, -1 where there is none.
        self._tickets = [-1] * layout.slots
        # Next entry to read of the other ring, whether `close` was seen, and what the engine did wrong. Only the
        # receiving thread uses them.
        self._head = 0
        self._ended = False
        self._broken: LinkBroken | None = None
        # Guards the fields below, and additions to _tickets and _contexts. The receiving thread removes from those
        # two without it: a slot is free for others only once its ticket is in _free.
        # Held while a message is copied, never while an eventfd is used.
        self._lock = threading.Lock()
        self._closed = self._released = False
        # Free slots, each as the ticket of its last request. Used last in, first out: such memory is in the cache.
        self._free = list(reversed(range(layout.slots)))
        self._extents = region_extents(memory, layout.request_extents, layout.request_bytes, keep_bytes)
        # Offset and size of the extents in use, by ticket.
        self._held: dict[int, tuple[int, int]] = {}
        # Tickets in flight that were cancelled.
        self._cancelled: set[int] = set()
        # Next entry to write, and how many were written since the last flush.
        self._tail = 0
        self._unflushed = 0

    def submit(
        self, message: bytes, deadline: float = math.inf, extra: bytes = b"", context: Any = None
    ) -> int:
        """Write a request, to be published by `flush`. Return its ticket.

        `deadline` is on the clock of `time.monotonic`, which all processes share. `extra` is opaque: at most 1 MiB that
        the engine gets beside the message. `context` comes back with the response. Raise LinkFull if no slot or no
        extent is free, LinkClosed after `close`.
        """
        length = len(message)
        total = length + len(extra)
        layout = self._layout
        with self._lock:
            if self._closed or not self._free:
                raise self._refusal_locked()
            if total <= SMALL_BYTES:
                ticket = (self._free.pop() + GENERATION) & TICKET_MASK
                slot = ticket & SLOT_MASK
                offset = 0
                start = layout.requests + slot * SMALL_BYTES
                self._memory[start : start + total] = message + extra if extra else message
            else:
                offset = self._allocate_locked(total, len(extra))
                ticket = (self._free.pop() + GENERATION) & TICKET_MASK
                slot = ticket & SLOT_MASK
                self._held[ticket] = offset, total
                start = layout.request_extents + offset
                self._memory[start : start + length] = message
                self._memory[start + length : start + total] = extra
            RECORD.pack_into(
                self._memory, layout.records + slot * RECORD_BYTES, length, total - length, offset, deadline
            )
            self._tickets[slot] = ticket
            self._contexts[slot] = context
            self._append_locked(SUBMIT | ticket)
        return ticket

    def cancel(self, ticket: int) -> bool:
        """Ask the engine to give up a request. Return False if it was answered or cancelled already.

        The request keeps its slot until its response is received.
        """
        with self._lock:
            if self._closed or self._tickets[ticket & SLOT_MASK] != ticket or ticket in self._cancelled:
                return False
            self._cancelled.add(ticket)
            self._append_locked(CANCEL | ticket)
        return True

    def flush(self) -> None:
        """Publish what was submitted and cancelled since the last flush."""
        with self._lock:
            count, self._unflushed = self._unflushed, 0
            if not count or self._closed:
                return
            signal = self._to_engine
        # Outside the lock, so that no thread waits for a system call. Another thread may publish its count first: the
        # engine then reads older entries for it, which are written already.
        os.eventfd_write(signal.number, count)

    def receive(self) -> list[Response]:
        """Wait until responses are there, and return them in the order of the engine. Frees their slots.

        After `close` return the responses that the engine has published by then, and from then on none.
        Raise LinkBroken if the engine does not follow the protocol, after its responses up to there were returned.
        """
        if self._broken is not None:
            raise self._broken
        if self._ended:
            return []
        signal = self._to_front_end
        closing, count = divmod(os.eventfd_read(signal.number), _CLOSING)
        self._ended = closing > 0
        responses = self._take(count) if count else []
        if self._broken is not None and not responses:
            raise self._broken
        return responses

    def _take(self, count: int) -> list[Response]:
        layout, memory, tickets, contexts = self._layout, self._memory, self._tickets, self._contexts
        entries = self._read_ring(count)
        responses: list[Response] = []
        done: list[int] = []
        large: list[int] = []
        for entry in entries:
            slot = entry & SLOT_MASK
            length = entry >> LENGTH_SHIFT
            if slot >= layout.slots or (ticket := tickets[slot]) < 0:
                self._broken = LinkBroken(f"the engine answered slot {slot}, where no request is in flight")
                break
            if length <= SMALL_BYTES:
                start = layout.responses + slot * SMALL_BYTES
            else:
                offset = self._words[slot * RECORD_WORDS + RESPONSE_WORD]
                if offset + length > layout.response_bytes:
                    self._broken = LinkBroken(f"the engine's response in slot {slot} lies outside its region")
                    break
                start = layout.response_extents + offset
                large.append(ticket)
            responses.append(
                (ticket, entry >> SLOT_BITS & LARGEST_CODE, memory[start : start + length], contexts[slot])
            )
            tickets[slot] = -1
            contexts[slot] = None
            done.append(ticket)
        with self._lock:
            self._free += done
            if self._cancelled:
                self._cancelled.difference_update(done)
            if self._held:
                for ticket in done:
                    if (extent := self._held.pop(ticket, None)) is not None:
                        self._extents.free(*extent)
            for ticket in large:
                self._append_locked(RELEASE | ticket)
        if large:
            self.flush()
        return responses

    def close(self) -> None:
        """Accept no more requests, and make `receive` end. The other methods still work, until `release`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            signal = self._to_front_end
        os.eventfd_write(signal.number, _CLOSING)

    def release(self) -> None:
        """Free memory and descriptors. Call this once `receive` has ended and the outstanding requests were dealt with.

        From then on no request is outstanding, and `counters` are no longer shared.
        """
        self.close()
        self._ended = True
        with self._lock:
            if self._released:
                return
            self._released = True
            self.counters = memoryview(bytearray(8 * COUNTERS)).cast("Q")
            # Not closed but dropped, because another thread may still use them.
            del self._memory, self._ring, self._responses, self._words, self._extents
            del self._to_engine, self._to_front_end
            self._tickets, self._contexts = [], []

    @property
    def in_flight(self) -> int:
        """Number of requests that have no response."""
        return self.slots - len(self._free)

    def outstanding(self) -> list[tuple[int, Any]]:
        """Return ticket and context of each request that has no response. Complete once `receive` has ended."""
        with self._lock:
            return [(ticket, self._contexts[ticket & SLOT_MASK]) for ticket in self._tickets if ticket >= 0]

    def begun(self, ticket: int) -> bool:
        """Return whether the engine has marked an outstanding request as begun. If not, another engine may run it."""
        with self._lock:
            if self._released:
                raise LinkClosed("the link was released")
            return self._words[(ticket & SLOT_MASK) * RECORD_WORDS + BEGUN_WORD] == ticket

    def message_of(self, ticket: int) -> tuple[bytes, float, bytes]:
        """Return message, deadline and extra of an outstanding request."""
        with self._lock:
            slot = ticket & SLOT_MASK
            if self._released or self._tickets[slot] != ticket:
                raise LinkError("the request is not outstanding")
            layout = self._layout
            length, extra, offset, deadline = RECORD.unpack_from(
                self._memory, layout.records + slot * RECORD_BYTES
            )
            small = length + extra <= SMALL_BYTES
            start = layout.requests + slot * SMALL_BYTES if small else layout.request_extents + offset
            middle = start + length
            return self._memory[start:middle], deadline, self._memory[middle : middle + extra]

    def _allocate_locked(self, total: int, extra: int) -> int:
        if extra > LARGEST_EXTRA_BYTES:
            raise ValueError(
                f"{extra} bytes beside the message, but at most {LARGEST_EXTRA_BYTES} are allowed"
            )
        if total > self._extents.size:
            raise LinkFull("size", f"{total} bytes are more than the link's {self._extents.size} bytes")
        offset = self._extents.allocate(total)
        if offset is None:
            raise LinkFull("bytes", f"no free extent of {total} bytes in {self._extents.size}")
        return offset

    def _append_locked(self, entry: int) -> None:
        self._ring[self._tail] = entry
        self._tail = (self._tail + 1) % self._entries
        self._unflushed += 1

    def _refusal_locked(self) -> LinkError:
        if self._closed:
            return LinkClosed("the link was closed")
        return LinkFull("slots", f"all {self.slots} slots are in use")

    def _read_ring(self, count: int) -> list[int]:
        size = len(self._responses)
        if count > size:
            self._broken = LinkBroken(
                f"the engine published {count} responses at once, but there are {size} slots"
            )
            return []
        head = self._head
        end = head + count
        self._head = end % size
        if end <= size:
            return self._responses[head:end].tolist()
        return self._responses[head:].tolist() + self._responses[: end - size].tolist()
