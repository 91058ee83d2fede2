"""Calls of the lane in any order of events and threads: each ends once, and nothing is left open.

Each seed is another interleaving of the polling thread, clients, the network, threads that
complete requests, and a drain. A run that lost a wake-up ends when no thread can continue.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import pytest
from support.batcher.interleave import ControlledThread, Interleaver
from support.server.scripted_core import Core, WireCall
from support.server.scripted_service import failure, shared_state, success

from tensorferry.batcher import Cancelled
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError, NotReadyError, UnauthenticatedError
from tensorferry.server.identity import ANONYMOUS, ClientIdentity, Metadata
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.security.access_control import AccessControl
from tensorferry.server.transport.lane.lane import Lane
from tensorferry.server.wire.receiving import decompress

# The errors of requests that fail, and of requests during a drain.
FAILS, STOPS = "what to change", "the server is shutting down"

OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
MAX_STREAMS, MAX_IN_FLIGHT = 2, 3


@dataclass(eq=False)
class Waiting(InferenceCall):
    """A request of the service."""

    service: LoomedService
    request_id: str
    complete: Callable[[InferenceReply], None] | None

    def finish(self, reply: InferenceReply) -> None:
        complete, self.complete = self.complete, None
        if complete is not None:
            if self in self.service.waiting:
                self.service.waiting.remove(self)
            complete(reply)
            self.service.done.append(self.request_id)

    def cancel(self) -> None:
        self.service.core.pause()
        self.finish(failure(self.request_id, Cancelled("the caller left")))


class LoomedService(InferenceService):
    """Completes requests at once, on another thread, or when they are cancelled."""

    def __init__(self, core: Core) -> None:
        super().__init__(ModelRegistry())
        self.core = core
        self.waiting: list[Waiting] = []
        self.received: list[str] = []
        self.done: list[str] = []
        # Called with each request's client.
        self.in_flight: Callable[[str], None] = lambda client: None
        # Clients whose requests end only when they are withdrawn.
        self.stuck: set[str] = set()

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata = (),
        caller: ClientIdentity = ANONYMOUS,
        **options: Any,
    ) -> InferenceCall:
        self.core.pause()
        request_id = pb.ModelInferRequest.FromString(decompress(data, 1 << 20)).id
        self.received.append(request_id)
        self.in_flight(request_id.partition(".")[0])
        call = Waiting(self, request_id, complete)
        if request_id.partition(".")[0] in self.stuck:
            pass
        elif self.draining:
            call.finish(failure(request_id, NotReadyError(STOPS)))
        elif self.core.random.random() < 0.2:
            call.finish(success(request_id))
        else:
            self.waiting.append(call)
        self.core.pause()
        return call

    def turn(self) -> None:
        """Completes some request."""
        call = self.core.random.choice(self.waiting)
        if self.core.random.random() < 0.8:
            call.finish(success(call.request_id))
        else:
            call.finish(failure(call.request_id, InvalidRequestError(FAILS)))


@dataclass
class Client:
    """A call as its client sees it."""

    call: WireCall
    name: str
    order: str | None
    leaves: bool = False
    # Of its stream, the first error is the end.
    ends: bool = False
    sent: list[str] = field(default_factory=list)

    @property
    def got(self) -> list[str]:
        """The ids of the answers, in their order."""
        if self.order is None:
            return [pb.ModelInferResponse.FromString(data).id for data in self.call.got]
        return [pb.ModelStreamInferResponse.FromString(data).infer_response.id for data in self.call.got]


class Fickle(AccessControl):
    """Accepts a caller and later refuses it; its files have always changed."""

    def __init__(self, random: random.Random) -> None:
        super().__init__()
        self._random = random
        self._looks = 0

    @property
    def generation(self) -> int:
        self._looks += 1
        return self._looks

    def admit(self, *call: Any) -> ClientIdentity:
        if self._random.random() < 0.2:
            raise UnauthenticatedError("who are you")
        return ANONYMOUS


class Unpackers(Executor):
    """Work that the world's threads do."""

    def __init__(self) -> None:
        self.given: list[Callable[[], Any]] = []
        self.undone = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given.append(fn)
        self.undone += 1
        return Future()

    def turn(self) -> None:
        self.given.pop(0)()
        self.undone -= 1


class World:
    """A lane, its clients, and a thread that drains it, made from a seed."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.interleaver = Interleaver(seed)
        self.core = Core(self.interleaver, seed, monkeypatch)
        self.service = LoomedService(self.core)
        self.unpackers = Unpackers()
        self.asks = self.random.random() < 0.4
        self.lane = Lane(
            cast(Any, None),
            self.service,
            shared_state(Fickle(self.random) if self.asks else None),
            max_streams=MAX_STREAMS,
            max_in_flight=MAX_IN_FLIGHT,
            unpackers=self.unpackers,
        )
        self.service.in_flight = self.check_in_flight
        self.clients: list[Client] = []
        self.drains = self.random.random() < 0.5
        # Clients that are not done, and the drain.
        self.acting = 0
        self.polled = False

    def run(self) -> None:
        """Everything from the first call to the last, and what must be true of it."""
        self.interleaver.run(self.main)
        self.check()

    def main(self) -> None:
        threads = [
            ControlledThread(self.interleaver, self.poll, "poll"),
            ControlledThread(self.interleaver, self.network, "network"),
        ]
        threads += [
            ControlledThread(self.interleaver, work, f"{work.__name__} {number}")
            for work in (self.complete, self.unpack)
            for number in range(2)
        ]
        for number in range(self.random.randint(1, 3)):
            kind = self.random.choice(["unary", "request", "completion", "wrong"])
            threads.append(
                ControlledThread(self.interleaver, self._client(str(number), kind), f"client {number}")
            )
            self.acting += 1
        if self.drains:
            self.acting += 1
            threads.append(ControlledThread(self.interleaver, self.drain, "drain"))
        for thread in threads:
            thread.start()

    def poll(self) -> None:
        self.core.poll(
            self.lane,
            lambda: (
                self.acting == self.unpackers.undone == 0
                and len(self.service.done) == len(self.service.received)
            ),
        )
        self.polled = True

    def network(self) -> None:
        """Delivers what the server sends, when it likes."""

        def sending() -> list[WireCall]:
            return [call for call in self.core.calls if call.sending and not call.over]

        while True:
            self.interleaver.wait(lambda: self.polled or bool(sending()))
            if not (calls := sending()):
                return
            self.random.choice(calls).deliver()

    def complete(self) -> None:
        while True:
            self.interleaver.wait(lambda: self.polled or bool(self.service.waiting))
            if not self.service.waiting:
                return
            self.service.turn()

    def unpack(self) -> None:
        while True:
            self.interleaver.wait(lambda: self.polled or bool(self.unpackers.given))
            if not self.unpackers.given:
                return
            self.unpackers.turn()

    def drain(self) -> None:
        self.core.pause()
        self.service.begin_drain()
        self.core.pause()
        self.lane.streams.begin_drain()
        self.acting -= 1

    def _client(self, name: str, kind: str) -> Callable[[], None]:
        def run() -> None:
            order = None if kind == "unary" else kind
            tag = self.lane._unary_arrived if order is None else self.lane._stream_arrived
            ends = order is not None and self.random.random() < 0.4
            metadata = () if order is None else (("tensorferry-stream-order", order),)
            if ends:
                metadata = (*metadata, ("triton_grpc_error", "true"))
            client = Client(self.core.arrive(tag, metadata), name, order, self.random.random() < 0.3, ends)
            if client.leaves and self.random.random() < 0.5:
                self.service.stuck.add(name)
            self.clients.append(client)
            self._act(client)
            self.interleaver.wait(lambda: client.call.over)
            self.acting -= 1

        return run

    def _act(self, client: Client) -> None:
        call = client.call
        for number in range(1 if client.order is None else self.random.randint(0, 5)):
            self.core.pause()
            client.sent.append(f"{client.name}.{number}")
            message = pb.ModelInferRequest(id=client.sent[-1]).SerializeToString()
            call.sent.append(gzip.compress(message) if self.random.random() < 0.3 else message)
            call.settle()
        self.core.pause()
        if client.leaves:
            call.cancel()
        elif client.order is None or not self.drains or self.random.random() < 0.5:
            # Else only the drain ends it.
            call.half_closed = True
            call.settle()

    def received_of(self, client: Client) -> list[str]:
        return [each for each in self.service.received if each.startswith(f"{client.name}.")]

    def check_in_flight(self, name: str) -> None:
        (client,) = [each for each in self.clients if each.name == name]
        sent = len(client.got) + len(client.call.collected)
        assert len(self.received_of(client)) - sent <= MAX_IN_FLIGHT

    def check(self) -> None:
        service = self.service
        assert sorted(service.done) == sorted(service.received), "a request did not end once"
        assert self.lane.streams.open_streams == 0
        assert self.lane.admission.calls.wait_until_none(0), "a call is still counted"
        for client in self.clients:
            mine = self.received_of(client)
            assert mine == client.sent[: len(mine)], "requests out of order, or twice"
            self._check_answers(client, mine)

    def _check_answers(self, client: Client, received: list[str]) -> None:
        call, got = client.call, client.got
        assert call.cancelled or not call.collected, "no write follows"
        if client.order == "request":
            assert got == received[: len(got)]
        assert len(set(got)) == len(got)
        assert set(got) <= set(received)
        if client.ends:
            streamed = [pb.ModelStreamInferResponse.FromString(data) for data in call.got]
            assert not any(message.error_message for message in streamed), "an error that is not the end"
        if call.status is None:
            assert call.cancelled
        elif client.order is None:
            assert (call.status.code is OK) == (len(got) == 1)
        elif call.status.code is OK:
            assert sorted(got) == sorted(client.sent), "ended well, and an answer is missing"
        elif client.ends and call.status.message in (FAILS, STOPS):
            assert len(got) < len(received), "what failed is answered too"
        elif call.status.code is grpc.StatusCode.UNAUTHENTICATED:
            assert self.asks
            assert sorted(got) == sorted(received), "what was accepted is not answered"
        elif call.status.code is UNAVAILABLE:
            assert self.drains
            assert sorted(got) == sorted(received), "what was accepted is not answered"
        else:
            wrong = client.order == "wrong"
            code = grpc.StatusCode.INVALID_ARGUMENT if wrong else grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (call.status.code, received) == (code, [])


@pytest.mark.parametrize("hundred", range(10))
def test_every_call_ends_once_and_nothing_is_left_open(hundred: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        try:
            with monkeypatch.context() as patch:
                World(seed, patch).run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
