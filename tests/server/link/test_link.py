"""Both sides of a link, in one process."""

from __future__ import annotations

import math
import os
import threading
import weakref
from array import array
from typing import Any

import pytest
from support.open_files import open_files
from support.server.link_pair import NO_ROOM, Pair, pair

from tensorferry.server.link import EngineLink, FrontEndLink, LinkClosed, LinkError, LinkFull, create_link
from tensorferry.server.link.layout import GENERATION, SLOT_MASK, TICKET_MASK

SIZES = [0, 1, 100, 4095, 4096, 4097, 150_000, 1 << 20]


@pytest.mark.parametrize("payload", SIZES)
@pytest.mark.parametrize("message", SIZES)
def test_messages_and_payloads_of_every_size(message: int, payload: int) -> None:
    with pair() as both:
        for code in (0, 255):
            sent, answer = bytes([code + 1 & 255]) * message, bytes([code ^ 7]) * payload
            arrived, response = both.round_trip(sent, answer, code)
            assert arrived == sent
            assert response[1:] == (code, answer, None)


@pytest.mark.parametrize("extra", [1, 4000, 4096, 100_000])
@pytest.mark.parametrize("message", [0, 100, 4096, 5000])
def test_extra_arrives_beside_the_message(message: int, extra: int) -> None:
    with pair() as both:
        arrived, _ = both.round_trip(b"m" * message, b"", extra=b"e" * extra)
        assert arrived == b"m" * message


def test_deadline_and_context() -> None:
    with pair() as both:
        context = object()
        first = both.front_end.submit(b"a", 12.5, b"caller", context)
        second = both.front_end.submit(b"b")
        both.front_end.flush()
        assert both.engine.take().submitted == [(first, b"a", 12.5, b"caller"), (second, b"b", math.inf, b"")]
        both.engine.respond(second, 1, [b"2"])
        both.engine.respond(first, 2, [b"1"])
        both.engine.flush()
        responses = both.front_end.receive()
        assert responses == [(second, 1, b"2", None), (first, 2, b"1", context)]
        assert responses[1][3] is context


def test_nothing_is_published_before_the_flush() -> None:
    with pair() as both:
        ticket = both.front_end.submit(b"a")
        assert both.engine.take() == ([], [])
        both.front_end.flush()
        both.front_end.flush()
        assert len(both.engine.take().submitted) == 1
        assert both.engine.take() == ([], [])
        both.engine.respond(ticket, 0, [b""])
        assert not both.readable()
        both.engine.flush()
        assert both.readable()


def test_counts_of_several_flushes_are_added() -> None:
    with pair() as both:
        for message in (b"a", b"b", b"c"):
            both.front_end.submit(message)
            both.front_end.flush()
        taken = both.engine.take().submitted
        assert [request[1] for request in taken] == [b"a", b"b", b"c"]
        for ticket, *_ in taken:
            both.engine.respond(ticket, 0, [b"r"])
            both.engine.flush()
        assert len(both.front_end.receive()) == 3


def test_pieces_are_joined() -> None:
    with pair() as both:
        numbers: Any = memoryview(array("f", [1.0, 2.0, 3.0]))
        responses: list[list[bytes | memoryview]] = [
            [],
            [b"a", b"", memoryview(b"bc")],
            [numbers, b"x"],
            [b"a" * 3000, b"b" * 3000, numbers],
        ]
        for pieces in responses:
            both.front_end.submit(b"m")
            both.front_end.flush()
            ((ticket, *_),) = both.engine.take().submitted
            both.engine.respond(ticket, 0, pieces)
            both.engine.flush()
            ((_, _, payload, _),) = both.front_end.receive()
            assert payload == b"".join(bytes(piece) for piece in pieces)


def test_the_last_freed_slot_is_used_first_with_another_ticket() -> None:
    with pair() as both:
        tickets = {both.round_trip(b"m", b"r")[1][0] for _ in range(100)}
        assert len(tickets) == 100
        assert len({ticket & SLOT_MASK for ticket in tickets}) == 1


def test_generations_begin_again_after_the_last() -> None:
    with pair(slots=2) as both:
        both.front_end._free = [TICKET_MASK & ~SLOT_MASK | slot for slot in (1, 0)]
        tickets = [both.round_trip(b"m", b"r")[1][0] for _ in range(3)]
        assert tickets == [0, GENERATION, 2 * GENERATION]


def test_rings_wrap_around_with_every_length_of_a_burst() -> None:
    with pair(slots=5) as both:
        number = 0
        for _ in range(20):
            for burst in (1, 2, 3, 4, 5):
                sent = [b"%d" % (number + index) for index in range(burst)]
                number += burst
                tickets = [both.front_end.submit(message) for message in sent]
                both.front_end.flush()
                taken = both.engine.take().submitted
                assert [(ticket, message) for ticket, message, *_ in taken] == list(
                    zip(tickets, sent, strict=True)
                )
                for ticket, message, *_ in taken:
                    both.engine.respond(ticket, 0, [message])
                both.engine.flush()
                assert [payload for _, _, payload, _ in both.front_end.receive()] == sent


def test_full_slots() -> None:
    with pair(slots=3) as both:
        tickets = [both.front_end.submit(b"m") for _ in range(3)]
        with pytest.raises(LinkFull, match="all 3 slots") as full:
            both.front_end.submit(b"m")
        assert full.value.what == "slots"
        assert both.front_end.in_flight == 3
        both.front_end.flush()
        both.engine.take()
        both.engine.respond(tickets[1], 0, [b""])
        both.engine.flush()
        both.front_end.receive()
        assert both.front_end.in_flight == 2
        assert both.front_end.submit(b"m") & SLOT_MASK == tickets[1] & SLOT_MASK


def test_full_request_extents() -> None:
    with pair() as both:
        first = both.front_end.submit(b"m" * 600_000)
        with pytest.raises(LinkFull, match="no free extent") as full:
            both.front_end.submit(b"m" * 600_000)
        assert full.value.what == "bytes"
        both.front_end.submit(b"small")
        both.front_end.flush()
        both.engine.take()
        both.engine.respond(first, 0, [b""])
        both.engine.flush()
        both.front_end.receive()
        both.front_end.submit(b"m" * 600_000)
        assert both.front_end.in_flight == 2


def test_a_message_that_never_fits() -> None:
    with pair() as both:
        with pytest.raises(LinkFull, match="are more than") as full:
            both.front_end.submit(b"m" * ((1 << 20) + 1))
        assert full.value.what == "size"
        with pytest.raises(ValueError, match="beside the message"):
            both.front_end.submit(b"", extra=b"e" * ((1 << 20) + 1))
        assert both.front_end.in_flight == 0


@pytest.mark.parametrize("size", [700_000, (1 << 20) + 1])
def test_a_response_without_room_becomes_the_callers_answer(size: int) -> None:
    with pair() as both:
        tickets = [both.front_end.submit(b"m") for _ in range(2)]
        both.front_end.flush()
        both.engine.take()
        both.engine.respond(tickets[0], 0, [b"r" * 700_000])
        both.engine.respond(tickets[1], 0, [b"r" * size])
        both.engine.flush()
        assert both.front_end.receive()[1][1:3] == NO_ROOM
        assert both.round_trip(b"m", b"r" * 700_000)[1][1:3] == (0, b"r" * 700_000), "released"


def test_large_responses_are_released_once_copied() -> None:
    with pair(slots=2) as both:
        for _ in range(50):
            _, response = both.round_trip(b"m" * 900_000, b"r" * 900_000)
            assert response[1:3] == (0, b"r" * 900_000)


def test_a_response_with_a_bad_piece_is_not_lost() -> None:
    with pair() as both:
        ticket = both.front_end.submit(b"m")
        both.front_end.flush()
        both.engine.take()
        every_other = memoryview(b"r" * 20_000)[::2]
        for _ in range(200):
            with pytest.raises((BufferError, ValueError)):
                both.engine.respond(ticket, 0, [every_other])
        with pytest.raises(ValueError, match="at most 255"):
            both.engine.respond(ticket, 256, [])
        both.engine.respond(ticket, 13, [b"r" * 1_000_000])
        both.engine.flush()
        assert both.front_end.receive() == [(ticket, 13, b"r" * 1_000_000, None)]


def test_one_response_for_each_request() -> None:
    with pair() as both:
        ticket = both.front_end.submit(b"m")
        with pytest.raises(ValueError, match="not active"):
            both.engine.respond(ticket, 0, [])
        both.front_end.flush()
        both.engine.take()
        assert both.engine.active == 1
        both.engine.respond(ticket, 0, [])
        assert both.engine.active == 0
        with pytest.raises(ValueError, match="not active"):
            both.engine.respond(ticket, 0, [])


def test_cancel() -> None:
    with pair() as both:
        first, second = both.front_end.submit(b"1"), both.front_end.submit(b"2")
        assert both.front_end.cancel(second)
        assert not both.front_end.cancel(second)
        both.front_end.flush()
        assert both.engine.take().cancelled == [second]
        assert both.front_end.cancel(first)
        both.front_end.flush()
        assert both.engine.take() == ([], [first])
        for ticket in (first, second):
            both.engine.respond(ticket, 1, [])
        both.engine.flush()
        assert len(both.front_end.receive()) == 2
        assert not both.front_end.cancel(first)


def test_nothing_is_kept_of_a_request_that_was_answered() -> None:
    class Context:
        pass

    with pair() as both:
        context = Context()
        kept = weakref.ref(context)
        ticket = both.front_end.submit(b"m" * 5000, context=context)
        del context
        both.front_end.cancel(ticket)
        both.front_end.flush()
        both.engine.take()
        both.engine.respond(ticket, 0, [b"r" * 5000])
        both.engine.flush()
        both.front_end.receive()
        assert kept() is None
        assert not both.front_end._cancelled
        assert not both.front_end._held
        both.engine.take()
        assert not both.engine._held


def test_a_cancellation_that_crosses_the_response_is_ignored() -> None:
    with pair(slots=1) as both:
        for _ in range(100):
            first = both.front_end.submit(b"1")
            both.front_end.flush()
            both.engine.take()
            both.engine.respond(first, 0, [b"r" * 5000])
            both.engine.flush()
            assert both.front_end.cancel(first)
            both.front_end.receive()
            # The engine reads nothing meanwhile: this is the most that one slot leaves unread.
            second = both.front_end.submit(b"2")
            assert both.front_end.cancel(second)
            both.front_end.flush()
            taken = both.engine.take()
            assert [ticket for ticket, *_ in taken.submitted] == taken.cancelled == [second]
            both.engine.respond(second, 0, [])
            both.engine.flush()
            both.front_end.receive()


def test_the_ring_holds_the_most_that_all_slots_leave_unread() -> None:
    slots = 7
    with pair(slots=slots, response_bytes=slots * 8192) as both:
        for _ in range(10):
            first = [both.front_end.submit(b"1") for _ in range(slots)]
            both.front_end.flush()
            assert len(both.engine.take().submitted) == slots
            for ticket in first:
                both.engine.respond(ticket, 0, [b"r" * 5000])
            both.engine.flush()
            for ticket in first:
                both.front_end.cancel(ticket)
            both.front_end.receive()
            second = [both.front_end.submit(b"%d" % number) for number in range(slots)]
            for ticket in second:
                both.front_end.cancel(ticket)
            both.front_end.flush()
            taken = both.engine.take()
            assert [request[:2] for request in taken.submitted] == [
                (ticket, b"%d" % number) for number, ticket in enumerate(second)
            ]
            assert taken.cancelled == second
            for ticket in second:
                both.engine.respond(ticket, 0, [b"r" * 5000])
            both.engine.flush()
            assert [payload for _, _, payload, _ in both.front_end.receive()] == [b"r" * 5000] * slots


def test_a_front_end_that_reads_late_loses_nothing() -> None:
    with pair(slots=64, response_bytes=64 * 8192) as both:
        tickets = [both.front_end.submit(b"m") for _ in range(64)]
        both.front_end.flush()
        both.engine.take()
        for number, ticket in enumerate(tickets):
            both.engine.respond(ticket, 0, [b"%d" % number * (1 if number % 2 else 4000)])
            both.engine.flush()
        responses = both.front_end.receive()
        assert [ticket for ticket, *_ in responses] == tickets
        assert [payload for _, _, payload, _ in responses] == [
            b"%d" % number * (1 if number % 2 else 4000) for number in range(64)
        ]


def test_counters() -> None:
    with pair() as both:
        assert both.engine.counters() == [0] * 64
        both.front_end.counters[3] += 5
        both.front_end.counters[63] = (1 << 64) - 1
        assert both.engine.counters() == [0] * 3 + [5] + [0] * 59 + [(1 << 64) - 1]


def test_close_wakes_the_receiving_thread() -> None:
    with pair() as both:
        received: list[object] = []
        thread = threading.Thread(target=lambda: received.append(both.front_end.receive()))
        thread.start()
        both.front_end.close()
        thread.join()
        assert received == [[]]
        assert both.front_end.receive() == []
        with pytest.raises(LinkClosed):
            both.front_end.submit(b"m")
        assert not both.front_end.cancel(0)


def test_what_was_published_is_received_after_close() -> None:
    with pair() as both:
        answered, waiting = both.front_end.submit(b"1"), both.front_end.submit(b"2", context="context")
        both.front_end.flush()
        both.engine.take()
        both.engine.respond(answered, 0, [b"r"])
        both.engine.flush()
        both.front_end.close()
        both.front_end.close()
        assert both.front_end.receive() == [(answered, 0, b"r", None)]
        assert both.front_end.receive() == []
        assert both.front_end.outstanding() == [(waiting, "context")]


def test_a_released_link_keeps_no_descriptor_and_can_still_be_called() -> None:
    before = open_files()
    with pair() as both:
        opened = len(open_files() - before)
        ticket = both.front_end.submit(b"m" * 5000)
        both.front_end.counters[1] = 5
        both.front_end.release()
        both.front_end.release()
        assert len(open_files() - before) == opened - 3
        both.front_end.counters[1] += 1
        assert both.engine.counters()[1] == 5
        both.front_end.flush()
        assert both.front_end.receive() == []
        assert both.front_end.outstanding() == []
        assert not both.front_end.cancel(ticket)
        with pytest.raises(LinkClosed):
            both.front_end.submit(b"m")
        with pytest.raises(LinkClosed):
            both.front_end.begun(ticket)
        with pytest.raises(LinkError):
            both.front_end.message_of(ticket)


def test_what_was_not_flushed_is_not_published_after_close() -> None:
    with pair() as both:
        answered = both.front_end.submit(b"1")
        both.front_end.flush()
        both.engine.take()
        both.engine.respond(answered, 0, [b"r" * 5000])
        both.engine.flush()
        waiting = both.front_end.submit(b"2")
        both.front_end.close()
        assert len(both.front_end.receive()) == 1
        both.front_end.flush()
        assert both.engine.take() == ([], [])
        assert both.front_end.outstanding() == [(waiting, None)]


def test_requests_that_had_not_begun_can_be_sent_to_another_engine() -> None:
    with pair() as both:
        small = both.front_end.submit(b"small", 5.0, b"caller")
        large = both.front_end.submit(b"large" * 10_000, 6.0, b"metadata")
        begun = both.front_end.submit(b"begun")
        both.front_end.flush()
        both.engine.take()
        both.engine.mark_begun([begun])
        both.engine.close()
        both.front_end.close()
        assert both.front_end.receive() == []
        assert sorted(both.front_end.outstanding()) == [(small, None), (large, None), (begun, None)]
        assert [both.front_end.begun(ticket) for ticket in (small, large, begun)] == [False, False, True]
        assert both.front_end.message_of(small) == (b"small", 5.0, b"caller")
        assert both.front_end.message_of(large) == (b"large" * 10_000, 6.0, b"metadata")


def test_the_mark_of_a_slots_last_request_is_not_the_next_ones() -> None:
    with pair(slots=1) as both:
        for _ in range(2):
            ticket = both.front_end.submit(b"m")
            assert not both.front_end.begun(ticket)
            both.front_end.flush()
            both.engine.take()
            both.engine.mark_begun([ticket])
            assert both.front_end.begun(ticket)
            both.engine.respond(ticket, 0, [])
            both.engine.flush()
            both.front_end.receive()


def test_a_closed_engine_does_nothing() -> None:
    with pair() as both:
        tickets = [both.front_end.submit(b"m" * 10_000) for _ in range(2)]
        both.front_end.flush()
        both.engine.take()
        both.engine.respond(tickets[1], 0, [b"r"])
        both.engine.close()
        both.engine.close()
        both.engine.respond(tickets[0], 0, [b"r"])
        both.engine.mark_begun(tickets)
        both.engine.flush()
        assert both.engine.take() == ([], [])
        assert both.engine.counters() == []
        assert both.engine.active == 0
        assert not both.readable()


def test_no_room_must_be_small() -> None:
    for no_room in ((256, b""), (-1, b""), (0, b"n" * 4097)):
        with pytest.raises(ValueError, match="no_room"):
            EngineLink(create_link(1, 0, 0), no_room=no_room)


def test_without_extents_only_small_messages_pass() -> None:
    files = create_link(1, 0, 0)
    engine = EngineLink(files.duplicate(), no_room=NO_ROOM)
    front_end = FrontEndLink(files)
    with pytest.raises(LinkFull):
        front_end.submit(b"m" * 4097)
    ticket = front_end.submit(b"m" * 4096)
    front_end.flush()
    engine.take()
    engine.respond(ticket, 0, [b"r" * 4097])
    engine.flush()
    assert front_end.receive() == [(ticket, *NO_ROOM, None)]
    front_end.release()
    engine.close()


def test_memory_of_large_messages_is_given_back() -> None:
    def kept(both: Pair) -> int:
        return os.fstat(both.files.memory).st_blocks * 512

    with pair(request_bytes=64 << 20, response_bytes=64 << 20, keep_bytes=1 << 20) as both:
        for _ in range(3):
            both.round_trip(b"m" * (50 << 20), b"r" * (50 << 20))
            # The engine reads the release of the last response with the next request.
            both.round_trip(b"m", b"r")
            assert kept(both) < 3 << 20
