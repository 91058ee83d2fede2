"""Choice among several targets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from client import calls
from client.either import KINDS, call
from client.scripted import ScriptedServer

from tensorferry.client import Cancelled, ClientClosed, InferenceClient, Unauthenticated, Unavailable, aio
from tensorferry.client.connection.endpoints import Endpoints, open_endpoints
from tensorferry.client.connection.target import address_list, default_targets
from tensorferry.client.errors import InvalidInput

ROW = {"x": [1]}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rotation(count: int) -> tuple[list[Any], Endpoints, Clock]:
    """Return stand-ins of endpoints, which only the choice sees."""
    clock = Clock()
    endpoints = Endpoints([cast(Any, object)] * count, clock=clock)
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


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["10.0.0.1:1", "10.0.0.2:2"], "ipv4:10.0.0.1:1,10.0.0.2:2"),
        (["[::1]:1", "[::2]:2"], "ipv6:[::1]:1,[::2]:2"),
        (["10.0.0.1:1", "[::1]:2"], "ipv6:[::ffff:10.0.0.1]:1,[::1]:2"),
        (["10.0.0.1:1", "server:2"], None),
        (["10.0.0.1:1", "unix:/run/x"], None),
        (["10.0.0.1:1", "ipv4:10.0.0.2:1"], None),
    ],
)
def test_ip_addresses_become_one_list_of_grpc(targets: list[str], expected: str | None) -> None:
    assert address_list(targets) == expected


def opened(targets: list[str], tls: bool, given: tuple[tuple[str, str | int], ...] = ()) -> list[Any]:
    """Return targets and options of the channels for calls."""
    channels: list[tuple[str, dict[str, str | int]]] = []

    def opener(target: str, credentials: object, options: list[tuple[str, str | int]]) -> grpc.Channel:
        channels.append((target, dict(options)))
        return grpc.insecure_channel("127.0.0.1:1")

    endpoints = open_endpoints(targets, opener, grpc.ssl_channel_credentials() if tls else None, [*given])
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


@pytest.mark.parametrize(
    ("targets", "tls"),
    [(["a:1", "b:1"], False), (["10.0.0.1:1", "10.0.0.2:1"], True), (["a:1", "b:1"], True)],
)
def test_names_and_tls_have_a_channel_for_each_target(targets: list[str], tls: bool) -> None:
    channels = opened(targets, tls)
    assert [target for target, _ in channels] == targets
    assert all("grpc.lb_policy_name" not in options for _, options in channels)
    assert opened(targets[:1], tls=False) == [(targets[0], {})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:1", ("a:1",)),
        ("a:1, b:2", ("a:1", "b:2")),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", ("ipv4:10.0.0.1:1,10.0.0.2:1",)),
        ("unix:/run/a,b", ("unix:/run/a,b",)),
    ],
)
def test_the_environment_names_targets(text: str, expected: tuple[str, ...]) -> None:
    assert default_targets({"TENSORFERRY_TARGET": text}) == expected


@pytest.mark.parametrize("text", ["a:1,,b:1", "a:1,", "http://a:1", "a"])
def test_a_wrong_variable_is_named(text: str) -> None:
    with pytest.raises(InvalidInput, match="the environment variable TENSORFERRY_TARGET expects 'host:port'"):
        default_targets({"TENSORFERRY_TARGET": text})


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_without_target_takes_the_environments(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    monkeypatch.setenv("TENSORFERRY_TARGET", f"{server.target},{server.target}")
    client = kind()
    assert await call(client, "is_live")
    await call(client, "close")


def by_name(target: str) -> str:
    """Return a name that needs the resolver, in place of the address 127.0.0.1."""
    return target.replace("127.0.0.1", "localhost")


def with_tls_name(target: str) -> str:
    return "dns:///" + by_name(target)


@pytest.mark.parametrize("form", [by_name, with_tls_name])
@pytest.mark.parametrize("method", ["infer", "submit", "stream"])
def test_calls_take_turns_and_leave_out_a_target_that_is_down(
    server: ScriptedServer, other: ScriptedServer, form: Callable[[str], str], method: str
) -> None:
    def count(one: ScriptedServer) -> int:
        return one.servicer.calls.count("ModelStreamInfer" if method == "stream" else "ModelInfer")

    def send(times: int) -> None:
        for _ in range(times):
            calls.call(client, method, "row", [ROW] if method == "stream" else ROW, timeout=30)

    with InferenceClient([form(server.target), form(other.target)], retry=None) as client:
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


@pytest.mark.parametrize("kind", KINDS)
async def test_waiting_needs_one_target_that_answers(server: ScriptedServer, kind: type[Any]) -> None:
    for targets in (["localhost:1", by_name(server.target)], [by_name(server.target), "localhost:1"]):
        client = kind(targets)
        assert await call(client, "wait_ready", 60)
        server.servicer.ready = False
        assert not await call(client, "wait_ready", 60)
        server.servicer.ready = True
        server.servicer.failures = [grpc.StatusCode.UNAUTHENTICATED]
        with pytest.raises(Unauthenticated, match="scripted failure"):
            await call(client, "wait_ready", 60)
        await call(client, "close")
        with pytest.raises(ClientClosed):
            await call(client, "wait_ready", 60)


@pytest.mark.parametrize("kind", KINDS)
async def test_waiting_ends_with_the_timeout(kind: type[Any]) -> None:
    client = kind(["localhost:1", "localhost:2"])
    assert not await call(client, "wait_ready", 0.2)
    assert not await call(client, "wait_ready", 1e-9)
    await call(client, "close")


def test_closing_ends_waiting() -> None:
    client = InferenceClient(["localhost:1", "localhost:2"])
    *_, last = client._endpoints
    begin, begun = last.stub.ServerReady.future, threading.Event()

    def future(*arguments: Any, **options: Any) -> Any:
        made = begin(*arguments, **options)
        begun.set()
        return made

    last.stub.ServerReady = SimpleNamespace(future=future)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.wait_ready, 60)
        assert begun.wait(30)
        client.close()
        assert isinstance(waiting.exception(30), Cancelled)


async def test_closing_ends_waiting_of_asyncio() -> None:
    client = aio.InferenceClient(["localhost:1", "localhost:2"])
    waiting = asyncio.create_task(client.wait_ready(60))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises((Cancelled, ClientClosed)):
        await waiting


def test_a_call_to_a_dead_target_is_not_a_retry(server: ScriptedServer) -> None:
    """Also without retries, a call that found no connection goes to the next target."""
    with InferenceClient(["localhost:1", by_name(server.target)], retry=None) as client:
        assert client.infer("row", ROW)["x"] == [1]
        assert client._retries._left == 100
