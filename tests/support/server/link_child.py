"""One side of a link in a process of its own, which is killed after some step.

    python link_child.py SIDE LAST_STEP MEMORY TO_ENGINE TO_FRONT_END

The side performs its steps one after another. It prints each step's number and, after the last one, kills itself.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable

from tensorferry.server.link import EngineLink, FrontEndLink, LinkFiles, Submitted, Taken

SMALL, LARGE = b"s" * 100, b"l" * 100_000
NO_ROOM = (8, b"no room")


def answer(message: bytes) -> list[bytes | memoryview]:
    """Return the pieces of the response to a message."""
    return [b"answer to ", message]


class FrontEnd:
    """A front-end that sends four requests, and cancels two of them."""

    def __init__(self, files: LinkFiles) -> None:
        self._link = FrontEndLink(files)
        self._tickets: list[int] = []
        self.steps: list[Callable[[], object]] = [
            lambda: self._submit(SMALL),
            self._link.flush,
            lambda: self._submit(LARGE),
            lambda: self._submit(LARGE),
            self._link.flush,
            lambda: self._link.cancel(self._tickets[1]),
            self._link.flush,
            lambda: self._submit(SMALL),
            lambda: self._link.cancel(self._tickets[3]),
            self._link.flush,
            lambda: self._receive(4),
            lambda: self._submit(LARGE),
            self._link.flush,
            lambda: self._receive(5),
        ]
        self._received = 0

    def _submit(self, message: bytes) -> None:
        self._tickets.append(self._link.submit(message))

    def _receive(self, until: int) -> None:
        while self._received < until:
            for _, _, payload, _ in self._link.receive():
                assert payload in (b"answer to " + SMALL, b"answer to " + LARGE)
                self._received += 1


class Engine:
    """An engine that gets four requests at once, small and large in turn, and responds to two."""

    def __init__(self, files: LinkFiles) -> None:
        self._link = EngineLink(files, no_room=NO_ROOM)
        self._taken: list[Submitted] = []
        self.steps: list[Callable[[], object]] = [
            self._take,
            lambda: self._link.mark_begun([self._taken[0][0]]),
            lambda: self._link.mark_begun([self._taken[1][0]]),
            lambda: self._respond(0),
            self._link.flush,
            lambda: self._respond(1),
            self._link.flush,
            lambda: self._link.mark_begun([self._taken[3][0]]),
        ]

    def _take(self) -> None:
        while len(self._taken) < 4:
            select.select([self._link], [], [])
            taken: Taken = self._link.take()
            self._taken += taken.submitted

    def _respond(self, index: int) -> None:
        ticket, message, *_ = self._taken[index]
        self._link.respond(ticket, 0, answer(message))


STEPS = {"front_end": 14, "engine": 8}


def main() -> None:
    """Perform the steps."""
    side: FrontEnd | Engine
    files = LinkFiles(*map(int, sys.argv[3:]))
    side = FrontEnd(files) if sys.argv[1] == "front_end" else Engine(files)
    assert len(side.steps) == STEPS[sys.argv[1]]
    for number in range(int(sys.argv[2])):
        side.steps[number]()
        print(number, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
