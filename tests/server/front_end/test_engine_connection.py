"""Which thread of a front-end receives the engine's responses."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence

import pytest
from support.server.rig import PATIENCE

from tensorferry.server.front_end.engine_connection import EngineConnection
from tensorferry.server.front_end.remote_call import HeldRequest, RemoteCall
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.link import EngineLink, FrontEndLink, create_link
from tensorferry.server.link_messages import ANSWERED

RECEIVER = "engine-responses"


class Rig:
    """A connection, and an engine that answers each request with its message: at each `flush`, or when the test says so."""

    def __init__(self, slots: int = 64) -> None:
        self.files = create_link(slots)
        self.engine = EngineLink(self.files.duplicate(), no_room=(8, b""))
        self.link = FrontEndLink(self.files.duplicate())
        self.at_once = True
        # Message and thread of each reply, and a permit for each.
        self.replies: list[tuple[bytes, str]] = []
        self._replied = threading.Semaphore(0)
        self.bursts: list[int] = []
        self.lost: list[tuple[Sequence[HeldRequest], Sequence[HeldRequest]]] = []
        self._gone = threading.Event()
        flush = self.link.flush

        def flush_and_answer() -> None:
            flush()
            if self.at_once:
                self.answer()

        self.link.flush = flush_and_answer  # type: ignore[method-assign]
        self.connection = EngineConnection(self.link, self, self._lose)

    def begin(self, count: int) -> None:
        self.bursts.append(count)

    def end(self) -> None:
        pass

    def _lose(self, waiting: Sequence[HeldRequest], begun: Sequence[HeldRequest]) -> None:
        self.lost.append((waiting, begun))
        self._gone.set()

    def lost_requests(self) -> tuple[list[bytes], list[bytes]]:
        """Wait until the engine is gone. Return the requests that had not begun, and those that had."""
        assert self._gone.wait(PATIENCE)
        ((waiting, begun),) = self.lost
        return [each.message for each in waiting], [each.message for each in begun]

    def answer(self) -> None:
        for ticket, message, _, _ in self.engine.take().submitted:
            self.engine.respond(ticket, ANSWERED, [message])
        self.engine.flush()

    def submit(self, *messages: bytes) -> None:
        for message in messages:
            self.connection.submit(RemoteCall(self.replied), message, math.inf, b"")

    def replied(self, reply: InferenceReply) -> None:
        self.replies.append((reply.message(), threading.current_thread().name))
        self._replied.release()

    def next_replies(self, count: int) -> list[tuple[bytes, str]]:
        for _ in range(count):
            assert self._replied.acquire(timeout=PATIENCE)
        found, self.replies = self.replies, []
        return found

    def close(self) -> None:
        self.connection.close()
        self.engine.close()
        self.files.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def here() -> str:
    return threading.current_thread().name


def test_the_calling_thread_receives_what_comes_soon(rig: Rig) -> None:
    for number in range(3):
        rig.submit(b"a%d" % number, b"b%d" % number)
        assert rig.connection.run_inline(0.0) == math.inf
        assert rig.next_replies(2) == [(b"a%d" % number, here()), (b"b%d" % number, here())]
    assert rig.bursts == [2, 2, 2]


def test_a_thread_receives_for_callers_that_only_flush(rig: Rig) -> None:
    for _ in range(3):
        rig.submit(b"a")
        rig.connection.flush()
        assert rig.next_replies(1) == [(b"a", RECEIVER)]


def test_late_responses_are_received_and_the_next_not_awaited(rig: Rig) -> None:
    rig.at_once = False
    rig.submit(b"late")
    rig.connection.run_inline(0.0)
    # Another request, while a thread receives.
    rig.submit(b"other")
    rig.connection.run_inline(0.0)
    rig.answer()
    assert rig.next_replies(2) == [(b"late", RECEIVER), (b"other", RECEIVER)]
    rig.at_once = True
    rig.submit(b"next")
    rig.connection.run_inline(0.0)
    assert rig.next_replies(1) == [(b"next", RECEIVER)]


def test_responses_to_many_requests_are_not_awaited(rig: Rig) -> None:
    rig.submit(*[b"m"] * 40)
    rig.connection.run_inline(0.0)
    assert rig.next_replies(40) == [(b"m", RECEIVER)] * 40


def test_the_rest_of_a_burst_is_received_by_the_thread(rig: Rig) -> None:
    rig.at_once = False
    rig.submit(b"first", b"second")
    rig.link.flush()
    (first, *_), (second, *_) = rig.engine.take().submitted
    rig.engine.respond(first, ANSWERED, [b"1"])
    rig.engine.flush()
    rig.connection.run_inline(0.0)
    assert rig.next_replies(1) == [(b"1", here())]
    rig.engine.respond(second, ANSWERED, [b"2"])
    rig.engine.flush()
    assert rig.next_replies(1) == [(b"2", RECEIVER)]


def test_a_reply_that_raises_harms_no_other(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def fail(reply: InferenceReply) -> None:
        raise RuntimeError("broken")

    rig.connection.submit(RemoteCall(fail), b"one", math.inf, b"")
    rig.submit(b"two")
    rig.connection.run_inline(0.0)
    assert rig.next_replies(1) == [(b"two", here())]
    assert "this is a bug" in caplog.text


@pytest.mark.parametrize("inline", [False, True])
def test_an_engine_that_breaks_the_rules_loses_its_requests(rig: Rig, inline: bool) -> None:
    rig.at_once = False
    rig.submit(b"message")
    if inline:
        # More responses than there are slots, before the request is sent.
        os.eventfd_write(rig.files.to_front_end, 1 << 20)
        rig.connection.run_inline(0.0)
    else:
        rig.connection.flush()
        os.eventfd_write(rig.files.to_front_end, 1 << 20)
    assert rig.lost_requests() == ([], [b"message"])


@pytest.mark.parametrize("sent", [0, 1])
def test_close_ends_the_thread_also_in_its_pause(rig: Rig, sent: int) -> None:
    rig.at_once = False
    rig.submit(*[b"message"] * sent)
    if sent:
        rig.connection.run_inline(0.0)
    rig.connection.close()
    assert rig.lost_requests() == ([b"message"] * sent, [])
    # A thread that had submitted before.
    assert rig.connection.run_inline(0.0) == math.inf
