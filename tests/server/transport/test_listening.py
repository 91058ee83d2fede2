"""Addresses, connections and the stop of a server, the same on both transports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
from polling import until
from support.server.rig import PATIENCE, has_ipv6
from support.server.scripted_service import ServedTransport, calls_of, opened, success

from tensorferry.batcher import BatcherClosed
from tensorferry.server.transport.lane.unary import UnaryCall

Serve = Callable[..., ServedTransport]

# Core's status for the calls of a stopping server, on both transports.
ENDED = {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}


def works(served: ServedTransport) -> None:
    served.service.answer_at_once = success
    assert served.infer("1").result(PATIENCE).id == "1"
    stream = served.stream()
    stream.send("2")
    assert stream.read_ids(1) == ["2"]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")),
    ],
)
def test_over_tcp(serve: Serve, host: str) -> None:
    works(serve(listen=lambda server: f"{host}:{server.add_insecure_port(f'{host}:0')}"))


@pytest.mark.parametrize("transport", ["lane"], scope="module")  # the other keeps a thread for each
def test_no_call_leaves_a_thread(serve: Serve) -> None:
    served = serve()
    threads = threading.active_count()
    calls = [served.infer(str(number)) for number in range(300)]
    served.service.await_received(300)
    # The client's own thread reads the answers.
    assert threading.active_count() <= threads + 1
    served.service.answer(*map(str, range(300)))
    assert [call.result(PATIENCE).id for call in calls] == [str(number) for number in range(300)]


@pytest.mark.parametrize("transport", ["lane"], scope="module")  # the other's calls are grpcio's
def test_ended_calls_are_released_while_another_is_open(serve: Serve) -> None:
    """They are released without the garbage collector, however they ended."""
    served = serve()
    kept = served.stream()
    kept.send("kept")
    served.service.await_received(1)
    assert served.lane is not None
    (open_call,) = calls_of(served.lane)
    calls = [served.infer(str(number)) for number in range(30)]
    served.service.await_received(31)
    for number in range(0, 30, 3):
        served.service.answer(str(number))
        served.service.fail(str(number + 1), BatcherClosed("closed"))
        calls[number + 2].cancel()
    served.service.await_cancelled(10)
    lane = served.lane
    until(lambda: calls_of(lane) == [open_call])
    served.service.answer("kept")
    assert kept.read_ids(1) == ["kept"]


@pytest.fixture
def stopped(transport: str) -> Iterator[ServedTransport]:
    """A transport whose server the test stops; core's last events may outlive it."""
    yield from opened(transport, stopped_by_test=True)


@pytest.mark.parametrize("grace", [None, 0.01])
def test_calls_in_flight_are_cancelled_after_the_grace_period(
    stopped: ServedTransport, grace: float | None
) -> None:
    call = stopped.infer("1")
    stream = stopped.stream()
    stream.send("2", "3")
    stopped.service.await_received(3)
    # The lane does not notice the cancellation of a younger call: what the server does next, to
    # close its batchers, ends its request.
    await_watching(stopped)
    done = stopped.server.stop(grace)
    stopped.service.await_cancelled(3)
    assert call.exception(PATIENCE).code() in ENDED
    assert stream.end().code() in ENDED
    assert done.wait(PATIENCE)


@pytest.mark.parametrize("watching", [False, True])
def test_a_reply_after_the_stop_has_no_effect(stopped: ServedTransport, watching: bool) -> None:
    """A run longer than the grace period completes after the server has stopped."""
    service = stopped.service
    stubborn = type("Stubborn", (type(service),), {"_cancel": lambda self, request_id: None})
    service.__class__ = stubborn
    call = stopped.infer("1")
    stream = stopped.stream()
    stream.send("2")
    service.await_received(2)
    if watching:
        await_watching(stopped)
    done = stopped.server.stop(None) if stopped.lane is not None else _in_a_thread(stopped.server)
    assert call.exception(PATIENCE) is not None
    assert stream.end() is not None
    # A thread of the servicer waits for its reply, and the server for that thread.
    assert done.wait(PATIENCE if stopped.lane is not None else 0) or stopped.lane is None
    for request_id in ("1", "2"):
        service.fail(request_id, BatcherClosed("the batcher was closed before the request ran"))
    assert done.wait(PATIENCE)


def _in_a_thread(server: grpc.Server) -> threading.Event:
    """Stop the server on another thread, which waits for what the test does next."""
    done = threading.Event()

    def stop() -> None:
        server.stop(None).wait(PATIENCE)
        done.set()

    threading.Thread(target=stop, name="stop").start()
    return done


def await_watching(served: ServedTransport) -> None:
    """Wait until the lane watches every unary call for a cancellation."""
    if (lane := served.lane) is not None:
        until(lambda: all(call.watches_cancel for call in calls_of(lane) if isinstance(call, UnaryCall)))
