from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from tensorferry.client.load.calls import Calls, Done
from tensorferry.client.load.loops import ClosedLoop, OpenLoop
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


def test_a_closed_loop_keeps_its_number_in_flight_until_the_end() -> None:
    time, calls = Time(), FakeCalls()
    loop = ClosedLoop([calls], 1.0, 3.0, itertools.cycle([b"a", b"b", b"c"]), 2, time)
    loop.start(2)
    assert [body for body, _ in calls.started] == [b"a", b"b"]
    time.now = 0.9
    calls.end()
    assert loop.take().latencies == [], "an answer in the warm-up does not count"
    time.now = 1.5
    calls.end()
    time.now = 2.0
    calls.end()
    assert [body for body, _ in calls.started] == [b"a", b"b"], "the bodies are sent in turn"
    tally = loop.take()
    assert tally.latencies == pytest.approx([1.5, 1.1])
    assert tally.rows == 4
    time.now = 3.0
    calls.end()
    assert not loop.wait(0.0)
    calls.end()
    assert loop.wait(0.0)
    assert not calls.started
    assert loop.take().latencies == [], "the end does not belong to the measurement"


def test_a_closed_loop_counts_what_a_hung_server_never_answers() -> None:
    time, calls = Time(), FakeCalls()
    loop = ClosedLoop([calls], 1.0, 3.0, itertools.repeat(b"a"), 1, time)
    loop.start(1)
    time.now = 8.0
    calls.end(("DEADLINE_EXCEEDED", "late"))
    assert loop.take().failures == {"DEADLINE_EXCEEDED": (1, "late")}


def open_loop(time: Time, calls: Calls, begin: float, end: float, most: int = 100) -> OpenLoop:
    return OpenLoop([calls], begin, end, {1: [b"a"], 4: [b"x", b"y"]}, time, time.sleep, most)


def test_an_open_loop_sends_at_the_given_times() -> None:
    time, calls = Time(100.0), FakeCalls()
    loop = open_loop(time, calls, 100.0, 104.0)
    loop.run([Arrival(0.5, 1), Arrival(1.0, 4), Arrival(1.0, 4), Arrival(3.0, 1), Arrival(9.0, 1)], 100.0)
    assert time.sleeps == pytest.approx([0.5, 0.5, 2.0])
    assert [body for body, _ in calls.started] == [b"a", b"x", b"y", b"a"]
    time.now = 105.0
    for _ in range(4):
        assert not loop.wait(0.0)
        calls.end()
    assert loop.wait(0.0)
    tally = loop.take()
    assert tally.latencies == pytest.approx([4.5, 4.0, 4.0, 2.0])
    assert (tally.arrived, tally.rows) == (0, 0), "no answer came within the measurement"


def test_a_late_sender_hides_no_delay() -> None:
    """Answers are at once, but each sleep takes 2 s too long: the latencies have the delay."""
    time, calls = Time(oversleep=2.0), FakeCalls()
    loop = open_loop(time, calls, 0.0, 100.0)
    loop.run([Arrival(1.0, 1), Arrival(2.0, 1), Arrival(3.0, 1)], 0.0)
    for _ in range(3):
        calls.end()
    tally = loop.take()
    assert tally.lags == tally.latencies == pytest.approx([2.0, 1.0, 0.0])


def test_the_intended_time_decides_whether_a_request_counts() -> None:
    time, calls = Time(), FakeCalls()
    loop = open_loop(time, calls, 1.0, 2.0)
    loop.run([Arrival(0.9, 4), Arrival(1.0, 1), Arrival(1.9, 1)], 0.0)
    calls.end()
    time.now = 7.0
    calls.end()
    calls.end(("DEADLINE_EXCEEDED", "late"))
    tally = loop.take()
    assert tally.latencies == pytest.approx([6.0])
    assert tally.failures == {"DEADLINE_EXCEEDED": (1, "late")}
    assert len(tally.lags) == 2
    assert (tally.arrived, tally.rows) == (1, 4), "rates are of all answers that came within the measurement"


@pytest.mark.parametrize(
    ("oversleep", "most", "sent"),
    [(0.0, 2, 2), (9.9, 9, 3), (10.1, 9, 0)],
)
def test_what_is_one_too_many_in_flight_or_too_late_fails_unsent(
    oversleep: float, most: int, sent: int
) -> None:
    calls = FakeCalls()
    loop = open_loop(Time(oversleep=oversleep), calls, 0.0, 10.0, most)
    loop.run([Arrival(at, 1) for at in (1.0, 2.0, 3.0)], 0.0)
    assert len(calls.started) == sent
    assert loop.take().failures.get("NOT_SENT", (0, ""))[0] == 3 - sent
