"""The state machine of a stream, which every transport uses: limits, order and end."""

from __future__ import annotations

import grpc
import pytest
from support.server.scripted_service import success

from tensorferry.server.inference.reply import BuiltReply, InferenceCall
from tensorferry.server.inference.responses.stream_responses import StreamOptions
from tensorferry.server.status import Status
from tensorferry.server.transport.stream_state import StreamEnd, StreamEntry, StreamState

STOPS = Status(grpc.StatusCode.UNAVAILABLE, "the server is shutting down; open a stream elsewhere")
REFUSED = Status(grpc.StatusCode.PERMISSION_DENIED, "not any more")


def state(*, ordered: bool = True, max_in_flight: int = 4, max_bytes: int = 1000) -> StreamState:
    return StreamState(StreamOptions(ordered), max_in_flight, max_bytes)


def test_fewer_large_requests_are_read() -> None:
    stream = state(max_in_flight=100, max_bytes=1000)
    stream.request_read(600)
    assert stream.may_read
    stream.request_read(1)
    assert not stream.may_read, "the next may have 600 bytes, too"


def test_a_large_response_counts_like_a_large_request() -> None:
    stream = state(max_in_flight=100, max_bytes=1000)
    first = stream.request_read(1)
    stream.request_read(1)
    assert stream.may_read
    stream.completed(first, success("1"), 600)
    assert not stream.may_read


@pytest.mark.parametrize(
    ("half_closed", "draining", "refused", "status"),
    [
        (True, False, False, None),
        (True, True, False, None),
        (False, True, False, STOPS),
        (False, False, True, REFUSED),
        (False, True, True, REFUSED),
    ],
)
def test_a_stream_ends_once_after_its_last_response(
    half_closed: bool, draining: bool, refused: bool, status: Status | None
) -> None:
    stream = state()
    entry = stream.request_read(1)
    if half_closed:
        stream.half_close()
    if draining:
        stream.drain()
    if refused:
        stream.half_close(REFUSED)
    assert not stream.may_read
    assert stream.next_send() is None
    stream.completed(entry, success("1"), 1)
    assert isinstance(stream.next_send(), StreamEntry)
    assert stream.next_send() is None
    stream.sent()
    assert stream.next_send() == StreamEnd(status)
    assert stream.next_send() is None
    assert stream.ended
    assert not stream.may_read


class Answer(BuiltReply):
    """An answer before the last one."""

    __slots__ = ()
    last = False


class Silent(BuiltReply):
    """A last reply that is not sent."""

    __slots__ = ()
    silent = True


def answer(name: str, kind: type[BuiltReply] = Answer) -> BuiltReply:
    return kind(name, list)


def sent(stream: StreamState) -> list[str]:
    """Return the ids of what the stream sends."""
    found = []
    while isinstance(content := stream.next_send(), StreamEntry):
        assert content.reply is not None
        found.append(content.reply.request_id)
        stream.sent()
    return found


@pytest.mark.parametrize("ordered", [True, False])
def test_answers_are_sent_as_they_come(ordered: bool) -> None:
    stream = state(ordered=ordered)
    first, second, third = (stream.request_read(1) for _ in range(3))
    assert stream.answered(second, answer("2a"), 1)
    stream.completed(third, success("3"), 1)
    assert sent(stream) == (["2a"] if ordered else ["2a", "3"])
    assert stream.answered(first, answer("1a"), 1)
    assert stream.answered(second, answer("2b"), 1)
    stream.completed(second, success("2"), 1)
    assert sent(stream) == [*(["3"] if ordered else []), "1a", "2b", "2"]
    assert not stream.answered(second, answer("2c"), 1), "it has its last response"


def test_a_request_is_in_flight_until_its_last_response_is_sent() -> None:
    stream = state(max_in_flight=1)
    entry = stream.request_read(1)
    stream.answered(entry, answer("a"), 1)
    assert sent(stream) == ["a"]
    assert not stream.may_read
    stream.completed(entry, success("last"), 1)
    assert not stream.may_read
    assert sent(stream) == ["last"]
    assert stream.may_read


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("answers", [0, 1])
def test_a_silent_reply_makes_room_and_ends_a_stream(ordered: bool, answers: int) -> None:
    stream = state(ordered=ordered, max_in_flight=2)
    entry, other = stream.request_read(1), stream.request_read(1)
    for _ in range(answers):
        stream.answered(entry, answer("a"), 1)
    stream.completed(other, success("other"), 1)
    stream.completed(entry, answer("last", Silent), 1)
    assert stream.may_read
    stream.half_close()
    assert sent(stream) == (["a", "other"] if answers else ["other"])
    assert stream.ended


def test_calls_that_had_an_answer_are_abandoned_at_the_end() -> None:
    stream = state()
    entries = [stream.request_read(1) for _ in range(3)]
    for entry in entries:
        entry.call = InferenceCall()
    stream.answered(entries[0], answer("a"), 1)
    stream.completed(entries[1], success("2"), 1)
    assert {*map(id, stream.end())} == {id(entry.call) for entry in entries}
    assert not stream.answered(entries[2], answer("b"), 1)
    assert stream.next_send() is None
    assert not stream.may_read


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("taken", [0, 1])
def test_calls_whose_response_was_not_taken_are_listed(taken: int, ordered: bool) -> None:
    stream = state(ordered=ordered)
    entries = [stream.request_read(1) for _ in range(3)]
    calls = [InferenceCall() for _ in entries]
    for entry, call in zip(entries, calls, strict=True):
        entry.call = call
    stream.completed(entries[1], success("1"), 1)
    stream.completed(entries[0], success("0"), 1)
    for _ in range(taken):
        assert stream.next_send() is entries[0 if ordered else 1]
    left = set(stream.end())
    assert left < set(calls) if taken else left == set(calls)
    assert len(left) == 3 - taken
