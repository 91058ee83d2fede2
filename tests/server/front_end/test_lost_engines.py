"""Requests of engines that die: the next engine gets them, or they are tried one by one. The test plays the engines."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Iterator
from typing import Any

import pytest
from polling import until
from support.server.rig import Replies, fp32, request

from tensorferry.batcher import Cancelled
from tensorferry.server import refused_requests
from tensorferry.server.front_end.absent_engine import HOLD_SECONDS, AbsentEngine
from tensorferry.server.front_end.engine_connection import LOST, NO_ENGINE, EngineConnection
from tensorferry.server.front_end.remote_service import RemoteService
from tensorferry.server.front_end.trials import Trials
from tensorferry.server.inference.reply import InferenceCall
from tensorferry.server.inference.request_limits import DEFAULT_LIMITS
from tensorferry.server.link import EngineLink, FrontEndLink, LinkFiles, create_link
from tensorferry.server.link_messages import ANSWERED
from tensorferry.server.refused_requests import REFUSED, RefusedRequests, digest_of
from tensorferry.server.status import PUSHBACK_KEY, Status, StatusCode, trailing_metadata

NO_ROOM = (8, b"no room")


class NoBurst:
    """A `ResponseBurstHook` that does nothing."""

    def begin(self, count: int) -> None:
        pass

    def end(self) -> None:
        pass


class Engine:
    """The engine's side of a link, with the messages of requests that have no response, by ticket."""

    def __init__(self, files: LinkFiles) -> None:
        self._link = EngineLink(files, no_room=NO_ROOM)
        self.waiting: dict[int, bytes] = {}

    def take(self, count: int = 1) -> list[bytes]:
        """Wait until there are so many new requests; return their messages."""
        taken: list[bytes] = []
        while len(taken) < count:
            select.select([self._link.fileno()], [], [])
            for ticket, message, _, _ in self._link.take().submitted:
                self.waiting[ticket] = bytes(message)
                taken.append(bytes(message))
        return taken

    def await_cancellation(self) -> list[bytes]:
        """Wait until requests are cancelled; return their messages."""
        select.select([self._link.fileno()], [], [])
        return [self.waiting[ticket] for ticket in self._link.take().cancelled]

    def begin(self, *messages: bytes) -> None:
        self._link.mark_begun([ticket for ticket, message in self.waiting.items() if message in messages])

    def answer(self, *messages: bytes) -> None:
        for ticket, message in list(self.waiting.items()):
            if message in messages:
                del self.waiting[ticket]
                self._link.respond(ticket, ANSWERED, [b"answer to " + message])
        self._link.flush()


class FrontEnd:
    """The service under test, and what it has reported to the supervisor."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, dict[str, Any]]] = []
        self.trials = Trials(lambda kind, **fields: self.reports.append((kind, fields)))
        self.now = 100.0
        self.service = RemoteService(DEFAULT_LIMITS, NoBurst(), self.trials, clock=lambda: self.now)

    def connect(self) -> Engine:
        files = create_link(8)
        engine = Engine(files.duplicate())
        self.service.connect(FrontEndLink(files))
        return engine

    def try_suspects(self) -> Engine:
        """Give it an engine for its suspects."""
        files = create_link(8)
        engine = Engine(files.duplicate())
        self.trials.connect(FrontEndLink(files))
        self.trials.begin()
        return engine

    def ask(self, message: bytes) -> tuple[InferenceCall, Replies]:
        replies = Replies()
        return self.service.submit(message, math.inf, replies), replies

    def lose(self, count: int, *, begun: bool = True) -> list[tuple[InferenceCall, Replies]]:
        """Send the first requests to an engine that dies."""
        engine = self.connect()
        asked = [self.ask(message) for message in MESSAGES[:count]]
        engine.take(count)
        if begun:
            engine.begin(*MESSAGES)
        self.service.disconnect()
        return asked

    def counts(self) -> list[int]:
        """The numbers of suspects that were reported."""
        return [fields["count"] for kind, fields in self.reports if kind == "suspects"]

    def status(self, replies: Replies) -> Status:
        reply = replies.first()
        assert len(replies.all) == 1
        with pytest.raises(Exception) as raised:  # noqa: PT011
            reply.pieces()
        return self.service.status_of(raised.value, reply)


@pytest.fixture
def front_end() -> Iterator[FrontEnd]:
    made = FrontEnd()
    yield made
    made.service.disconnect()
    made.service.give_up()


def message(name: str, rows: int = 1) -> bytes:
    asked = request({"x": fp32(rows, 3)})
    asked.id = name
    return asked.SerializeToString()


# The second is in an extent.
MESSAGES = [message("0"), message("1", 4000), message("2"), message("3")]


def answered(replies: Replies, message: bytes) -> bool:
    reply = replies.first()
    assert len(replies.all) == 1
    return b"".join(reply.pieces()) == b"answer to " + message


def test_requests_that_had_not_begun_are_answered_by_the_next_engine(front_end: FrontEnd) -> None:
    asked = front_end.lose(3, begun=False)
    assert not any(replies.all for _, replies in asked)
    engine = front_end.connect()
    assert engine.take(3) == MESSAGES[:3]
    engine.answer(*MESSAGES)
    assert all(answered(replies, sent) for (_, replies), sent in zip(asked, MESSAGES, strict=False))
    assert front_end.counts() == []


def test_the_rest_of_a_burst_waits_for_the_next_engine(front_end: FrontEnd) -> None:
    front_end.lose(1)
    asked = [front_end.ask(message) for message in MESSAGES[1:]]
    engine = front_end.connect()
    assert engine.take(3) == MESSAGES[1:]
    engine.answer(*MESSAGES)
    assert all(answered(replies, sent) for (_, replies), sent in zip(asked, MESSAGES[1:], strict=True))


def test_requests_that_begin_to_wait_while_an_engine_comes_are_sent(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that submits was suspended between its look at the engine and the submission."""
    front_end.lose(0)
    engines = []
    submit = AbsentEngine.submit

    def late(self: AbsentEngine, *request: Any) -> None:
        engines.append(front_end.connect())
        submit(self, *request)

    monkeypatch.setattr(AbsentEngine, "submit", late)
    _, replies = front_end.ask(MESSAGES[0])
    assert engines[0].take() == MESSAGES[:1]
    engines[0].answer(MESSAGES[0])
    assert answered(replies, MESSAGES[0])


def test_a_request_that_finds_the_link_closed_waits(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    front_end.connect()
    submit = EngineConnection.submit

    def late(self: EngineConnection, *request: Any) -> None:
        front_end.service.disconnect()
        submit(self, *request)

    monkeypatch.setattr(EngineConnection, "submit", late)
    _, replies = front_end.ask(MESSAGES[0])
    monkeypatch.undo()
    engine = front_end.connect()
    assert engine.take() == MESSAGES[:1]
    engine.answer(MESSAGES[0])
    assert answered(replies, MESSAGES[0])


def test_later_requests_do_not_wait_for_an_engine(front_end: FrontEnd) -> None:
    """The server says NOT_SERVING, and another may be free."""
    front_end.lose(1, begun=False)
    front_end.now += HOLD_SECONDS
    status = front_end.status(front_end.ask(MESSAGES[1])[1])
    assert (status.code, status.message) == (StatusCode.UNAVAILABLE, NO_ENGINE)
    assert PUSHBACK_KEY in dict(trailing_metadata(status))


def test_requests_that_no_engine_comes_for_can_be_retried(front_end: FrontEnd) -> None:
    ((_, waiting),) = front_end.lose(1, begun=False)
    _, later = front_end.ask(MESSAGES[2])
    front_end.service.give_up()
    assert front_end.status(later).message == NO_ENGINE
    assert front_end.status(front_end.ask(MESSAGES[3])[1]).message == NO_ENGINE
    status = front_end.status(waiting)
    assert (status.code, status.message) == (StatusCode.UNAVAILABLE, NO_ENGINE)
    assert PUSHBACK_KEY in dict(trailing_metadata(status))


def test_suspects_that_are_not_tried_must_not_be_retried_freely(front_end: FrontEnd) -> None:
    ((_, suspect),) = front_end.lose(1)
    front_end.service.give_up()
    status = front_end.status(suspect)
    assert (status.code, status.message) == (StatusCode.UNAVAILABLE, LOST)
    assert trailing_metadata(status) == ()


def test_suspects_are_tried_one_at_a_time(front_end: FrontEnd) -> None:
    asked = front_end.lose(3)
    assert front_end.counts() == [3]
    engine = front_end.try_suspects()
    for (_, replies), sent in zip(asked, MESSAGES, strict=False):
        assert engine.take() == [sent]
        engine.answer(sent)
        assert answered(replies, sent)
    assert until(lambda: front_end.counts() == [3, 0])
    front_end.trials.end(died=False)
    assert front_end.counts() == [3, 0, 0]


def test_the_request_that_ends_the_engine_again_is_refused(front_end: FrontEnd) -> None:
    asked = front_end.lose(3)
    engine = front_end.try_suspects()
    assert engine.take() == MESSAGES[:1]
    engine.answer(MESSAGES[0])
    engine.take()
    front_end.trials.end(died=True)
    status = front_end.status(asked[1][1])
    assert (status.code, status.message) == (StatusCode.INTERNAL, REFUSED)
    (refusal,) = [fields for kind, fields in front_end.reports if kind == "refuse"]
    assert refusal["digest"] == digest_of(MESSAGES[1])
    assert refusal["until"] > time.monotonic()
    assert front_end.counts()[-1] == 1
    # The neighbours get their answers.
    engine = front_end.try_suspects()
    assert engine.take() == MESSAGES[2:3]
    engine.answer(MESSAGES[2])
    assert answered(asked[0][1], MESSAGES[0])
    assert answered(asked[2][1], MESSAGES[2])
    # The same bytes are not run again; others are.
    engine = front_end.connect()
    assert front_end.status(front_end.ask(MESSAGES[1])[1]).message == REFUSED
    front_end.ask(MESSAGES[3])
    assert engine.take() == MESSAGES[3:4]
    engine.answer(MESSAGES[3])


def test_what_another_front_end_found_is_refused(front_end: FrontEnd) -> None:
    front_end.trials.refuse(digest_of(MESSAGES[0]), time.monotonic() + 100)
    engine = front_end.connect()
    assert front_end.status(front_end.ask(MESSAGES[0])[1]).code is StatusCode.INTERNAL
    _, replies = front_end.ask(MESSAGES[1])
    engine.take()
    engine.answer(MESSAGES[1])
    assert answered(replies, MESSAGES[1])


def test_a_request_that_loses_two_engines_is_a_suspect(front_end: FrontEnd) -> None:
    """It may end the engine before its batch begins."""
    ((_, replies),) = front_end.lose(1, begun=False)
    engine = front_end.connect()
    engine.take()
    front_end.service.disconnect()
    assert front_end.counts() == [1]
    engine = front_end.try_suspects()
    engine.take()
    engine.answer(MESSAGES[0])
    assert answered(replies, MESSAGES[0])


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_can_be_cancelled_while_it_waits(front_end: FrontEnd, begun: bool) -> None:
    ((call, replies),) = front_end.lose(1, begun=begun)
    call.cancel()
    call.cancel()
    with pytest.raises(Cancelled):
        replies.first().pieces()
    assert len(replies.all) == 1
    # Nothing is left for the next engine, or to be tried.
    engine = front_end.connect()
    front_end.ask(MESSAGES[2])
    assert engine.take() == MESSAGES[2:3]
    front_end.try_suspects()
    assert until(lambda: front_end.counts()[-1:] == [0])


def test_a_request_can_be_cancelled_during_its_trial(front_end: FrontEnd) -> None:
    ((call, replies),) = front_end.lose(1)
    engine = front_end.try_suspects()
    engine.take()
    call.cancel()
    assert engine.await_cancellation() == MESSAGES[:1]
    engine.answer(MESSAGES[0])
    assert answered(replies, MESSAGES[0])


def test_an_engine_for_trials_that_cannot_start_ends_them(front_end: FrontEnd) -> None:
    asked = front_end.lose(2)
    front_end.trials.connect(FrontEndLink(create_link(8)))
    front_end.trials.end(died=True)
    assert [front_end.status(replies).message for _, replies in asked] == [LOST, LOST]
    assert front_end.counts() == [2, 0]


def test_a_drain_during_a_trial_accuses_nobody(front_end: FrontEnd) -> None:
    ((_, replies),) = front_end.lose(1)
    front_end.try_suspects().take()
    front_end.service.give_up()
    assert front_end.status(replies).message == LOST
    assert {kind for kind, _ in front_end.reports} == {"suspects"}


def test_a_broken_link_ends_the_trials(front_end: FrontEnd) -> None:
    asked = front_end.lose(2)
    files = create_link(8)
    front_end.trials.connect(FrontEndLink(files.duplicate()))
    # More responses than there are slots.
    os.eventfd_write(files.to_front_end, 1 << 20)
    front_end.trials.begin()
    assert [front_end.status(replies).message for _, replies in asked] == [LOST, LOST]
    assert until(lambda: front_end.counts() == [2, 0])
    files.close()


def test_suspects_that_come_during_a_trial_are_tried_too(front_end: FrontEnd) -> None:
    ((_, first),) = front_end.lose(1)
    trial = front_end.try_suspects()
    trial.take()
    engine = front_end.connect()
    _, second = front_end.ask(MESSAGES[1])
    engine.take()
    engine.begin(MESSAGES[1])
    front_end.service.disconnect()
    trial.answer(MESSAGES[0])
    assert trial.take() == MESSAGES[1:2]
    trial.answer(MESSAGES[1])
    assert answered(first, MESSAGES[0])
    assert answered(second, MESSAGES[1])
    assert until(lambda: front_end.counts() == [1, 1, 0])


def test_refusals_end_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    refused = RefusedRequests(lambda: now)
    refused.add(digest_of(b"a"), 10.0)
    assert refused.has(b"a")
    assert not refused.has(b"b")
    now = 10.0
    assert not refused.has(b"a")
    monkeypatch.setattr(refused_requests, "_MOST", 2)
    for each in (b"a", b"b", b"c"):
        refused.add(digest_of(each), 20.0)
    assert [refused.has(each) for each in (b"a", b"b", b"c")] == [False, True, True]
