"""If grpcio's internals are not what the lane needs, the server logs it and serves without the lane.

Each sabotage stands for a changed release of grpcio. `auto` then serves threaded, `lane` does not
start, `threaded` runs no self-test.
"""

from __future__ import annotations

import ast
import math
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import grpc
import pytest
from polling import until
from support.models import small
from support.server.rig import PATIENCE, Make, fp32, made_apps, request
from support.server.scripted_service import ServedTransport, success

import tensorferry.server.transport.lane as package
from tensorferry.protos import inference_pb2_grpc
from tensorferry.server.app import App
from tensorferry.server.errors import StartError
from tensorferry.server.transport.core_leaks import warning_of
from tensorferry.server.transport.lane import cygrpc, lane, selftest
from tensorferry.server.transport.lane.stream import StreamCall
from tensorferry.server.transport.lane.unary import UnaryCall

Sabotage = Callable[[pytest.MonkeyPatch], None]

CYGRPC = "grpc._cython.cygrpc"
# What the lane takes from there.
NAMES = [
    alias.name
    for node in ast.walk(ast.parse(Path(cygrpc.__file__).read_text()))
    if isinstance(node, ast.ImportFrom) and node.module == CYGRPC
    for alias in node.names
]


def _raise(*args: Any, **options: Any) -> Any:
    raise TypeError("this takes something else now")


def _exit(*args: Any) -> None:
    raise SystemExit


def _without(name: str) -> Sabotage:
    """Import the lane again without the name."""

    def sabotage(monkeypatch: pytest.MonkeyPatch) -> None:
        lacking = ModuleType(CYGRPC)
        for other in NAMES:
            if other != name:
                setattr(lacking, other, getattr(sys.modules[CYGRPC], other))
        monkeypatch.setitem(sys.modules, CYGRPC, lacking)
        for module in ("cygrpc", "lane", "stream", "selftest"):
            monkeypatch.delitem(sys.modules, f"{package.__name__}.{module}")
            monkeypatch.delattr(package, module)

    return sabotage


def _public_server(**has: Any) -> Sabotage:
    """Give the public server other attributes."""

    def sabotage(monkeypatch: pytest.MonkeyPatch) -> None:
        look = cygrpc.Server.__init__
        server: Any = SimpleNamespace(**has)
        monkeypatch.setattr(cygrpc.Server, "__init__", lambda self, public: look(self, server))

    return sabotage


def _wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    send = cygrpc.SendMessageOperation
    monkeypatch.setattr(cygrpc, "SendMessageOperation", lambda data, flags: send(data + b"?", flags))


def _status_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cygrpc, "send_status", lambda status: cygrpc.SEND_OK)


def _batches_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cygrpc, "ReceiveMessageOperation", _raise)


def _no_cancellations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore that a client has left."""
    try_cancel = selftest._try_cancel

    def hasty(channel: grpc.Channel, echo: Any) -> None:
        # The wait that must fail is short, and those before it have the time of a busy machine.
        left = echo.left
        echo.left = SimpleNamespace(set=left.set, wait=lambda seconds: left.wait(0.2))
        try_cancel(channel, echo)

    monkeypatch.setattr(selftest, "_try_cancel", hasty)
    monkeypatch.setattr(UnaryCall, "closed", lambda self, event: None)


def _no_stream_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    try_stream = selftest._try_stream

    def hasty(channel: grpc.Channel) -> None:
        # Only now, because the calls before must be answered.
        monkeypatch.setattr(selftest, "_SECONDS", 0.2)
        try_stream(channel)

    monkeypatch.setattr(selftest, "_try_stream", hasty)
    monkeypatch.setattr(StreamCall, "received", lambda self, event: None)


def _no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorferry.server.transport.call_admission._MAX_DEADLINE_SECONDS", -1.0)


SABOTAGES: dict[str, tuple[Sabotage, str]] = {
    f"no {NAMES[0]}": (_without(NAMES[0]), f"cannot import name '{NAMES[0]}'"),
    "no _state": (_public_server(), "no attribute '_state'"),
    "wrong bytes": (_wrong_bytes, "expected an answer"),
    "status lost": (_status_lost, "expected a status"),
    "batches refused": (_batches_refused, "this takes something else now"),
    "no cancellations": (_no_cancellations, "expected the cancellation of a client that left"),
    "no stream messages": (_no_stream_messages, "a call ended with DEADLINE_EXCEEDED"),
    "no deadline": (_no_deadline, "a call ended with NOT_FOUND"),
}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make servers with the model `m`; a stopped server must leave no thread."""
    path = small.twice(tmp_path / "m.onnx")
    before = set(threading.enumerate())
    with made_apps(path) as made:
        yield made
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} is left behind"


def serves(app: App) -> None:
    app.load()
    with grpc.insecure_channel(app.address) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = stub.ModelInfer(request({"x": fp32(2, 3)}), timeout=PATIENCE)
        assert response.raw_output_contents[0] == (fp32(2, 3) * 2).tobytes()
        (streamed,) = stub.ModelStreamInfer(iter([request({"x": fp32(2, 3)})]), timeout=PATIENCE)
        response.parameters["triton_final_response"].bool_param = True
        assert streamed.infer_response == response


def lines_of_the_server(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the server's log lines except the warning about a leaking grpcio."""
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("tensorferry")]
    leaks = warning_of(grpc.__version__, "", 0.0)
    return [line for line in lines if line != leaks]


def test_the_lane_serves_after_its_self_test(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    app = make(transport="auto")
    app.start()
    assert app.transport == "lane"
    assert lines_of_the_server(caplog) == []
    serves(app)


@pytest.mark.parametrize(("sabotage", "reason"), SABOTAGES.values(), ids=SABOTAGES)
def test_auto_falls_back_to_threaded_with_one_log_line(
    sabotage: Sabotage,
    reason: str,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make(transport="auto")
    with monkeypatch.context() as patch:
        sabotage(patch)
        app.start()
    assert app.transport == "threaded"
    (line,) = lines_of_the_server(caplog)
    assert f"the lane does not work with grpcio {grpc.__version__}: " in line
    assert reason in line
    assert line.endswith("; requests go through the threaded servicer, which is slower")
    assert "\n" not in line
    serves(app)


def test_transport_lane_does_not_start_without_the_lane(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage, reason = SABOTAGES["wrong bytes"]
    app = make(transport="lane")
    with monkeypatch.context() as patch:
        sabotage(patch)
        with pytest.raises(StartError, match="--transport is lane, but the lane does not work") as refused:
            app.start()
    assert reason in str(refused.value)


def test_transport_threaded_runs_no_self_test(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cygrpc.Server, "__init__", _raise)
    monkeypatch.setattr(selftest, "run_selftest", _raise)
    app = make(transport="threaded")
    app.start()
    assert app.transport == "threaded"
    serves(app)


@pytest.mark.parametrize("transport", ["lane"], scope="module")  # the other has no such thread
@pytest.mark.parametrize("where", ["a call that comes", "a message", "a stream's message", "the time"])
def test_an_exception_in_an_event_does_not_end_the_polling_thread(
    served: ServedTransport, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event's call gets INTERNAL, or CANCELLED if it had not begun; all others are served."""
    served.service.answer_at_once = success
    assert served.lane is not None
    logged: list[str] = []
    came = threading.Event()

    def log(message: str) -> None:
        logged.append(message)
        came.set()

    # A record that is kept would keep the call.
    monkeypatch.setattr(lane._log, "exception", log)
    with monkeypatch.context() as patch:
        if where == "the time":
            # Due when the next event has been handled.
            patch.setattr(served.lane._core.queue, "_on_wakeup", _raise, raising=False)
            served.lane._core.queue.next_wakeup = 0.0
            served.infer("1").result(PATIENCE)
            # The answer may be there before.
            assert came.wait(PATIENCE)
        elif where == "a stream's message":
            patch.setattr(StreamCall, "received", _raise)
            stream = served.stream()
            stream.send("1")
            assert came.wait(PATIENCE)
            assert stream.end().code() is grpc.StatusCode.INTERNAL
        elif where == "a message":
            patch.setattr(UnaryCall, "received", _exit)
            assert served.infer("1").exception(PATIENCE).code() is grpc.StatusCode.INTERNAL
        else:
            patch.setattr(UnaryCall, "__init__", _raise)
            assert served.infer("1").exception(PATIENCE).code() is grpc.StatusCode.CANCELLED
    assert served.infer("2").result(PATIENCE).id == "2"
    assert set(logged) == {"unexpected error in the lane; this is a bug in tensorferry.server"}


@pytest.mark.parametrize("transport", ["lane"], scope="module")
def test_a_failed_request_for_a_call_is_repeated(
    served: ServedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of posted requests is constant, so a lost one would be missing for ever."""
    served.service.answer_at_once = success
    assert served.lane is not None
    unrequested = served.lane._unrequested
    monkeypatch.setattr(lane._log, "exception", lambda message: None)
    monkeypatch.setattr(lane, "_RETRY_ACCEPT_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(served.lane._core, "_core", SimpleNamespace(request_registered_call=_raise))
        for number in range(lane._POSTED_UNARY_ACCEPTS):
            assert served.infer(str(number)).result(PATIENCE).id == str(number)
    for number in range(2 * lane._POSTED_UNARY_ACCEPTS):
        assert served.infer(str(number)).result(PATIENCE).id == str(number)
    # The last was answered before as many calls are requested again.
    until(lambda: not unrequested)


@pytest.mark.parametrize("transport", ["lane"], scope="module")
def test_calls_that_cannot_be_started_do_not_count(
    served: ServedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would reduce `--max-calls` or `--max-streams` for ever."""
    served.service.answer_at_once = success
    assert served.lane is not None
    monkeypatch.setattr(lane._log, "exception", lambda message: None)
    with monkeypatch.context() as patch:
        patch.setattr(cygrpc, "ReceiveMessageOperation", _raise)
        patch.setattr(cygrpc, "ReceiveCloseOnServerOperation", _raise)
        for number in range(3):
            assert served.infer(str(number)).exception(PATIENCE).code() is grpc.StatusCode.CANCELLED
            assert served.stream().end().code() is grpc.StatusCode.CANCELLED
    assert served.lane.admission.calls.wait_until_none(PATIENCE)
    assert served.lane.streams.open_streams == 0
    assert served.infer("later").result(PATIENCE).id == "later"


class _Clock:
    """A scripted replacement of `time`."""

    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now


def _queue(poll: Callable[[float], Any], clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return an event loop and its `poll` over a core that returns at once, as at a time-out."""
    monkeypatch.setattr(cygrpc, "time", clock)
    own = cygrpc._EventLoop.poll
    events = SimpleNamespace(poll=poll)
    rebound = FunctionType(own.__code__, {**vars(cygrpc), "super": lambda: events}, closure=own.__closure__)
    return SimpleNamespace(next_wakeup=clock.now + 0.01, idle=True, _on_crash=_raise), rebound


class _Call:
    """The tag of a call's events, which it counts."""

    def __init__(self) -> None:
        self.events = 0

    def arrived(self, event: Any) -> None:
        self.events += 1


def test_a_clock_that_is_set_back_delays_no_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    polled: list[float] = []

    def poll(deadline: float) -> Any:
        polled.append(deadline)
        if len(polled) == 1:
            clock.now -= 3600
        return SimpleNamespace(tag=None)

    queue, own = _queue(poll, clock, monkeypatch)
    called: list[float] = []

    def on_wakeup(now: float) -> float:
        called.append(now)
        return math.inf

    queue._on_wakeup = on_wakeup
    event = own(queue, clock.now + 1)
    assert event.tag is None, "grpcio is to give a deadline of the clock as it is now"
    assert called == [1e9 - 3600]
    assert queue.next_wakeup == math.inf


def test_a_wake_up_knows_whether_events_are_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause while calls are waiting would only delay them, and let more arrive."""
    clock = _Clock()
    monkeypatch.setattr(cygrpc, "_MAX_EVENTS", 3)
    call = _Call()
    waiting = [call.arrived] * 7
    queue, own = _queue(
        lambda deadline: SimpleNamespace(tag=waiting.pop() if waiting else None), clock, monkeypatch
    )
    looks: list[tuple[int, bool]] = []

    def on_wakeup(now: float) -> float:
        looks.append((call.events, queue.idle))
        return 0.0 if waiting else math.inf

    queue._on_wakeup, queue.next_wakeup = on_wakeup, 0.0
    own(queue, clock.now)
    assert looks == [(3, False), (6, False), (7, True)]


def test_a_wake_up_waits_for_events_that_core_finds_in_its_next_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core's legacy listener looks at one connection in each poll: a batch would have the calls of one."""
    clock = _Clock()
    monkeypatch.setattr(cygrpc, "_MAX_EVENTS", 3)
    call = _Call()
    polled = [call.arrived, None, call.arrived, None, None]
    queue, own = _queue(lambda deadline: SimpleNamespace(tag=polled.pop(0)), clock, monkeypatch)
    looks: list[tuple[int, bool]] = []

    def on_wakeup(now: float) -> float:
        looks.append((call.events, queue.idle))
        return math.inf

    queue._on_wakeup, queue.next_wakeup = on_wakeup, 0.0
    own(queue, clock.now)
    assert looks == [(2, True)]

    # Events that follow each other in this way delay it for no longer than others.
    polled += [call.arrived, None, call.arrived, None, call.arrived, None, None]
    queue.next_wakeup = 0.0
    own(queue, clock.now)
    assert looks[1:] == [(2 + 3, False)]
