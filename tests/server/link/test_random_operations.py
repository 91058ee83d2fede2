"""Random operations on both sides of a link, compared with a model that has no shared memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

import pytest
from support.server.link_pair import NO_ROOM, Pair, pair

from tensorferry.server.link import LinkFull, Submitted

SLOTS = 12
REGION = 1 << 20
SIZES = (0, 1, 90, 4095, 4096, 4097, 8192, 8193, 30_000, 100_000, 400_000)
STEPS = 3000


@dataclass
class Request:
    """What the model knows of one request."""

    ticket: int
    message: bytes
    deadline: float
    extra: bytes
    published: bool = False
    cancelled: bool = False
    begun: bool = False
    # As the engine got it; None before and after.
    taken: Submitted | None = None
    response: tuple[int, bytes] | None = None


class Driver:
    """Performs random operations, and knows what must come of each."""

    def __init__(self, both: Pair, random: Random) -> None:
        self._both = both
        self._random = random
        self._number = 0
        # In flight, by ticket.
        self._requests: dict[int, Request] = {}
        # To the engine, in order: requests, and tickets of cancellations. The first were flushed.
        self._unflushed: list[Request | int] = []
        self._published: deque[Request | int] = deque()
        # Responses, in order.
        self._unflushed_responses: list[Request] = []
        self._published_responses: list[Request] = []
        self.full = 0
        self.no_room = 0

    def run(self, steps: int) -> None:
        """Perform random operations, then finish all requests."""
        operations = [
            self.submit,
            self.submit,
            self.flush,
            self.cancel,
            self.take,
            self.begin,
            self.respond,
            self.respond,
            self.flush_responses,
            self.receive,
        ]
        for _ in range(steps):
            self._random.choice(operations)()
            self._check()
        while self._requests:
            for operation in (self.flush, self.take, self.respond, self.flush_responses, self.receive):
                operation()
            self._check()

    def _bytes(self, size: int) -> bytes:
        self._number += 1
        return (b"%8d" % self._number * (size // 8 + 1))[:size]

    def submit(self) -> None:
        message = self._bytes(self._random.choice(SIZES))
        extra = self._bytes(self._random.choice((0, 0, 30, 5000)))
        deadline = self._random.random() * 100
        try:
            ticket = self._both.front_end.submit(message, deadline, extra, self._number)
        except LinkFull as full:
            if full.what == "slots":
                assert len(self._requests) == SLOTS
            else:
                assert len(self._requests) < SLOTS
                self.full += 1
            return
        assert ticket not in self._requests
        self._requests[ticket] = request = Request(ticket, message, deadline, extra)
        self._unflushed.append(request)

    def cancel(self) -> None:
        if not self._requests:
            return
        request = self._random.choice(list(self._requests.values()))
        assert self._both.front_end.cancel(request.ticket) != request.cancelled
        if not request.cancelled:
            request.cancelled = True
            self._unflushed.append(request.ticket)

    def flush(self) -> None:
        self._both.front_end.flush()
        self._published += self._unflushed
        self._unflushed = []

    def take(self) -> None:
        taken = self._both.engine.take()
        submitted = {request[0]: request for request in taken.submitted}
        cancelled: list[int] = []
        order: list[int] = []
        for entry in self._published:
            if isinstance(entry, Request):
                order.append(entry.ticket)
                entry.taken = submitted[entry.ticket]
                assert entry.taken[1:] == (entry.message, entry.deadline, entry.extra)
            else:
                request = self._requests.get(entry)
                if request is not None and request.taken is not None:
                    cancelled.append(entry)
        self._published.clear()
        assert order == [request[0] for request in taken.submitted]
        assert cancelled == taken.cancelled

    def _active(self) -> list[Request]:
        return [request for request in self._requests.values() if request.taken is not None]

    def begin(self) -> None:
        active = self._active()
        begun = self._random.sample(active, self._random.randint(0, len(active)))
        for request in begun:
            request.begun = True
        self._both.engine.mark_begun([request.ticket for request in begun])

    def respond(self) -> None:
        active = self._active()
        if not active:
            return
        request = self._random.choice(active)
        assert request.taken is not None
        assert request.taken[1] == request.message, "the message was overwritten while it was in use"
        code = self._random.randrange(256)
        payload = self._bytes(self._random.choice(SIZES))
        cut = self._random.randint(0, len(payload))
        self._both.engine.respond(request.ticket, code, [payload[:cut], memoryview(payload)[cut:]])
        request.taken = None
        request.response = code, payload
        self._unflushed_responses.append(request)

    def flush_responses(self) -> None:
        self._both.engine.flush()
        self._published_responses += self._unflushed_responses
        self._unflushed_responses = []

    def receive(self) -> None:
        assert self._both.readable() == bool(self._published_responses)
        if not self._published_responses:
            return
        responses = self._both.front_end.receive()
        assert [response[0] for response in responses] == [
            request.ticket for request in self._published_responses
        ]
        for (_, code, payload, _), request in zip(responses, self._published_responses, strict=True):
            assert request.response is not None
            if (code, payload) != request.response:
                assert (code, payload) == NO_ROOM
                assert len(request.response[1]) > 4096
                self.no_room += 1
            del self._requests[request.ticket]
        self._published_responses = []
        # Releases of large responses were published, and all that waited for a flush with them.
        self._published += self._unflushed if any(len(response[2]) > 4096 for response in responses) else []
        if any(len(response[2]) > 4096 for response in responses):
            self._unflushed = []

    def _check(self) -> None:
        front_end = self._both.front_end
        assert front_end.in_flight == len(self._requests)
        assert {ticket for ticket, _ in front_end.outstanding()} == self._requests.keys()
        assert self._both.engine.active == len(self._active())
        for request in self._requests.values():
            assert front_end.begun(request.ticket) == request.begun
        if self._requests and self._random.random() < 0.1:
            request = self._random.choice(list(self._requests.values()))
            assert front_end.message_of(request.ticket) == (request.message, request.deadline, request.extra)


@pytest.mark.parametrize("seed", range(8))
def test_the_link_behaves_as_its_model(seed: int) -> None:
    random = Random(seed)
    with pair(SLOTS, REGION, REGION, keep_bytes=random.choice([0, 1 << 16, 1 << 30])) as both:
        driver = Driver(both, random)
        driver.run(STEPS)
        assert driver.full
        assert driver.no_room
        # Nothing is left: a message and a payload of the whole region fit.
        both.engine.take()
        assert both.round_trip(b"m" * REGION, b"r" * REGION)[1][2] == b"r" * REGION
