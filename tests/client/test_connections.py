"""Several connections to each target: their number, their turns, and repeated calls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import pytest
from client.either import IDS, KINDS, call, close
from client.scripted import Context, ScriptedServer, echo, echo_stream, model

from tensorferry.client import InferenceClient, InferenceError, InvalidInput, Retry, aio
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
either_kind = pytest.mark.parametrize("kind", KINDS, ids=IDS)


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


@pytest.fixture
def other(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """A second server with the model `row`."""
    scripted = ScriptedServer.make()
    scripted.servicer.models = {"row": model("row", {"x": "INT64 1"}, {"x": "INT64 1"})}
    scripted.server.start()
    yield scripted
    scripted.server.stop(None).wait()


@either_kind
@pytest.mark.parametrize(("method", "arguments"), METHODS)
async def test_calls_take_turns_over_four_connections_for_each_process(
    server: ScriptedServer, kind: type[Any], method: str, arguments: tuple[Any, ...]
) -> None:
    peers = Peers(server, "2")
    client = kind(server.target)
    for _ in range(16):
        await call(client, method, *arguments, timeout=30)
    await close(client)
    assert peers.turns() == [2] * 8
    assert peers.seen[:8] == peers.seen[8:]


@either_kind
async def test_a_server_gets_at_most_32_connections(server: ScriptedServer, kind: type[Any]) -> None:
    peers = Peers(server, "1024")
    client = kind(server.target)
    for _ in range(64):
        await call(client, "infer", "row", ROW, timeout=30)
    await close(client)
    assert peers.turns() == [2] * 32


@either_kind
@pytest.mark.parametrize("processes", [None, "1", "1025", "two"])
async def test_a_server_of_one_process_gets_one_connection(
    server: ScriptedServer, kind: type[Any], processes: str | None
) -> None:
    peers = Peers(server, processes)
    client = kind(server.target)
    for _ in range(4):
        await call(client, "infer", "row", ROW, timeout=30)
    await close(client)
    assert peers.turns() == [4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2", 2), ("1024", 1024), ("1025", 1), ("10000", 1), ("0", 1), ("-2", 1), ("2.0", 1), ("", 1), ("٢", 1)],
)
def test_only_a_plausible_number_of_processes_is_believed(text: str, expected: int) -> None:
    stated = ModelMetadata("row", (), "", (), (), {"server_processes": text})
    assert server_processes(stated) == expected


@either_kind
async def test_a_server_with_more_processes_gets_more_connections(
    server: ScriptedServer, kind: type[Any]
) -> None:
    peers = Peers(server)
    client = kind(server.target)
    for processes, connections in (("2", 8), ("4", 16), ("1", 16)):
        server.servicer.models["row"].properties["server_processes"] = processes
        await call(client, "load_model", "row", timeout=30)
        await call(client, "metadata", "row", timeout=30)
        peers.seen.clear()
        for _ in range(connections):
            await call(client, "infer", "row", ROW, timeout=30)
        assert peers.turns() == [1] * connections
    await close(client)


@either_kind
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("connections", [1, 3])
async def test_the_caller_fixes_the_number(
    server: ScriptedServer, kind: type[Any], check: bool, connections: int
) -> None:
    peers = Peers(server, "2")
    client = kind(server.target, check=check, connections=connections)
    await call(client, "metadata", "row", timeout=30)
    for _ in range(2 * connections):
        await call(client, "infer", "row", ROW, timeout=30)
    await close(client)
    assert peers.turns() == [2] * connections


@either_kind
@pytest.mark.parametrize("wrong", [0, 65, -1, "4", 1.5, True])
def test_a_wrong_number_is_refused(kind: type[Any], wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="connections expects an int from 1 to 64"):
        kind("127.0.0.1:1", connections=wrong)


@either_kind
async def test_each_of_several_targets_gets_the_connections(
    server: ScriptedServer, other: ScriptedServer, kind: type[Any]
) -> None:
    """The metadata of one server counts for all, because they are equal."""
    both = [Peers(one, "2") for one in (server, other)]
    client = kind([one.target.replace("127.0.0.1", "localhost") for one in (server, other)])
    for _ in range(32):
        await call(client, "infer", "row", ROW, timeout=30)
    await close(client)
    assert [peers.turns() for peers in both] == [[2] * 8] * 2


@either_kind
async def test_several_channels_balance_over_a_list_of_addresses(
    server: ScriptedServer, other: ScriptedServer, kind: type[Any]
) -> None:
    both = [Peers(one, "2") for one in (server, other)]
    client = kind([server.target, other.target])
    for _ in range(8):
        await call(client, "infer", "row", ROW, timeout=30)
    await close(client)
    assert sorted(both[0].turns() + both[1].turns()) == [1] * 8


@either_kind
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
async def test_a_call_is_repeated_on_another_connection(
    server: ScriptedServer,
    kind: type[Any],
    method: str,
    failure: grpc.StatusCode,
    trailers: tuple[tuple[str, str], ...],
    parameters: dict[str, Any],
    attempts: int,
) -> None:
    peers = Peers(server)
    peers.failure, peers.trailers = failure, trailers
    client = kind(server.target, connections=8)
    with pytest.raises(InferenceError):
        await call(client, method, "row", ROW, parameters=parameters, timeout=30)
    assert peers.turns() == [1] * attempts
    peers.failure = None
    peers.seen.clear()
    for _ in range(8):
        await call(client, method, "row", ROW, timeout=30)
    assert peers.turns() == [1] * 8, "a connection is left out"
    await close(client)


@either_kind
async def test_close_closes_every_connection(server: ScriptedServer, kind: type[Any]) -> None:
    Peers(server, "2")
    client = kind(server.target)
    await call(client, "infer", "row", ROW, timeout=30)
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
