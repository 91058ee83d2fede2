"""Threads survive exceptions and a shortage of threads and files."""

from __future__ import annotations

import asyncio
import asyncio.constants
import errno
import os
import socket
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc._server
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.models import small
from support.server.rig import PATIENCE

from tensorferry.server.app import App
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.observability.monitoring.http_server import MetricsServer
from tensorferry.server.system import threads as server_threads
from tensorferry.server.system.addresses import listen_for_metrics
from tensorferry.server.system.threads import HandlerThreads

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _cannot_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_existing_handler_threads_serve_if_no_more_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = HandlerThreads(8)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _cannot_start)
        futures = [threads.submit(str, number) for number in range(20)]
        assert [future.result(PATIENCE) for future in futures] == [str(number) for number in range(20)]
    threads.shutdown()
    assert (
        caplog.text.count(
            "no more threads for calls: can't start new thread; calls wait for one of 1 threads"
        )
        <= 20
    )


def test_idle_handler_threads_end_but_for_one() -> None:
    """The threads of a burst of calls end, and one thread remains for the next call."""
    before = set(threading.enumerate())
    threads = HandlerThreads(8, idle_seconds=0.01)
    barrier = threading.Barrier(8)
    futures = [threads.submit(barrier.wait) for _ in range(8)]
    assert sorted(future.result(PATIENCE) for future in futures) == list(range(8))
    left = set(threading.enumerate()) - before
    while threads.count > 1:
        assert left
        for thread in list(left):
            thread.join(0.01)
            if not thread.is_alive():
                left.discard(thread)
    assert threads.submit(str, 1).result(PATIENCE) == "1"
    threads.shutdown()
    assert not threads.count
    with pytest.raises(RuntimeError):
        threads.submit(int)


def test_shutdown_finishes_queued_work_or_cancels_it() -> None:
    for cancel in (False, True):
        threads = HandlerThreads(1)
        begun, go_on = threading.Event(), threading.Event()

        def work(begun: threading.Event = begun, go_on: threading.Event = go_on) -> bool:
            begun.set()
            return go_on.wait(PATIENCE)

        first, second = threads.submit(work), threads.submit(int)
        assert begun.wait(PATIENCE)
        threads.shutdown(wait=False, cancel_futures=cancel)
        go_on.set()
        assert first.result(PATIENCE)
        assert second.cancelled() is cancel
        assert cancel or second.result(PATIENCE) == 0
        threads.shutdown()
        assert not threads.count


def test_an_exception_of_a_handler_is_in_its_future_and_the_thread_continues() -> None:
    threads = HandlerThreads(1)

    def crash() -> None:
        raise SystemExit

    assert isinstance(threads.submit(crash).exception(PATIENCE), SystemExit)
    assert threads.submit(str, 2).result(PATIENCE) == "2"
    threads.shutdown()


def test_every_thread_of_the_server_has_a_kind() -> None:
    """The two others: the pool and `new_thread` themselves, and the supervisor's channel, which ends its process itself."""
    root = Path(server_threads.__file__).parents[1]
    made = {
        str(file.relative_to(root)) for file in root.rglob("*.py") if "threading.Thread(" in file.read_text()
    }
    assert made == {"system/threads.py", "processes/in_child.py"}


def test_work_is_not_left_to_a_pool_thread_whose_wait_ended_by_an_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = HandlerThreads(1)
    assert threads.submit(int).result(PATIENCE) == 0
    wait, crashed = threading.Condition.wait, threading.Event()

    def crash(condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread().name.startswith("grpc-handler") and not crashed.is_set():
            crashed.set()
            raise MemoryError
        return wait(condition, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", crash)
        assert threads.submit(int).result(PATIENCE) == 0
        assert crashed.wait(PATIENCE)
    assert threads.submit(str, 1).result(PATIENCE) == "1"
    threads.shutdown()


@pytest.mark.parametrize("transport", ["lane", "threaded"])
def test_health_can_change_on_the_polling_thread(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a batch fails that the polling thread runs itself: the notification must not wait for that thread."""
    source = ModelSource("m", small.twice(tmp_path / "m.onnx"))
    app = App(ServerConfig((source,), port=0, device="cpu", transport=transport))
    try:
        app.start()
        app.load()
        (model,) = app.registry.models()
        changed = threading.Event()

        def change() -> None:
            model.health.mark_down(0, "broken")
            model.health.mark_up(0)
            changed.set()

        with grpc.insecure_channel(app.address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="m"))
            responses = iter(watch)
            assert next(responses).status == SERVING
            run_on_polling_thread(app, change, monkeypatch)
            assert changed.wait(PATIENCE), "the polling thread waits for itself"
            assert [next(responses).status for _ in range(2)] == [NOT_SERVING, SERVING]
            watch.cancel()
    finally:
        app.drain()
        app.stop()


def run_on_polling_thread(app: App, function: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a function where grpcio handles an event."""
    polling: Any = grpc._server
    handle, pending = polling._process_event_and_continue, [function]

    def process(*arguments: Any) -> Any:
        while pending:
            pending.pop()()
        return handle(*arguments)

    monkeypatch.setattr(polling, "_process_event_and_continue", process)
    with grpc.insecure_channel(app.address) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)


def test_the_metrics_server_recovers_if_no_file_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.01)
    server = MetricsServer(listen_for_metrics("127.0.0.1", 0), lambda accept: (b"page", accept))
    accepts, tries = socket.socket.accept, 0

    def accept(listener: socket.socket) -> Any:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if tries == 3:
            raise SystemExit
        return accepts(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    try:
        with urllib.request.urlopen(server.url, timeout=PATIENCE) as response:
            assert response.read() == b"page"
    finally:
        server.close()
    assert tries >= 4
