"""grpc.health.v1: whoever watches, leaves or does not read, the others are told, and the server goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from support.server.raw_h2 import RawClient, message
from support.server.rig import PATIENCE

from tensorferry.protos.standard import health_pb2
from tensorferry.server.methods import health as module
from tensorferry.server.methods.health import HealthService

STATUS = health_pb2.HealthCheckResponse
WATCH = "/grpc.health.v1.Health/Watch"
Stub = health_pb2_grpc.HealthStub


class Caller:
    """A call of Watch as grpcio has it: what it was sent, once `reads` is set."""

    def __init__(
        self, health: HealthService, service: str = "m", *, here: bool = True, peer: str = "a"
    ) -> None:
        self.address = peer
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.reads = threading.Event()
        self.got: list[int] = []
        self.told = threading.Condition()
        self.sending = threading.Event()
        self.left: Callable[[], None] = lambda: None
        self.here = here
        health.watch(health_pb2.HealthCheckRequest(service=service), self, self.send)  # type: ignore[arg-type]

    def peer(self) -> str:
        return self.address

    def abort(self, code: grpc.StatusCode, message: str) -> None:
        self.refusal = code, message
        raise RuntimeError

    def add_callback(self, left: Callable[[], None]) -> bool:
        self.left = left
        return self.here

    def cancel(self) -> None:
        """What grpcio does: the send that waits returns."""
        self.reads.set()

    def send(self, response: Any) -> None:
        self.sending.set()
        assert self.reads.wait(PATIENCE)
        with self.told:
            self.got.append(response.status)
            self.told.notify_all()

    def await_statuses(self, *statuses: int) -> None:
        with self.told:
            assert self.told.wait_for(lambda: self.got == list(statuses), PATIENCE), self.got


@pytest.fixture
def health() -> Iterator[HealthService]:
    made = HealthService()
    made.set("m", serving=True)
    yield made
    made.close()


def statuses_of(health: HealthService) -> Mapping[str, int]:
    return health._statuses


@pytest.mark.parametrize(
    ("bound", "peers", "words"),
    [
        ("_MOST_OF_A_CONNECTION", ("a", "a", "a"), "3 calls of Watch are open on this connection"),
        ("_MOST_WATCHERS", ("a", "b", "c"), "3 calls of Watch are open, which is the most"),
    ],
)
def test_watchers_are_bounded(
    health: HealthService, monkeypatch: pytest.MonkeyPatch, bound: str, peers: Sequence[str], words: str
) -> None:
    """In all and on a connection; one that leaves makes room for another."""
    monkeypatch.setattr(module, bound, 3)
    watching = [Caller(health, peer=peer) for peer in peers]
    caller = Caller.__new__(Caller)
    with pytest.raises(RuntimeError):
        caller.__init__(health)  # type: ignore[misc]
    assert caller.refusal is not None
    code, message = caller.refusal
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert words in message
    for each in watching:
        each.reads.set()
    watching[0].left()
    another = Caller(health)
    another.reads.set()
    another.await_statuses(STATUS.SERVING)
    for each in (*watching[1:], another):
        each.left()
    assert not health._watching
    assert not health._open


def test_who_watches_hears_each_change_in_order(health: HealthService) -> None:
    caller = Caller(health)
    caller.reads.set()
    caller.await_statuses(STATUS.SERVING)
    health.set("m", serving=False)
    health.set("m", serving=False)
    health.set("m", serving=True)
    caller.await_statuses(STATUS.SERVING, STATUS.NOT_SERVING, STATUS.SERVING)


def test_who_watches_what_is_not_known_hears_when_it_is(health: HealthService) -> None:
    caller = Caller(health, "later")
    caller.reads.set()
    caller.await_statuses(STATUS.SERVICE_UNKNOWN)
    health.set("later", serving=True)
    caller.await_statuses(STATUS.SERVICE_UNKNOWN, STATUS.SERVING)


def test_while_one_does_not_read_nobody_waits_for_it(health: HealthService) -> None:
    """Not those who set, check and watch, and above all not the thread that says that a watcher has left."""
    deaf, hearing = Caller(health), Caller(health)
    hearing.reads.set()
    assert deaf.sending.wait(PATIENCE)
    done = threading.Event()

    def others() -> None:
        health.set("m", serving=False)
        hearing.await_statuses(STATUS.SERVING, STATUS.NOT_SERVING)
        request = health_pb2.HealthCheckRequest(service="m")
        assert health.check(request, None).status == STATUS.NOT_SERVING  # type: ignore[arg-type]
        hearing.left()
        deaf.left()
        health.set("m", serving=True)
        done.set()

    threading.Thread(target=others, daemon=True).start()
    assert done.wait(PATIENCE)
    assert deaf.got == []
    deaf.cancel()
    deaf.await_statuses(STATUS.SERVING)
    assert hearing.got == [STATUS.SERVING, STATUS.NOT_SERVING], "it had left"


def test_who_reads_late_hears_of_the_last_changes(health: HealthService) -> None:
    caller = Caller(health)
    assert caller.sending.wait(PATIENCE)
    for number in range(101):
        health.set("m", serving=number % 2 == 0)
        health.set("m", serving=number % 2 == 1)
    caller.reads.set()
    with caller.told:
        assert caller.told.wait_for(lambda: len(caller.got) == 1 + module._MOST_UNSENT, PATIENCE)
    assert caller.got[-1] == STATUS.NOT_SERVING


def test_one_that_is_stuck_is_ended_for_those_that_wait(
    health: HealthService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STUCK_SECONDS", -1.0)
    stuck = [Caller(health) for _ in range(module._SENDERS)]
    for caller in stuck:
        assert caller.sending.wait(PATIENCE)
    hearing = Caller(health)
    hearing.reads.set()
    hearing.await_statuses(STATUS.SERVING)
    assert sum(caller.reads.is_set() for caller in stuck) == 1
    for caller in stuck:
        caller.cancel()


@pytest.mark.parametrize("here", [True, False])
def test_who_has_left_leaves_nothing(health: HealthService, here: bool) -> None:
    callers = [Caller(health, f"any {number}", here=here) for number in range(3)]
    for caller in callers:
        caller.reads.set()
        if here:
            caller.await_statuses(STATUS.SERVICE_UNKNOWN)
            caller.left()
        assert here or caller.got == []
    assert health._watchers == {}


def test_after_the_shutdown_nothing_serves_again(health: HealthService) -> None:
    caller = Caller(health)
    caller.reads.set()
    caller.await_statuses(STATUS.SERVING)
    health.enter_graceful_shutdown()
    health.set("m", serving=True)
    health.set("new", serving=True)
    caller.await_statuses(STATUS.SERVING, STATUS.NOT_SERVING)
    assert statuses_of(health) == {"m": STATUS.NOT_SERVING}


def test_a_client_that_never_reads_does_not_stop_the_server(health: HealthService) -> None:
    """grpcio's own servicer is stopped for good by these two clients, and the server with it."""
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((health.handler(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    asked = message(health_pb2.HealthCheckRequest(service="m").SerializeToString())
    with RawClient(address, window=0) as deaf, grpc.insecure_channel(address) as channel:
        for call in (1, 3, 5):
            deaf.begin(call, WATCH)
            deaf.send(call, asked, last=True)
        # It has taken the calls in.
        deaf.ping(b"followed")
        watching = Stub(channel).Watch(health_pb2.HealthCheckRequest(service="m"))
        assert next(watching).status == STATUS.SERVING
        health.set("m", serving=False)
        assert next(watching).status == STATUS.NOT_SERVING
        watching.cancel()
        deaf.cancel(3)
        deaf.ping(b"followed")
        answer = Stub(channel).Check(health_pb2.HealthCheckRequest(service="m"), timeout=PATIENCE)
        assert answer.status == STATUS.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            Stub(channel).Check(health_pb2.HealthCheckRequest(service="other"), timeout=PATIENCE)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "'other'" in str(caught.value.details())
        assert server.stop(0).wait(PATIENCE)


def test_all_statuses_are_listed(health: HealthService) -> None:
    health.set("", serving=False)
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((health.handler(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with grpc.insecure_channel(address) as channel:
        # grpcio-health-checking has this method in newer versions only.
        listed = channel.unary_unary(
            "/grpc.health.v1.Health/List",
            request_serializer=health_pb2.HealthListRequest.SerializeToString,
            response_deserializer=health_pb2.HealthListResponse.FromString,
        )(health_pb2.HealthListRequest(), timeout=PATIENCE)
    assert {service: answer.status for service, answer in listed.statuses.items()} == {
        "": STATUS.NOT_SERVING,
        "m": STATUS.SERVING,
    }
    assert server.stop(0).wait(PATIENCE)
