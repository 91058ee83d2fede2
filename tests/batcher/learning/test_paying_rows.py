"""The batch size that pays, learned and used by the shipping queue in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import pytest

from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Request
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import VirtualClock

MOST = 32
SIZES = (1, 2, 4, 8, 16, 32)
Curve = Callable[[int], float]


def rising(rows: int) -> float:
    """Return the seconds of a batch of OCR detection on a core of a CPU, about: 24 ms for a row alone, 41 ms in 32."""
    return rows * (0.0236 + 0.0035 * math.log2(rows))


def falling(rows: int) -> float:
    return 0.003 + 0.0004 * rows


def knee(rows: int) -> float:
    """Return a time per row that is best for 8 rows."""
    return 0.01 * max(1.0, math.pow(math.ceil(rows / 8), 1.5))


def best_rate(curve: Curve) -> float:
    return max(rows / curve(rows) for rows in SIZES)


class Callers:
    """Clients that always have a request queued, so that each batch is as large as the queue wants it."""

    def __init__(self, count: int = 64, *, first: int = 1, adaptive: bool = True, **options: object) -> None:
        self.clock = VirtualClock()
        # That of the last batch.
        self.key = ""
        self._noise = random.Random(1)
        settings = BatcherSettings(MOST, adaptive=adaptive, **options)  # type: ignore[arg-type]
        self.queue = RequestQueue(settings, self.clock)
        self.send(first)
        self.run(rising)
        self.send(count)

    def send(self, count: int, key: str = "") -> None:
        """Queue requests of one row."""
        for _ in range(count):
            self.queue.put((Request((), lambda outcome: None, names=None, rows=1, nbytes=0, key=key),))

    def run(self, curve: Curve | Mapping[str, Curve]) -> int:
        """Run a batch that takes as long as the curve says, or that of its key; return its rows."""
        work = self.queue.poll()
        assert isinstance(work, BatchAssignment)
        self.key = str(work.batch[0].key)
        curve = curve[self.key] if isinstance(curve, Mapping) else curve
        seconds = curve(len(work.batch)) * math.exp(self._noise.gauss(0, 0.03))
        self.clock.advance(seconds)
        self.queue.finish(work.batch)
        self.queue.batch_done(work.batch, seconds)
        return len(work.batch)

    def rate(self, curve: Curve, seconds: float) -> float:
        """Run batches for a while; return the rows a second."""
        began = self.clock.now()
        answered = 0
        while self.clock.now() < began + seconds:
            rows = self.run(curve)
            answered += rows
            self.send(rows)
        return answered / (self.clock.now() - began)

    @property
    def full_rows(self) -> int:
        (bucket,) = self.queue.learning.statistics()[0].values()
        return bucket.full_rows


@pytest.mark.parametrize("curve", [rising, falling, knee])
def test_the_size_that_pays_is_found_within_ten_seconds(curve: Curve) -> None:
    callers = Callers()
    callers.rate(curve, 10)
    assert callers.rate(curve, 10) >= 0.97 * best_rate(curve)


def test_the_size_that_pays_is_found_if_only_the_largest_has_run() -> None:
    """Nothing is known of smaller sizes then: a burst of clients was the first load."""
    callers = Callers(first=MOST)
    callers.rate(rising, 15)
    assert callers.rate(rising, 10) >= 0.97 * best_rate(rising)


def test_answers_of_a_larger_batch_do_not_count_against_the_size_that_is_tried() -> None:
    """The host answers a batch while the next one runs, and on few cores delays that."""
    callers = Callers()
    rows_before = 0

    def gentle(rows: int) -> float:
        return rows * (0.025 + 0.0012 * math.log2(rows))

    def delayed(rows: int) -> float:
        nonlocal rows_before
        delay = 0.001 * (rows_before - rows)
        rows_before = rows
        return gentle(rows) + delay

    callers.rate(delayed, 20)
    # 0.80 if the first batch of a trial counted.
    assert callers.rate(delayed, 10) >= 0.97 * best_rate(gentle)


def test_a_size_that_was_delayed_is_found_soon_afterwards() -> None:
    """Other programs delayed its first trials, and a batch takes so long that there are few trials."""
    callers = Callers(first=MOST)
    delayed = True

    def slow(rows: int) -> float:
        seconds = rows * (0.14 + 0.015 * math.log2(rows))
        return 1.3 * seconds if delayed and rows == 1 else seconds

    callers.rate(slow, 120)
    assert callers.full_rows == 2
    delayed = False
    callers.rate(slow, 30)
    assert callers.full_rows == 1


def test_a_trial_ends_for_requests_that_would_be_late() -> None:
    """A size below the usual one runs twice. Requests that come in its first run have time for one usual batch only."""

    callers = Callers()

    def flat(rows: int) -> float:
        late = callers.clock.now() + 0.0285
        for _ in range(0 if rows == MOST else MOST):
            request = Request((), lambda outcome: None, names=None, rows=1, nbytes=0, key="", deadline=late)
            callers.queue.put((request,))
        return 0.01

    while callers.run(flat) == MOST:
        callers.send(MOST)
    assert callers.run(flat) == MOST


@pytest.mark.parametrize(("before", "after"), [(rising, falling), (falling, rising)])
def test_a_device_whose_times_change_gets_another_size(before: Curve, after: Curve) -> None:
    callers = Callers()
    callers.rate(before, 10)
    callers.rate(after, 10)
    assert callers.rate(after, 10) >= 0.9 * best_rate(after)


def test_a_device_that_often_changes_its_speed_seldom_runs_the_worst_sizes() -> None:
    callers = Callers()
    callers.rate(rising, 10)
    answered, seconds = 0, 0.0
    for speed in (1.5, 0.8, 1.3, 0.7, 1.6, 1.0) * 5:
        until = callers.clock.now() + 4
        while callers.clock.now() < until:
            rows = callers.run(lambda rows, speed=speed: speed * rising(rows))  # type: ignore[misc]
            callers.send(rows)
            answered += rows
            # Without the changes of speed.
            seconds += rising(rows)
    # 0.78 if each change forgot all times, 0.86 if it scaled them.
    assert answered / seconds >= 0.97 * best_rate(rising)


@pytest.mark.parametrize(
    ("curve", "wrong"),
    [
        (falling, lambda rows: 3.0 if rows >= 16 else 1.0),
        (rising, lambda rows: 0.5 if rows <= 2 else 1.0),
        (rising, lambda rows: 3.0 if rows <= 4 else 1.0),
    ],
    ids=["large too slow", "small too fast", "small too slow"],
)
def test_a_wrong_warm_up_is_corrected(curve: Curve, wrong: Curve) -> None:
    callers = Callers()
    for rows in SIZES:
        callers.queue.learning.add_warmup_sample(rows, curve(rows) * wrong(rows))
    callers.rate(curve, 10)
    assert callers.rate(curve, 10) >= 0.9 * best_rate(curve)


def test_a_slower_device_does_not_make_full_batches_as_large_as_possible() -> None:
    """Costs of sizes are compared at the same speed, so a size that ran before the change is no better than now."""
    callers = Callers()
    callers.rate(rising, 20)
    found = set()
    for _ in range(40):
        callers.send(callers.run(lambda rows: 1.6 * rising(rows)))
        found.add(callers.full_rows)
    assert max(found) <= 4


def test_a_size_that_seldom_runs_does_not_keep_others_from_being_found() -> None:
    """After a burst, a batch of the largest size may never run again."""
    callers = Callers(16)
    callers.send(48)
    for _ in range(3):
        callers.run(rising)
    callers.send(16 - callers.queue.sizes().queued)
    callers.rate(rising, 10)
    assert callers.rate(rising, 10) >= 0.9 * best_rate(rising)


def test_a_queue_that_has_formed_drains_again() -> None:
    """At 0.9 of the best rate, batches of up to 32 rows would serve 0.58 of that rate, and the queue would only grow."""
    callers = Callers(count=400)
    callers.rate(rising, 10)
    queued = callers.queue.sizes().queued
    arrivals = random.Random(2)
    next_arrival, end = callers.clock.now(), callers.clock.now() + 200
    while callers.clock.now() < end and callers.queue.sizes().queued:
        callers.run(rising)
        while next_arrival < callers.clock.now():
            callers.send(1)
            next_arrival += arrivals.expovariate(0.9 * best_rate(rising))
    assert callers.queue.sizes().queued < queued / 4


def test_each_bucket_has_the_size_that_pays_for_it() -> None:
    """A bucket has one padded length. Where only long rows cost more in large batches, only their batches are small."""
    callers = Callers(count=0)
    curves = {"short": falling, "long": rising}
    for key in curves:
        callers.send(1, key)
        callers.run(curves)
    for key in curves:
        callers.send(64, key)
    while callers.clock.now() < 20:
        callers.send(callers.run(curves), callers.key)
    learning = callers.queue.learning
    assert [learning.full_rows(key) for key in ("short", "long", "unknown")] == [MOST, 1, MOST]


def test_with_a_window_batches_are_filled() -> None:
    """What a smaller batch leaves would wait for the window again."""
    assert BatcherSettings(MOST).sizes_pay
    assert not BatcherSettings(MOST, max_queue_delay=1.0).sizes_pay


@pytest.mark.parametrize("options", [{"adaptive": False}, {"preferred_batch_sizes": (4, 8)}])
def test_sizes_that_were_chosen_are_kept(options: dict[str, object]) -> None:
    callers = Callers(**options)  # type: ignore[arg-type]
    callers.rate(rising, 10)
    assert callers.full_rows == MOST
