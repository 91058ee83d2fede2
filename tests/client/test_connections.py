"""Several connections to each target: their number, their turns, and repeated calls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import pytest
from client import either
from client.calls import call
from client.either import IDS, KINDS, close
from client.scripted import Context, ScriptedServer, echo, echo_stream

from tensorferry.client import InferenceClient, InferenceError, Retry, aio
from tensorferry.client.connection.endpoints import Endpoints
from tensorferry.client.connection.retry import ANSWERED_KEY, Attempts, RetryBudget
from tensorferry.client.messages.metadata import ModelMetadata, server_processes
from tensorferry.protos import inference_pb2 as pb

ROW = {"x": [1]}
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
METHODS: list[tuple[str, tuple[Any, ...]]] = [
    ("infer", ("row", ROW)), ("submit", ("row", ROW)), ("stream", ("row", [ROW])),
]  # fmt: skip


class Peers:
    """Script that records the connection of each call, and fails all calls with `failure` and `trailers`."""

    def __init__(self, server: ScriptedServer, processes: str | None = None) -> None:
        self.seen: list[str] = []
        self.failure: grpc.StatusCode | None = None
        self.trailers: tuple[tuple[str, str], ...] = ()
        server.servicer.infer, server.servicer.stream = self._infer, self._stream
        if processes is not None:
            server.servicer.models["row"].properties["server_processes"] = processes

    def _infer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        self.seen.append(context.peer())
        if self.failure is not None:
            context.set_trailing_metadata(self.trailers)
            context.abort(self.failure, "scripted failure")
        return echo(request)

    def _stream(
        self, requests: Iterator[pb.ModelInferRequest], context: Context
    ) -> Iterator[pb.ModelStreamInferResponse]:
        self.seen.append(context.peer())
        return echo_stream(requests, context)

    def turns(self) -> list[int]:
        """Return the number of calls of each connection."""
        return list(Counter(self.seen).values())


def infer(client: InferenceClient, count: int) -> None:
    for _ in range(count):
        client.infer("row", ROW, timeout=30)


@pytest.mark.parametrize(("method", "arguments"), METHODS)
def test_calls_take_turns_over_four_connections_for_each_process(
    server: ScriptedServer, client: InferenceClient, method: str, arguments: tuple[Any, ...]
) -> None:
    peers = Peers(server, "2")
    for _ in range(16):
        call(client, method, *arguments, timeout=30)
    assert peers.turns() == [2] * 8
    assert peers.seen[:8] == peers.seen[8:]


@pytest.mark.parametrize(
    ("processes", "connections"), [("1024", 32), (None, 1), ("1", 1), ("1025", 1), ("two", 1)]
)
def test_connections_to_a_server(
    server: ScriptedServer, client: InferenceClient, processes: str | None, connections: int
) -> None:
    peers = Peers(server, processes)
    infer(client, 2 * connections)
    assert peers.turns() == [2] * connections


@pytest.mark.parametrize("text", ["1025", "10000", "0", "-2", "2.0", "", "٢"])
def test_only_a_plausible_number_of_processes_is_believed(text: str) -> None:
    stated = ModelMetadata("row", (), "", (), (), {"server_processes": text})
    assert server_processes(stated) == 1


def test_a_server_with_more_processes_gets_more_connections(
    server: ScriptedServer, client: InferenceClient
) -> None:
    peers = Peers(server)
    for processes, connections in (("2", 8), ("4", 16), ("1", 16)):
        server.servicer.models["row"].properties["server_processes"] = processes
        client.load_model("row", timeout=30)
        client.metadata("row", timeout=30)
        peers.seen.clear()
        infer(client, connections)
        assert peers.turns() == [1] * connections


@pytest.mark.parametrize(("connections", "check"), [(1, True), (3, True), (3, False)])
def test_the_caller_fixes_the_number(server: ScriptedServer, check: bool, connections: int) -> None:
    peers = Peers(server, "2")
    with InferenceClient(server.target, check=check, connections=connections) as client:
        client.metadata("row", timeout=30)
        infer(client, 2 * connections)
    assert peers.turns() == [2] * connections


def test_each_of_several_targets_gets_the_connections(server: ScriptedServer, other: ScriptedServer) -> None:
    """The metadata of one server counts for all, because they are equal."""
    both = [Peers(one, "2") for one in (server, other)]
    with InferenceClient([one.target.replace("127.0.0.1", "localhost") for one in (server, other)]) as client:
        infer(client, 32)
    assert [peers.turns() for peers in both] == [[2] * 8] * 2
    # gRPC balances over a list of addresses.
    both = [Peers(one, "2") for one in (server, other)]
    with InferenceClient([server.target, other.target]) as client:
        infer(client, 8)
    assert sorted(both[0].turns() + both[1].turns()) == [1] * 8


@pytest.mark.parametrize("method", ["infer", "submit"])
@pytest.mark.parametrize(
    ("failure", "trailers", "parameters", "attempts"),
    [
        pytest.param(UNAVAILABLE, ((ANSWERED_KEY, "1"),), {}, 4, id="answered"),
        pytest.param(UNAVAILABLE, (), {}, 2, id="the request may have run"),
        pytest.param(UNAVAILABLE, (), {"sequence_id": 1}, 1, id="a sequence may have run"),
        pytest.param(EXHAUSTED, (("grpc-retry-pushback-ms", "1"),), {}, 5, id="overloaded"),
    ],
)
def test_a_call_is_repeated_on_another_connection(
    server: ScriptedServer,
    method: str,
    failure: grpc.StatusCode,
    trailers: Any,
    parameters: Any,
    attempts: int,
) -> None:
    peers = Peers(server)
    peers.failure, peers.trailers = failure, trailers
    with InferenceClient(server.target, connections=8) as client:
        with pytest.raises(InferenceError):
            call(client, method, "row", ROW, parameters=parameters, timeout=30)
        assert peers.turns() == [1] * attempts
        peers.failure = None
        peers.seen.clear()
        infer(client, 8)
    assert peers.turns() == [1] * 8, "a connection is left out"


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
async def test_close_closes_every_connection(server: ScriptedServer, kind: type[Any]) -> None:
    Peers(server, "2")
    client = kind(server.target)
    await either.call(client, "infer", "row", ROW, timeout=30)
    await close(client)
    await close(client)
    connections = client._endpoints.close()
    assert len(connections) == 8
    for connection in connections:
        for stub in (connection.stub, connection.stream_stub):
            with pytest.raises((ValueError, grpc.aio.UsageError), match="closed"):
                stub.ServerLive(pb.ServerLiveRequest())


async def test_an_unused_client_of_asyncio_is_closed() -> None:
    client = aio.InferenceClient("127.0.0.1:1", connections=4)
    await client.close()
    assert client._opened is None


def test_threads_that_grow_at_once_open_each_connection_once(server: ScriptedServer) -> None:
    Peers(server, "2")
    together = threading.Barrier(8)
    with InferenceClient(server.target) as client, ThreadPoolExecutor(8) as threads:

        def first() -> None:
            together.wait(30)
            client.infer("row", ROW, timeout=30)

        for one in [threads.submit(first) for _ in range(8)]:
            one.result(30)
        assert len(client._endpoints.close()) == 8


def rotation(endpoints: int, connections: int) -> Endpoints:
    """Return a rotation over stand-ins, which are all different."""
    return Endpoints([cast(Any, object)] * endpoints, connections, lambda: 100.0)


def test_nothing_opens_after_close() -> None:
    endpoints = rotation(1, 2)
    opened = endpoints.close()
    endpoints.grow(8)
    assert endpoints.close() == opened
    assert len(opened) == 2


def test_a_repeated_call_never_takes_the_same_connection() -> None:
    """Other calls may have moved the rotation on to it."""
    endpoints = rotation(1, 2)
    attempts = Attempts(RetryBudget(Retry()), pb.ModelInferRequest(), endpoints)
    first = attempts.next()
    endpoints.pick()
    assert attempts.next() is not first


def test_the_only_usable_endpoint_is_tried_again() -> None:
    endpoints = rotation(2, 1)
    first, second = endpoints
    endpoints.failed(second, sent=False)
    assert endpoints.pick(first) is first


def test_a_broken_connection_leaves_its_endpoint_in_the_rotation() -> None:
    endpoints = rotation(2, 2)
    first, second = endpoints
    assert not endpoints.failed(second, sent=True)
    assert len({endpoints.pick() for _ in range(4)}) == 4
    assert endpoints.failed(second, sent=False)
    left = {endpoints.pick() for _ in range(8)}
    assert len(left) == 2
    assert first in left
    assert second not in left
    [another] = set(endpoints.close()) - left - {second}
    endpoints.answered(another)
    assert len({endpoints.pick() for _ in range(4)}) == 4
