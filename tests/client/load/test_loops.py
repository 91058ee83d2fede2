from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from tensorferry.client.load.calls import Calls, Done
from tensorferry.client.load.loops import ClosedLoop, OpenLoop, Recorder
from tensorferry.client.load.steps import Arrival


@dataclass
class Time:
    """A clock that tests set, and the sleep that advances it."""

    now: float = 0.0
    # By how much each sleep takes longer than asked.
    oversleep: float = 0.0
    sleeps: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds + self.oversleep


@dataclass
class FakeCalls(Calls):
    """Calls that end when the test says so."""

    started: list[tuple[bytes, Done]] = field(default_factory=list)

    def start(self, body: bytes, done: Done) -> None:
        self.started.append((body, done))

    def end(self, failure: tuple[str, str] | None = None) -> None:
        """End the oldest call."""
        _, done = self.started.pop(0)
        done(failure)


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    time, calls = Time(), FakeCalls()
    recorder = Recorder(1.0, 3.0)
    loop = ClosedLoop(calls, itertools.cycle([b"a", b"b", b"c"]), 2, recorder, time)
    loop.start(2)
    assert [body for body, _ in calls.started] == [b"a", b"b"]
    time.now = 0.9
    calls.end()
    assert recorder.take().latencies == [], "an answer in the warm-up does not count"
    time.now = 1.5
    calls.end()
    time.now = 2.0
    calls.end()
    assert [body for body, _ in calls.started] == [b"a", b"b"], "the bodies are sent in turn"
    recorded = recorder.take()
    assert recorded.latencies == pytest.approx([1.5, 1.1])
    assert recorded.rows == 4
    assert recorder.take().latencies == [], "what was taken is not taken again"
    time.now = 3.0
    calls.end()
    assert recorder.take().latencies == [], "the end does not belong to the measurement"


def test_a_stopped_closed_loop_sends_no_more() -> None:
    calls = FakeCalls()
    loop = ClosedLoop(calls, itertools.repeat(b""), 1, Recorder(0, 1), Time())
    loop.start(3)
    loop.stop()
    for left in (2, 1, 0):
        assert not loop.wait(0.0)
        calls.end()
        assert len(calls.started) == left
    assert loop.wait(60.0)


def test_failures_are_counted_by_code_with_the_first_message() -> None:
    calls, recorder = FakeCalls(), Recorder(0, 1)
    ClosedLoop(calls, itertools.repeat(b""), 1, recorder, Time()).start(1)
    for failure in (("UNAVAILABLE", "first"), ("INTERNAL", "other"), ("UNAVAILABLE", "second"), None):
        calls.end(failure)
    recorded = recorder.take()
    assert recorded.failures == {"UNAVAILABLE": (2, "first"), "INTERNAL": (1, "other")}
    assert len(recorded.latencies) == 1


def test_an_open_loop_sends_at_the_given_times() -> None:
    time, calls, recorder = Time(100.0), FakeCalls(), Recorder(100.0, 200.0)
    loop = OpenLoop(calls, {1: [b"a"], 4: [b"x", b"y"]}, recorder, time, time.sleep)
    arrivals = [Arrival(0.5, 1), Arrival(1.0, 4), Arrival(1.0, 4), Arrival(3.0, 1), Arrival(9.0, 1)]
    loop.run(arrivals, 100.0, 104.0)
    assert time.sleeps == pytest.approx([0.5, 0.5, 2.0])
    assert [body for body, _ in calls.started] == [b"a", b"x", b"y", b"a"]
    time.now = 105.0
    for _ in range(4):
        calls.end()
    recorded = recorder.take()
    assert recorded.latencies == pytest.approx([4.5, 4.0, 4.0, 2.0])
    assert recorded.rows == 10
    assert loop.wait(60.0)


def test_a_late_sender_hides_no_delay() -> None:
    """Answers are at once, but each sleep takes 2 s too long: the latencies have the delay."""
    time, calls, recorder = Time(oversleep=2.0), FakeCalls(), Recorder(0.0, 100.0)
    loop = OpenLoop(calls, {1: [b""]}, recorder, time, time.sleep)
    loop.run([Arrival(1.0, 1), Arrival(2.0, 1), Arrival(3.0, 1)], 0.0, 100.0)
    for _ in range(3):
        calls.end()
    recorded = recorder.take()
    assert recorded.lags == pytest.approx([2.0, 1.0, 0.0])
    assert recorded.latencies == pytest.approx([2.0, 1.0, 0.0])


def test_the_intended_time_decides_whether_a_request_counts() -> None:
    time, calls, recorder = Time(), FakeCalls(), Recorder(1.0, 2.0)
    loop = OpenLoop(calls, {1: [b""]}, recorder, time, time.sleep)
    loop.run([Arrival(0.9, 1), Arrival(1.0, 1), Arrival(1.9, 1)], 0.0, 2.0)
    time.now = 7.0
    calls.end()
    calls.end()
    calls.end(("DEADLINE_EXCEEDED", "late"))
    recorded = recorder.take()
    assert recorded.latencies == pytest.approx([6.0])
    assert recorded.failures == {"DEADLINE_EXCEEDED": (1, "late")}
    assert len(recorded.lags) == 2


def test_an_endless_schedule_ends_at_the_end() -> None:
    time, calls = Time(), FakeCalls()
    loop = OpenLoop(calls, {1: [b""]}, Recorder(0.0, 1.0), time, time.sleep)
    loop.run((Arrival(number / 10, 1) for number in itertools.count()), 0.0, 1.0)
    assert len(calls.started) == 10


def test_requests_beyond_the_most_in_flight_fail_unsent() -> None:
    time, calls, recorder = Time(), FakeCalls(), Recorder(0.0, 10.0)
    loop = OpenLoop(calls, {1: [b""]}, recorder, time, time.sleep, most_in_flight=2)
    loop.run([Arrival(at, 1) for at in (1.0, 2.0, 3.0)], 0.0, 10.0)
    assert len(calls.started) == 2
    calls.end()
    loop.run([Arrival(4.0, 1)], 0.0, 10.0)
    assert len(calls.started) == 2
    calls.end()
    calls.end()
    recorded = recorder.take()
    assert recorded.failures["NOT_SENT"][0] == 1
    assert len(recorded.latencies) == 3
    assert loop.wait(60.0)
