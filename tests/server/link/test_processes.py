"""A link between two processes, one of them killed after any of its steps."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.open_files import open_files
from support.server import link_child
from support.server.link_child import LARGE, NO_ROOM, SMALL, STEPS, answer

from tensorferry.server.link import EngineLink, FrontEndLink, LinkFiles, create_link


@contextmanager
def child(side: str, last: int, files: LinkFiles) -> Iterator[subprocess.Popen[str]]:
    """The other side of the link. Waits until it was killed."""
    with subprocess.Popen(
        [sys.executable, link_child.__file__, side, str(last), *map(str, files)],
        pass_fds=files,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
            assert process.stdout is not None
            assert process.stdout.read().split() == [str(number) for number in range(last)]
            assert process.wait() == -signal.SIGKILL
        finally:
            process.kill()


def test_a_front_end_is_killed_after_each_step() -> None:
    for last in range(STEPS["front_end"] + 1):
        _serve_a_front_end_that_is_killed(last)


def _serve_a_front_end_that_is_killed(last: int) -> None:
    before = open_files()
    files = create_link(16)
    engine = EngineLink(files.duplicate(), no_room=NO_ROOM)
    messages: list[bytes] = []
    cancelled = 0
    with child("front_end", last, files) as process:
        files.close()
        pidfd = os.pidfd_open(process.pid)
        ended = False
        while not ended:
            readable, _, _ = select.select([engine.fileno(), pidfd], [], [])
            ended = pidfd in readable
            taken = engine.take()
            cancelled += len(taken.cancelled)
            for ticket, message, *_ in taken.submitted:
                messages.append(bytes(message))
                engine.mark_begun([ticket])
                engine.respond(ticket, 0, answer(message))
                del message
            engine.flush()
            del taken
        os.close(pidfd)
    published = [(0, 0), (2, 1), (5, 3), (10, 4), (13, 5)]
    assert len(messages) == max(count for step, count in published if last >= step)
    assert messages == [SMALL, LARGE, LARGE, SMALL, LARGE][: len(messages)]
    assert cancelled <= 2
    assert engine.active == 0
    engine.close()
    del engine
    assert not open_files() - before


def test_an_engine_is_killed_after_each_step() -> None:
    for last in range(STEPS["engine"] + 1):
        _outlive_an_engine(last)


def _outlive_an_engine(last: int) -> None:
    before = open_files()
    files = create_link(16)
    front_end = FrontEndLink(files.duplicate())
    messages = [SMALL, LARGE, SMALL + b"2", LARGE + b"2"]
    with child("engine", last, files):
        files.close()
        tickets = [front_end.submit(message, 5.0, b"caller", message) for message in messages]
        front_end.flush()
    front_end.close()
    responses = front_end.receive() + front_end.receive()
    answered = sum(last >= step for step in (5, 7))
    assert responses == [
        (ticket, 0, b"answer to " + message, message)
        for ticket, message in zip(tickets[:answered], messages, strict=False)
    ]
    assert sorted(front_end.outstanding()) == sorted(
        zip(tickets[answered:], messages[answered:], strict=True)
    )
    begun = [last >= step for step in (2, 3, 99, 8)]
    for index in range(answered, 4):
        assert front_end.begun(tickets[index]) == begun[index]
        assert front_end.message_of(tickets[index]) == (messages[index], 5.0, b"caller")
    front_end.release()
    del front_end
    assert not open_files() - before


@pytest.mark.parametrize("side", sorted(STEPS))
def test_a_dropped_link_is_replaced_by_a_fresh_one(side: str) -> None:
    for _ in range(2):
        if side == "engine":
            _outlive_an_engine(4)
        else:
            _serve_a_front_end_that_is_killed(9)
