"""grpc.health.v1: a watcher that leaves or does not read delays neither other clients nor the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from fuzz.attackers.raw import Connection, framed, headers_of
from grpc_health.v1 import health_pb2_grpc
from support.server.rig import PATIENCE

from tensorferry.protos.standard import health_pb2
from tensorferry.server.methods import health as module
from tensorferry.server.methods.health import HealthService

STATUS = health_pb2.HealthCheckResponse
WATCH = "/grpc.health.v1.Health/Watch"
Stub = health_pb2_grpc.HealthStub


class Watch:
    """A call of Watch, as grpcio's context. `got` has the statuses sent, once `reads` is set."""

    def __init__(
        self, health: HealthService, service: str = "m", *, is_open: bool = True, peer: str = "a"
    ) -> None:
        self.address = peer
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.reads = threading.Event()
        self.got: list[int] = []
        self.changed = threading.Condition()
        self.sending = threading.Event()
        self.left: Callable[[], None] = lambda: None
        self.is_open = is_open
        health.watch(health_pb2.HealthCheckRequest(service=service), self, self.send)  # type: ignore[arg-type]

    def peer(self) -> str:
        return self.address

    def abort(self, code: grpc.StatusCode, message: str) -> None:
        self.refusal = code, message
        raise RuntimeError

    def add_callback(self, left: Callable[[], None]) -> bool:
        self.left = left
        return self.is_open

    def cancel(self) -> None:
        """End the call: as in grpcio, a blocked send returns."""
        self.reads.set()

    def send(self, response: Any) -> None:
        self.sending.set()
        assert self.reads.wait(PATIENCE)
        with self.changed:
            self.got.append(response.status)
            self.changed.notify_all()

    def await_statuses(self, *statuses: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.got == list(statuses), PATIENCE), self.got


@pytest.fixture
def health() -> Iterator[HealthService]:
    made = HealthService()
    made.set("m", serving=True)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("bound", "peers", "text"),
    [
        ("_MAX_WATCHERS_PER_CONNECTION", ("a", "a", "a"), "3 calls of Watch are open on this connection"),
        ("_MAX_WATCHERS", ("a", "b", "c"), "3 calls of Watch are open, which is the most"),
    ],
)
def test_watchers_are_bounded(
    health: HealthService, monkeypatch: pytest.MonkeyPatch, bound: str, peers: Sequence[str], text: str
) -> None:
    """The bounds are per server and per connection. A watcher that leaves makes room for another."""
    monkeypatch.setattr(module, bound, 3)
    watches = [Watch(health, peer=peer) for peer in peers]
    watch = Watch.__new__(Watch)
    with pytest.raises(RuntimeError):
        watch.__init__(health)  # type: ignore[misc]
    assert watch.refusal is not None
    code, message = watch.refusal
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert text in message
    for each in watches:
        each.reads.set()
    watches[0].left()
    another = Watch(health)
    another.reads.set()
    another.await_statuses(STATUS.SERVING)
    for each in (*watches[1:], another):
        each.left()
    assert not health._watchers_by_connection
    assert not health._watcher_count


def test_a_watcher_gets_each_change_in_order(health: HealthService) -> None:
    watch = Watch(health)
    watch.reads.set()
    watch.await_statuses(STATUS.SERVING)
    health.set("m", serving=False)
    health.set("m", serving=False)
    health.set("m", serving=True)
    watch.await_statuses(STATUS.SERVING, STATUS.NOT_SERVING, STATUS.SERVING)


def test_a_watcher_that_reads_late_gets_the_last_changes(health: HealthService) -> None:
    watch = Watch(health)
    assert watch.sending.wait(PATIENCE)
    for number in range(101):
        health.set("m", serving=number % 2 == 0)
        health.set("m", serving=number % 2 == 1)
    watch.reads.set()
    with watch.changed:
        assert watch.changed.wait_for(lambda: len(watch.got) == 1 + module._MAX_UNSENT, PATIENCE)
    assert watch.got[-1] == STATUS.NOT_SERVING


def test_a_stuck_watcher_is_ended_if_others_wait_for_a_thread(
    health: HealthService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STUCK_SECONDS", -1.0)
    stuck = [Watch(health) for _ in range(module._SENDER_THREADS)]
    for watch in stuck:
        assert watch.sending.wait(PATIENCE)
    reading = Watch(health)
    reading.reads.set()
    reading.await_statuses(STATUS.SERVING)
    assert sum(watch.reads.is_set() for watch in stuck) == 1
    for watch in stuck:
        watch.cancel()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_watcher_that_has_left_is_forgotten(health: HealthService, is_open: bool) -> None:
    watches = [Watch(health, f"any {number}", is_open=is_open) for number in range(3)]
    for watch in watches:
        watch.reads.set()
        if is_open:
            watch.await_statuses(STATUS.SERVICE_UNKNOWN)
            watch.left()
        assert is_open or watch.got == []
    assert health._watchers == {}


def test_no_service_serves_after_the_shutdown(health: HealthService) -> None:
    watch = Watch(health)
    watch.reads.set()
    watch.await_statuses(STATUS.SERVING)
    health.enter_graceful_shutdown()
    health.set("m", serving=True)
    health.set("new", serving=True)
    watch.await_statuses(STATUS.SERVING, STATUS.NOT_SERVING)
    assert health._statuses == {"m": STATUS.NOT_SERVING}


def test_a_client_that_never_reads_does_not_stop_the_server(health: HealthService) -> None:
    """With grpcio's servicer these two clients stop the server for good."""
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((health.handler(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    request = framed(health_pb2.HealthCheckRequest(service="m").SerializeToString())
    with Connection(address, PATIENCE, window=0) as silent, grpc.insecure_channel(address) as channel:
        for _ in range(3):
            silent.send_all(silent.begin(headers_of(path=WATCH)), request)
        # The server has accepted the calls once it answers the ping.
        silent.ping()
        watching = Stub(channel).Watch(health_pb2.HealthCheckRequest(service="m"))
        assert next(watching).status == STATUS.SERVING
        health.set("m", serving=False)
        assert next(watching).status == STATUS.NOT_SERVING
        watching.cancel()
        silent.reset(3)
        silent.ping()
        answer = Stub(channel).Check(health_pb2.HealthCheckRequest(service="m"), timeout=PATIENCE)
        assert answer.status == STATUS.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            Stub(channel).Check(health_pb2.HealthCheckRequest(service="other"), timeout=PATIENCE)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "'other'" in str(caught.value.details())
        # grpcio-health-checking has this method in newer versions only.
        listed = channel.unary_unary(
            "/grpc.health.v1.Health/List",
            request_serializer=health_pb2.HealthListRequest.SerializeToString,
            response_deserializer=health_pb2.HealthListResponse.FromString,
        )(health_pb2.HealthListRequest(), timeout=PATIENCE)
        assert {name: each.status for name, each in listed.statuses.items()} == {"m": STATUS.NOT_SERVING}
        assert server.stop(0).wait(PATIENCE)
