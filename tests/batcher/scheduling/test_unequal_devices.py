"""Devices of different speed: what only a faster one can answer in time is left to it, and nothing else."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from support.batcher.rig import PATIENCE

from tensorferry.batcher import DeadlineExceeded, QueueFull
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.device_failures import RECOVER
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Request, State
from tensorferry.batcher.settings import Limits
from tensorferry.batcher.testing import VirtualClock

FAST, SLOW = 0, 1
# Of a batch of any size, in seconds; the margin of feasibility is within a tenth of it.
SECONDS = {FAST: 0.1, SLOW: 0.3}
MOST = 4


class Station:
    """A queue whose devices are run by hand, and whose paces are known."""

    def __init__(
        self, seconds: dict[int, float] = SECONDS, *, rows: float = 0.0, max_rows: int = 100, **options: Any
    ) -> None:
        self.clock = VirtualClock()
        self.seconds = seconds
        # What each row beyond the first adds.
        self.rows = rows
        self.queue = RequestQueue(
            Limits(MOST, 0.0), max_rows, 1 << 20, self.clock, devices=len(seconds), **options
        )
        for count in (1, MOST):
            self.queue.anchor(count, self.takes(0, count))
        for _ in range(5):
            for device in seconds:
                self.put()
                self.run(device)

    def takes(self, device: int, rows: int) -> float:
        return self.seconds[device] * (1 + self.rows * (rows - 1))

    def put(self, patience: float = math.inf, rank: int = 0) -> Request:
        request = Request(
            (), lambda outcome: None, names=None, rows=1, nbytes=0, deadline=self.clock.now() + patience
        )
        request.rank = rank
        self.queue.put([request])
        return request

    def poll(self, device: int) -> Sequence[Request]:
        """The batch that leaves for a device now; none when it waits."""
        step = self.queue.poll(device)
        return step.batch if isinstance(step, BatchAssignment) else ()

    def run(self, device: int) -> Sequence[Request]:
        batch = self.poll(device)
        assert batch
        self.clock.advance(self.takes(device, len(batch)))
        self.end(device, batch)
        return batch

    def end(self, device: int, batch: Sequence[Request]) -> None:
        self.queue.finish(batch)
        if self.queue._pipelined:
            self.queue.released(device)
        self.queue.ran(batch, self.takes(device, len(batch)), device=device)


@pytest.fixture
def station() -> Station:
    return Station()


def test_who_has_no_time_for_the_slow_one_is_left_to_the_fast_one(station: Station) -> None:
    urgent, relaxed = station.put(0.2), station.put(1.0)
    assert station.poll(SLOW) == (relaxed,)
    assert station.poll(FAST) == (urgent,)


def test_where_nothing_is_left_the_slow_one_waits_while_any_deadline_can_be_met(station: Station) -> None:
    station.put()
    running = station.poll(FAST)
    station.put(0.25)
    step = station.queue.poll(SLOW)
    assert isinstance(step, Wait)
    assert 0.13 < step.until - station.clock.now() <= 0.15, "until the fast one could not make it any more"
    station.clock.advance(0.1)
    station.end(FAST, running)
    assert len(station.poll(FAST)) == 1


def test_without_deadlines_nobody_idles(station: Station) -> None:
    requests = [station.put() for _ in range(6)]
    assert station.poll(SLOW) == tuple(requests[:4])
    assert station.poll(FAST) == tuple(requests[4:])


def test_who_has_no_deadline_rides_past_those_who_are_left(station: Station) -> None:
    urgent, without_deadline = station.put(0.2), station.put()
    assert station.poll(SLOW) == (without_deadline,)
    assert station.poll(FAST) == (urgent,)


def test_the_fastest_decides_who_is_refused(station: Station) -> None:
    station.put()
    running = station.poll(FAST)
    with pytest.raises(DeadlineExceeded, match=r"until 20\d\.\d ms"):
        station.put(0.19)
    station.put(0.25)
    station.clock.advance(0.1)
    station.end(FAST, running)
    station.put(0.15)
    station.put()
    assert station.poll(SLOW), "it is busy for three times as long"
    station.put(0.15)


def test_a_busy_fast_device_and_an_idle_slow_one_are_weighed_for_each(station: Station) -> None:
    """When the fast one is free is known, and so is what the slow one takes: the sooner counts."""
    station.put()
    assert station.poll(FAST)
    with pytest.raises(DeadlineExceeded):
        station.put(0.15)
    first = station.put(0.35)
    assert station.poll(SLOW) == (first,), "in time, and sooner than it would be if it waited for a turn"


def test_who_could_be_in_time_nowhere_is_dropped_whoever_asks(station: Station) -> None:
    station.put()
    assert station.poll(FAST)
    lost = station.put(0.25)
    station.clock.advance(0.16)
    step = station.queue.poll(SLOW)
    assert isinstance(step, BatchAssignment)
    assert (step.batch, step.expired) == ((), (lost,))


def test_the_slow_one_drops_nobody_for_a_larger_batch() -> None:
    """By the rate rule it would; the fast one has time for them."""
    station = Station(rows=0.5)
    # Alone a request takes it 0.3 s, four take 0.75 s.
    urgent = station.put(0.35)
    relaxed = [station.put(5.0) for _ in range(30)]
    step = station.queue.poll(SLOW)
    assert isinstance(step, BatchAssignment)
    assert not step.shed
    assert step.batch == tuple(relaxed[:4]), "nor takes it a small batch for one"
    assert urgent in station.poll(FAST)


def test_how_long_it_takes_there_is_foretold(station: Station) -> None:
    station.put()
    step = station.queue.poll(SLOW)
    assert isinstance(step, BatchAssignment)
    assert step.predicted == pytest.approx(0.3, rel=0.05)
    free_at = station.queue._devices.each[SLOW].free_at(station.clock.now())
    assert free_at - station.clock.now() == pytest.approx(0.3, rel=0.05)


class QueuedRequest:
    """A thread that asks for work for a device, and gets it or goes on waiting."""

    def __init__(self, station: Station, device: int) -> None:
        self._work: list[BatchAssignment | None] = []
        self._thread = threading.Thread(
            target=lambda: self._work.append(station.queue.take(device)), daemon=True
        )
        self._thread.start()

    def batch(self) -> Sequence[Request]:
        self._thread.join(PATIENCE)
        assert self._work, "it waits for ever"
        return self._work[0].batch if self._work[0] is not None else ()


def test_a_worker_to_which_nothing_was_left_hears_of_what_it_can_take(station: Station) -> None:
    station.put()
    assert station.poll(FAST)
    urgent = station.put(0.25)
    waiting = QueuedRequest(station, SLOW)
    station.clock.await_sleepers()
    relaxed = station.put(5.0)
    assert waiting.batch() == (relaxed,)
    assert urgent.state is State.QUEUED


def test_a_worker_to_which_nothing_was_left_hears_of_the_end(station: Station) -> None:
    station.put()
    running = station.poll(FAST)
    station.put(0.25)
    waiting = QueuedRequest(station, SLOW)
    station.clock.await_sleepers()
    station.queue.close()
    station.end(FAST, running)
    station.end(FAST, station.poll(FAST))
    assert waiting.batch() == ()


def test_who_is_woken_instead_of_a_faster_one_hands_on() -> None:
    """The second batch of a pipelined device is closed just in time, though a slow one idles."""
    station = Station(pipelined=True)
    station.put()
    assert station.poll(FAST)
    second, other = QueuedRequest(station, FAST), QueuedRequest(station, SLOW)
    station.clock.await_sleepers(2)
    started = station.clock.now()
    urgent = station.put(0.25)
    turn = station.queue._devices.each[FAST].turn(started)
    assert turn < started + 0.2
    station.clock.await_sleepers(until=turn)
    station.clock.advance(turn - started)
    assert second.batch() == (urgent,)
    station.queue.close()
    assert other.batch() == ()


def test_a_class_of_its_own_is_no_reason_to_take_what_is_urgent() -> None:
    station = Station(weights=(4, 1))
    urgent, relaxed = station.put(0.2, rank=0), station.put(1.0, rank=1)
    assert station.poll(SLOW) == (relaxed,)
    assert station.poll(FAST) == (urgent,)


def test_a_device_to_which_nothing_was_left_for_long_is_tried_with_one_request(station: Station) -> None:
    station.clock.advance(11.0)
    station.put()
    running = station.poll(FAST)
    station.clock.advance(0.1)
    station.end(FAST, running)
    urgent = [station.put(0.2) for _ in range(3)]
    assert station.poll(SLOW) == tuple(urgent[:1]), "perhaps it is not slow any more"
    assert station.poll(FAST) == tuple(urgent[1:])


def test_who_is_not_slow_any_more_is_found_out(station: Station) -> None:
    station.seconds = {FAST: 0.1, SLOW: 0.1}
    for _ in range(15):
        station.put(1.0)
        station.run(SLOW)
        station.put()
        station.run(FAST)
    station.put(0.2)
    assert station.poll(SLOW)


@pytest.mark.parametrize("first", [0.1, 0.3], ids=["the first is fast", "the first is slow"])
def test_it_does_not_matter_which_is_the_first(first: float) -> None:
    station = Station({0: first, 1: 0.4 - first})
    fast, slow = (0, 1) if first == 0.1 else (1, 0)
    urgent, relaxed = station.put(0.2), station.put(1.0)
    assert station.poll(slow) == (relaxed,)
    assert station.poll(fast) == (urgent,)


def test_equal_devices_are_not_told_apart() -> None:
    station = Station({0: 0.1, 1: 0.11})
    urgent = station.put(0.2)
    assert station.poll(1) == (urgent,)


def test_the_slow_ones_times_teach_the_fast_ones() -> None:
    """All batches ran there for long: were its times taken for all devices', nothing would be accepted."""
    station = Station()
    for _ in range(50):
        station.put()
        station.run(SLOW)
    station.put(0.15)
    known = next(iter(station.queue.lessons.statistics()[0].values())).device
    assert known is not None
    assert known.alpha + known.beta == pytest.approx(0.1, rel=0.05)


def test_the_queue_drains_at_the_speed_of_all_together() -> None:
    station = Station(max_rows=8)
    for _ in range(8):
        station.put()
    with pytest.raises(QueueFull) as refused:
        station.put()
    assert refused.value.retry_after == pytest.approx(2 * 0.1 / (1 + 1 / 3), rel=0.1)


# When the fast one fails.


def fails(station: Station, batch: Sequence[Request]) -> None:
    """The fast device fails with a batch, which goes back."""
    back, ended = station.queue.outages.hand_back(batch, FAST, ran=True, out=True)
    assert (tuple(back), ended) == (batch, [])
    station.queue.ran(batch, None, device=FAST)


def test_nothing_is_left_to_a_device_that_is_out_nor_promised_in_its_name(station: Station) -> None:
    running = station.put(1.0)
    fails(station, station.poll(FAST))
    with pytest.raises(DeadlineExceeded, match=r"until 3\d\d\.\d ms"):
        station.put(0.2)
    soon = station.put(0.5)
    assert station.poll(SLOW) == (soon, running)


def test_it_is_the_fast_one_again_when_it_is_back(station: Station) -> None:
    running = station.put(1.0)
    fails(station, station.poll(FAST))
    station.queue.outages.recovered(FAST)
    urgent = station.put(0.2)
    assert station.poll(SLOW) == (running,)
    assert station.poll(FAST) == (urgent,)


def test_who_waits_since_all_is_left_to_the_fast_one_hears_that_it_is_out(station: Station) -> None:
    station.put(1.0)
    running = station.poll(FAST)
    urgent = station.put(0.35)
    station.clock.advance(0.1)
    assert isinstance(station.queue.poll(SLOW), Wait), "it would be late there"
    taken: list[BatchAssignment | None] = []
    slow = threading.Thread(target=lambda: taken.append(station.queue.take(SLOW)))
    slow.start()
    station.clock.await_sleepers()
    fails(station, running)
    slow.join(PATIENCE)
    (work,) = taken
    assert work is not None
    assert work.batch == running
    assert work.expired == (urgent,)


@pytest.mark.parametrize("end", ["finished", "abandoned"])
def test_a_slow_device_that_left_the_last_request_to_a_faster_one_ends_with_the_queue(
    station: Station, end: str
) -> None:
    station.put(1.0)
    running = station.poll(FAST)
    urgent = station.put(0.35)
    station.clock.advance(0.1)
    station.queue.close()
    taken: list[BatchAssignment | None] = []
    slow = threading.Thread(target=lambda: taken.append(station.queue.take(SLOW)))
    slow.start()
    station.clock.await_sleepers()
    station.end(FAST, running)
    if end == "finished":
        assert station.run(FAST) == (urgent,)
    else:
        assert station.queue.abandon() == [urgent]
    slow.join(PATIENCE)
    assert taken == [None]


def test_a_device_is_brought_back_once_what_left_for_it_is_out_of_hand() -> None:
    """What is loaded for it keeps its memory, without which there may be none for a new session."""
    station = Station({0: 0.1}, pipelined=True)
    station.put()
    first = station.poll(0)
    station.put()
    station.clock.advance(0.1)
    second = station.poll(0)
    assert second
    station.queue.outages.hand_back(first, 0, ran=True, out=True)
    station.queue.ran(first, None, device=0)
    taken: list[BatchAssignment | None] = []
    worker = threading.Thread(target=lambda: taken.append(station.queue.take(0)))
    worker.start()
    station.clock.await_sleepers()
    assert not taken, "the second batch is on the device"
    station.queue.outages.hand_back(second, 0, ran=False, out=True)
    station.queue.ran(second, None, device=0)
    worker.join(PATIENCE)
    assert [work is RECOVER for work in taken] == [True]


def test_what_the_warm_up_told_is_known_from_the_first_batch_on() -> None:
    clock = VirtualClock()
    queue = RequestQueue(Limits(MOST, 0.0), 100, 1 << 20, clock, devices=2)
    for count in (1, MOST):
        queue.anchor(count, SECONDS[FAST])
    queue.lessons.expect_pace(SLOW, SECONDS[SLOW] / SECONDS[FAST])
    urgent = Request((), lambda outcome: None, names=None, rows=1, nbytes=0, deadline=0.2)
    queue.put([urgent])
    assert isinstance(queue.poll(SLOW), Wait)
    step = queue.poll(FAST)
    assert isinstance(step, BatchAssignment)
    assert list(step.batch) == [urgent]
