"""Requests of a front-end that an engine answers: both sides in one process, over a real link."""

from __future__ import annotations

import gzip
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import grpc
import numpy as np
import pytest
from polling import PATIENCE
from support.models.small import twice
from support.server.rig import Replies, fp32, request, response_of

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.engine.front_end_port import ResponseBursts
from tensorferry.server.engine.loop import EngineLoop
from tensorferry.server.front_end.engine_connection import NO_ENGINE, EngineConnection
from tensorferry.server.front_end.remote_service import RemoteService
from tensorferry.server.front_end.report import FrontEndReport
from tensorferry.server.front_end.trials import Trials
from tensorferry.server.identity import ClientIdentity
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.request_limits import DEFAULT_LIMITS
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.link import FrontEndLink, create_link
from tensorferry.server.link_messages import Gauge
from tensorferry.server.models.load_context import LoadContext
from tensorferry.server.models.loader import load_model
from tensorferry.server.models.registry import Model, ModelRegistry
from tensorferry.server.threads import watch_threads


class NoBurst:
    """A `ResponseBurstHook` that does nothing."""

    def begin(self, count: int) -> None:
        pass

    def end(self) -> None:
        pass


class Rig:
    """A front-end's service, an engine's loop, and the model `m` that doubles its input."""

    def __init__(self, path: Path) -> None:
        bursts = ResponseBursts()
        self.model: Model = load_model(
            ModelSource("m", twice(path)), LoadContext(ServerConfig(models=()), response_hook=bursts)
        )
        registry = ModelRegistry()
        registry.mark_ready(self.model)
        # The front-ends that broke the rules of their links.
        self.broken: list[int] = []
        self.loop = EngineLoop(InferenceService(registry), bursts)
        self.loop.start()
        self.remote = RemoteService(DEFAULT_LIMITS, NoBurst(), Trials(lambda kind, **fields: None))

    def connect(self, number: int = 0, slots: int = 64) -> None:
        files = create_link(slots)
        self.loop.connect(number, files.duplicate(), lambda why: self.broken.append(number))
        self.remote.connect(FrontEndLink(files))

    def ask(self, data: bytes, deadline: float = math.inf) -> InferenceReply:
        replies = Replies()
        self.remote.submit(data, deadline, replies)
        return replies.first()


@contextmanager
def rig_of(path: Path) -> Iterator[Rig]:
    rig = Rig(path / "m.onnx")
    try:
        yield rig
    finally:
        rig.remote.disconnect()
        rig.remote.give_up()
        rig.loop.stop()
        rig.model.batcher.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rig_of(tmp_path) as made:
        yield made


def message(rows: int = 1, request_id: str = "") -> bytes:
    asked = request({"x": fp32(rows, 3)})
    asked.id = request_id
    return asked.SerializeToString()


def status(rig: Rig, reply: InferenceReply) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        reply.pieces()
    found = rig.remote.status_of(raised.value, reply)
    return found.code, found.message


@pytest.mark.parametrize("rows", [1, 2, 400, 4000])
def test_each_size_of_request_gets_its_own_answer(rig: Rig, rows: int) -> None:
    """Small messages are in their slots, large ones in extents. A repeated request matches a template."""
    rig.connect()
    for number in range(3):
        x = fp32(rows, 3) + number
        asked = request({"x": x})
        asked.id = f"r{number}"
        response = response_of(rig.ask(asked.SerializeToString()))
        assert response.id == f"r{number}"
        np.testing.assert_array_equal(np.frombuffer(response.raw_output_contents[0], "<f4"), 2 * x.ravel())


def test_many_requests_share_batches(rig: Rig) -> None:
    rig.connect()
    replies = [Replies() for _ in range(50)]
    for number, each in enumerate(replies):
        rig.remote.submit(request({"x": fp32(1, 3) + number}).SerializeToString(), math.inf, each)
    for number, each in enumerate(replies):
        raw = response_of(each.first()).raw_output_contents[0]
        np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), 2 * (fp32(3) + number))


def test_a_bad_request_gets_the_engine_s_status_with_its_id(rig: Rig) -> None:
    rig.connect()
    asked = request({"x": fp32(1, 4)})
    asked.id = "seven"
    reply = rig.ask(asked.SerializeToString())
    code, text = status(rig, reply)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "[1,4]" in text or "shape" in text
    assert reply.request_id == "seven"
    assert reply.addressed[0] == "m"


def test_a_deadline_that_has_passed_is_reported(rig: Rig) -> None:
    rig.connect()
    code, _ = status(rig, rig.ask(message(), time.monotonic() - 1))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_compressed_message_is_unpacked_before_it_is_sent(rig: Rig) -> None:
    rig.connect()
    assert response_of(rig.ask(gzip.compress(message()))).model_name == "m"


def test_without_an_engine_requests_are_told_to_retry(rig: Rig) -> None:
    reply = rig.ask(message(1, "one"))
    assert status(rig, reply) == (grpc.StatusCode.UNAVAILABLE, NO_ENGINE)
    assert reply.request_id == "one"
    rig.connect()
    # Answered, so the engine has the link.
    rig.ask(message())
    assert rig.loop.refused() == {grpc.StatusCode.UNAVAILABLE: 1}
    rig.remote.count_refused(grpc.StatusCode.RESOURCE_EXHAUSTED)
    rig.loop.disconnect(0)
    rig.loop.stop()
    assert rig.loop.refused() == {grpc.StatusCode.UNAVAILABLE: 1, grpc.StatusCode.RESOURCE_EXHAUSTED: 1}


def test_a_link_without_room_refuses_with_a_hint(tmp_path: Path) -> None:
    with rig_of(tmp_path) as rig:
        files = create_link(2)
        rig.remote.connect(FrontEndLink(files.duplicate()))
        waiting = [Replies() for _ in range(2)]
        for each in waiting:
            rig.remote.submit(message(), math.inf, each)
        code, text = status(rig, rig.ask(message()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "retry in" in text
        files.close()


def test_a_cancelled_request_is_answered_once(rig: Rig) -> None:
    rig.connect()
    replies = Replies()
    call = rig.remote.submit(message(), math.inf, replies)
    call.cancel()
    call.cancel()
    # Cancelled or answered: the two race.
    replies.first()
    assert response_of(rig.ask(message())).model_name == "m"
    assert len(replies.all) == 1


def test_the_caller_and_its_trace_reach_the_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.connect()
    seen: list[object] = []
    submit = InferenceService.submit

    def spy(self: InferenceService, *args: object, **more: object) -> object:
        seen.append(args[3:5])
        return submit(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(InferenceService, "submit", spy)
    caller = ClientIdentity("ann", frozenset({"infer"}))
    trace = ("traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    replies = Replies()
    rig.remote.submit(message(), math.inf, replies, (("user-agent", "test"), trace), caller)
    replies.first()
    assert seen == [((trace,), caller)]


def test_a_front_end_that_breaks_the_link_s_rules_is_cut_off(tmp_path: Path) -> None:
    with rig_of(tmp_path) as rig:
        rig.connect(1)
        files = create_link(8)
        rig.loop.connect(2, files.duplicate(), lambda why: rig.broken.append(2))
        # More entries than the ring has.
        os.eventfd_write(files.to_engine, 1 << 20)
        assert response_of(rig.ask(message())).model_name == "m"
        rig.loop.stop()
        assert rig.broken == [2]
        files.close()


@pytest.mark.parametrize("origin", [b'["a",[],[1],false]', b"[" * 100_000, b"\xff"])
def test_a_front_end_that_sends_no_origin_is_cut_off(tmp_path: Path, origin: bytes) -> None:
    with rig_of(tmp_path) as rig:
        rig.connect(1)
        files = create_link(8)
        rig.loop.connect(2, files.duplicate(), lambda why: rig.broken.append(2))
        hijacked = FrontEndLink(files)
        hijacked.submit(message(), math.inf, origin, None)
        hijacked.flush()
        assert response_of(rig.ask(message())).model_name == "m"
        rig.loop.stop()
        assert rig.broken == [2]
        hijacked.close()
        hijacked.release()


def test_a_front_end_whose_link_the_engine_cannot_use_is_reported(tmp_path: Path) -> None:
    with rig_of(tmp_path) as rig, (tmp_path / "no link").open("wb") as other:
        files = create_link(8)
        os.dup2(other.fileno(), files.memory)
        rig.loop.connect(2, files, lambda why: rig.broken.append(2))
        rig.loop.stop()
        assert rig.broken == [2]


def test_an_engine_that_breaks_the_link_s_rules_ends_the_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients would get UNAVAILABLE for ever."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    ended: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(os, "_exit", ended.put)
    watch_threads(lambda: None)
    files = create_link(8)
    connection = EngineConnection(FrontEndLink(files.duplicate()), NoBurst(), lambda waiting, begun: None)
    # More responses than there are slots.
    os.eventfd_write(files.to_front_end, 1 << 20)
    assert ended.get(timeout=PATIENCE) == 1
    connection.close()
    files.close()


def test_gauges_of_linked_front_ends_are_summed(rig: Rig) -> None:
    """Each has the present values in a new link at once, and changes what it counts."""
    values = [dict.fromkeys(Gauge, 10), dict.fromkeys(Gauge, 3)]
    reports = [FrontEndReport(each.__getitem__) for each in values]
    reports[0].gauge_changed(Gauge.OPEN_STREAMS)
    for number, report in enumerate(reports):
        files = create_link(8)
        rig.loop.connect(number, files.duplicate(), lambda why: None)
        report.attach(FrontEndLink(files))
    rig.connect(2)
    # Answered, so the engine has all links.
    rig.ask(message())
    assert rig.loop.gauges() == dict.fromkeys(Gauge, 13)
    values[1][Gauge.UNSENT_BYTES] = 1 << 40
    assert rig.loop.gauges()[Gauge.UNSENT_BYTES] == 13
    reports[1].gauge_changed(Gauge.UNSENT_BYTES)
    assert rig.loop.gauges() == {**dict.fromkeys(Gauge, 13), Gauge.UNSENT_BYTES: 10 + (1 << 40)}
    reports[0].detach()
    reports[0].gauge_changed(Gauge.UNSENT_BYTES)
    rig.loop.disconnect(0)
    rig.ask(message())
    assert rig.loop.gauges() == values[1]


def test_the_newest_value_of_a_gauge_is_reported_although_an_older_one_was_written_last() -> None:
    files = create_link(8)
    link = FrontEndLink(files)
    values = [1]

    def value_of(gauge: Gauge) -> int:
        value = values[0]
        if value == 2:
            # Another thread changes the gauge and reports that, before this value is written.
            values[0] = 3
            report.gauge_changed(gauge)
        return value

    report = FrontEndReport(value_of)
    report.attach(link)
    values[0] = 2
    report.gauge_changed(Gauge.OPEN_STREAMS)
    assert link.counters[Gauge.OPEN_STREAMS] == 3
    link.close()
    link.release()
