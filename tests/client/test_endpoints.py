"""Several targets and several connections to each: their choice, their number, and waiting for a target."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from client.calls import both_clients, call, either
from client.scripted import Hang, ScriptedServer

from tensorferry.client import (
    Cancelled,
    ClientClosed,
    InferenceClient,
    InferenceError,
    InvalidInput,
    Retry,
    Unauthenticated,
    Unavailable,
    aio,
)
from tensorferry.client.connection.endpoints import Endpoints, open_endpoints
from tensorferry.client.connection.retry import ANSWERED_KEY, Attempts, RetryBudget
from tensorferry.client.connection.target import address_list, targets_of
from tensorferry.protos import inference_pb2 as pb

ROW = {"x": [1]}
METHODS: list[tuple[str, tuple[Any, ...]]] = [
    ("infer", ("row", ROW)), ("submit", ("row", ROW)), ("stream", ("row", [ROW])),
]  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rotation(count: int, connections: int = 1) -> tuple[list[Any], Endpoints, Clock]:
    """Return stand-ins of endpoints, which only the choice sees."""
    clock = Clock()
    endpoints = Endpoints([cast(Any, object)] * count, connections, clock)
    return list(endpoints), endpoints, clock


def picked(endpoints: Endpoints, among: list[Any], count: int) -> list[int]:
    return [among.index(endpoints.pick()) for _ in range(count)]


def test_a_failed_endpoint_is_tried_by_one_call_after_five_seconds() -> None:
    among, endpoints, clock = rotation(3)
    assert picked(endpoints, among, 6) == [0, 1, 2, 0, 1, 2]
    assert endpoints.failed(among[1], sent=True)
    assert picked(endpoints, among, 4) == [0, 2, 0, 2]
    clock.now += 4.9
    assert 1 not in picked(endpoints, among, 6)
    clock.now += 0.2
    assert picked(endpoints, among, 6).count(1) == 1
    clock.now += 4.9
    assert 1 not in picked(endpoints, among, 6)
    endpoints.answered(among[1])
    assert picked(endpoints, among, 6).count(1) == 2


def test_if_all_failed_the_oldest_failure_is_next() -> None:
    among, endpoints, clock = rotation(3)
    outcomes = []
    for place in (2, 0, 1):
        outcomes.append(endpoints.failed(among[place], sent=False))
        clock.now += 1
    assert outcomes == [True, True, False]
    assert picked(endpoints, among, 1) == [2]
    endpoints.answered(among[0])
    assert picked(endpoints, among, 3) == [0, 0, 0]


def test_a_repeated_call_never_takes_the_same_connection() -> None:
    """Other calls may have moved the rotation on to it."""
    _, endpoints, _ = rotation(1, 2)
    attempts = Attempts(RetryBudget(Retry()), pb.ModelInferRequest(), endpoints)
    first = attempts.next()
    endpoints.pick()
    assert attempts.next() is not first
    (first, second), endpoints, _ = rotation(2)
    endpoints.failed(second, sent=False)
    assert endpoints.pick(first) is first, "the only usable one is tried again"


def test_a_broken_connection_leaves_its_endpoint_in_the_rotation() -> None:
    (first, second), endpoints, _ = rotation(2, 2)
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


def test_ip_addresses_become_one_list_of_grpc() -> None:
    for targets, expected in (
        (["10.0.0.1:1", "10.0.0.2:2"], "ipv4:10.0.0.1:1,10.0.0.2:2"),
        (["[::1]:1", "[::2]:2"], "ipv6:[::1]:1,[::2]:2"),
        (["10.0.0.1:1", "[::1]:2"], "ipv6:[::ffff:10.0.0.1]:1,[::1]:2"),
        (["10.0.0.1:1", "server:2"], None),
        (["10.0.0.1:1", "unix:/run/x"], None),
        (["10.0.0.1:1", "ipv4:10.0.0.2:1"], None),
    ):
        assert address_list(targets) == expected


def opened(targets: list[str], tls: bool, given: tuple[tuple[str, str | int], ...] = ()) -> list[Any]:
    """Return targets and options of the channels for calls."""
    channels: list[tuple[str, dict[str, str | int]]] = []

    def record(target: str, *_: object, options: list[tuple[str, str | int]]) -> grpc.Channel:
        channels.append((target, dict(options)))
        return grpc.insecure_channel("127.0.0.1:1")

    api = SimpleNamespace(insecure_channel=record, secure_channel=record)
    endpoints = open_endpoints(targets, grpc.ssl_channel_credentials() if tls else None, given, 1, api)
    for connection in endpoints:
        connection.channel.close()
        connection.stream_channel.close()
    return channels[::2]


def test_grpc_balances_over_ip_addresses_in_plain_text() -> None:
    [(target, options)] = opened(["10.0.0.1:1", "10.0.0.2:1"], tls=False)
    assert target == "ipv4:10.0.0.1:1,10.0.0.2:1"
    assert options["grpc.lb_policy_name"] == "round_robin"
    [(_, options)] = opened(["10.0.0.1:1", "10.0.0.2:1"], False, (("grpc.lb_policy_name", "pick_first"),))
    assert options["grpc.lb_policy_name"] == "pick_first"


def test_names_and_tls_have_a_channel_for_each_target() -> None:
    for targets, tls in (
        (["a:1", "b:1"], False),
        (["10.0.0.1:1", "10.0.0.2:1"], True),
        (["a:1", "b:1"], True),
    ):
        channels = opened(targets, tls)
        assert [target for target, _ in channels] == targets
        assert all("grpc.lb_policy_name" not in options for _, options in channels)
        assert opened(targets[:1], tls=False) == [(targets[0], {})]


async def test_the_environment_names_targets(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (
        ("", ("127.0.0.1:8001",)),
        ("a:1, b:2", ("a:1", "b:2")),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", ("ipv4:10.0.0.1:1,10.0.0.2:1",)),
        ("unix:/run/a,b", ("unix:/run/a,b",)),
    ):
        monkeypatch.setenv("TENSORFERRY_TARGET", text)
        assert targets_of(None) == expected
    for text in ("a:1,,b:1", "a:1,", "http://a:1", "a"):
        monkeypatch.setenv("TENSORFERRY_TARGET", text)
        with pytest.raises(
            InvalidInput, match="the environment variable TENSORFERRY_TARGET expects 'host:port'"
        ):
            targets_of(None)
    monkeypatch.setenv("TENSORFERRY_TARGET", f"{server.target},{server.target}")
    with InferenceClient() as client:
        assert client.is_live()
    async with aio.InferenceClient() as aclient:
        assert await aclient.is_live()


def by_name(target: str) -> str:
    """Return a name that needs the resolver, in place of the address 127.0.0.1."""
    return target.replace("127.0.0.1", "localhost")


@pytest.mark.parametrize(("method", "arguments"), METHODS)
def test_calls_take_turns_and_leave_out_a_target_that_is_down(
    server: ScriptedServer, other: ScriptedServer, method: str, arguments: tuple[Any, ...]
) -> None:
    def count(one: ScriptedServer) -> int:
        return one.servicer.calls.count("ModelStreamInfer" if method == "stream" else "ModelInfer")

    def send(times: int) -> None:
        for _ in range(times):
            call(client, method, *arguments, timeout=30)

    targets = [by_name(server.target), "dns:///" + by_name(other.target)]
    # Without retries too, a call that found no connection goes to the next target.
    with InferenceClient(targets, retry=None) as client:
        client.metadata("row")
        send(6)
        assert count(server) + count(other) == 6
        assert min(count(server), count(other)) > 0
        other.server.stop(None).wait()
        for _ in range(6):
            client.is_live()
        before = count(server)
        send(6)
        assert count(server) == before + 6
        server.server.stop(None).wait()
        with pytest.raises(Unavailable):
            send(1)


@both_clients
async def test_waiting_needs_one_target_that_is_ready(server: ScriptedServer, kind: type[Any]) -> None:
    for targets in (["localhost:1", by_name(server.target)], [by_name(server.target), "localhost:1"]):
        client = kind(targets)
        assert await either(client, "wait_ready", 60)
        server.servicer.ready = False
        assert not await either(client, "wait_ready", 0.1)
        server.servicer.ready = True
        server.servicer.failures = [grpc.StatusCode.UNAUTHENTICATED]
        with pytest.raises(Unauthenticated, match="scripted failure"):
            await either(client, "wait_ready", 60)
        await either(client, "close")
        with pytest.raises(ClientClosed):
            await either(client, "wait_ready", 60)
    nowhere = kind(["localhost:1", "localhost:2"])
    assert not await either(nowhere, "wait_ready", 0.1)
    assert not await either(nowhere, "wait_ready", 1e-9)
    await either(nowhere, "close")


@both_clients
async def test_the_first_answer_ends_the_other_calls(
    server: ScriptedServer, other: ScriptedServer, kind: type[Any]
) -> None:
    hang = Hang()
    server.servicer.when_ready = lambda request, context: hang.begun.wait(30)
    other.servicer.when_ready = hang.infer
    client = kind([by_name(server.target), by_name(other.target)])
    assert await either(client, "wait_ready", 60)
    assert await asyncio.to_thread(hang.left.wait, 30)
    await either(client, "close")


@both_clients
async def test_closing_ends_waiting(server: ScriptedServer, kind: type[Any]) -> None:
    hang = Hang()
    server.servicer.when_ready = hang.infer
    client = kind(["localhost:1", by_name(server.target)])
    if isinstance(client, InferenceClient):
        waiting = asyncio.create_task(asyncio.to_thread(client.wait_ready, 60))
    else:
        waiting = asyncio.create_task(client.wait_ready(60))
    assert await asyncio.to_thread(hang.begun.wait, 30)
    await either(client, "close")
    with pytest.raises((Cancelled, ClientClosed)):
        await waiting


# Connections


def stating(server: ScriptedServer, processes: str) -> None:
    """Let the server state this number of processes."""
    server.servicer.models["row"].properties["server_processes"] = processes


def turns(server: ScriptedServer) -> list[int]:
    """Return the number of calls of each connection."""
    return list(Counter(server.servicer.peers).values())


def infer(client: InferenceClient, count: int) -> None:
    for _ in range(count):
        client.infer("row", ROW, timeout=30)


@pytest.mark.parametrize(("method", "arguments"), METHODS)
def test_calls_take_turns_over_four_connections_for_each_process(
    server: ScriptedServer, method: str, arguments: tuple[Any, ...]
) -> None:
    """Unless the caller fixes their number; and only a plausible number of processes is believed."""
    cases: list[tuple[str | None, dict[str, Any], int]] = [
        ("2", {}, 8), ("1024", {}, 32), (None, {}, 1),
        *((text, {}, 1) for text in ("two", "1025", "10000", "0", "-2", "2.0", "", "٢")),
        ("2", {"connections": 1}, 1), ("2", {"connections": 3}, 3), ("2", {"connections": 3, "check": False}, 3),
    ]  # fmt: skip
    for processes, options, connections in cases:
        if processes is not None:
            stating(server, processes)
        else:
            server.servicer.models["row"].properties.clear()
        server.servicer.peers.clear()
        with InferenceClient(server.target, **options) as client:
            client.metadata("row", timeout=30)
            for _ in range(2 * connections):
                call(client, method, *arguments, timeout=30)
        peers = server.servicer.peers
        assert len(set(peers)) == connections, processes
        assert peers[:connections] == peers[connections:]


def test_a_server_with_more_processes_gets_more_connections(
    server: ScriptedServer, client: InferenceClient
) -> None:
    for processes, connections in (("2", 8), ("4", 16), ("1", 16)):
        stating(server, processes)
        client.load_model("row", timeout=30)
        client.metadata("row", timeout=30)
        server.servicer.peers.clear()
        infer(client, connections)
        assert turns(server) == [1] * connections


def test_each_of_several_targets_gets_the_connections(server: ScriptedServer, other: ScriptedServer) -> None:
    """The metadata of one server counts for all, because they are equal."""
    for one in (server, other):
        stating(one, "2")
    with InferenceClient([by_name(one.target) for one in (server, other)]) as client:
        infer(client, 32)
    assert [turns(one) for one in (server, other)] == [[2] * 8] * 2
    for one in (server, other):
        one.servicer.peers.clear()
    # gRPC balances over a list of addresses.
    with InferenceClient([server.target, other.target]) as client:
        infer(client, 8)
    assert turns(server) + turns(other) == [1] * 8


@pytest.mark.parametrize("method", ["infer", "submit"])
@pytest.mark.parametrize(
    ("failure", "trailers", "parameters", "attempts"),
    [
        pytest.param(
            grpc.StatusCode.UNAVAILABLE, ((ANSWERED_KEY, "1"),), {"sequence_id": 1}, 4, id="answered"
        ),
        pytest.param(grpc.StatusCode.UNAVAILABLE, (("grpc-retry-pushback-ms", "-1"),), {}, 1, id="forbidden"),
        pytest.param(grpc.StatusCode.UNAVAILABLE, (), {}, 2, id="the request may have run"),
        pytest.param(grpc.StatusCode.UNAVAILABLE, (), {"sequence_id": 1}, 1, id="a sequence may have run"),
        pytest.param(
            grpc.StatusCode.RESOURCE_EXHAUSTED, (("grpc-retry-pushback-ms", "1"),), {}, 5, id="overloaded"
        ),
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
    with InferenceClient(server.target, connections=8) as client:
        client.metadata("row")
        server.servicer.failures, server.servicer.failure_trailers = [failure] * attempts, trailers
        with pytest.raises(InferenceError):
            call(client, method, "row", ROW, parameters=parameters, timeout=30)
        assert turns(server) == [1] * attempts
        server.servicer.peers.clear()
        infer(client, 8)
    assert turns(server) == [1] * 8, "a connection is left out"


@both_clients
async def test_close_closes_every_connection(server: ScriptedServer, kind: type[Any]) -> None:
    stating(server, "2")
    client = kind(server.target)
    await either(client, "infer", "row", ROW, timeout=30)
    await either(client, "close")
    await either(client, "close")
    client._endpoints.grow(16)
    connections = client._endpoints.close()
    assert len(connections) == 8, "nothing opens after close"
    for connection in connections:
        for stub in (connection.stub, connection.stream_stub):
            with pytest.raises((ValueError, grpc.aio.UsageError), match="closed"):
                stub.ServerLive(pb.ServerLiveRequest())
    unused = kind("127.0.0.1:1", connections=4)
    await either(unused, "close")


def test_threads_that_grow_at_once_open_each_connection_once(server: ScriptedServer) -> None:
    stating(server, "2")
    together = threading.Barrier(8)
    with InferenceClient(server.target) as client, ThreadPoolExecutor(8) as threads:

        def first() -> None:
            together.wait(30)
            client.infer("row", ROW, timeout=30)

        for one in [threads.submit(first) for _ in range(8)]:
            one.result(30)
        server.servicer.peers.clear()
        infer(client, 16)
    assert turns(server) == [2] * 8
