"""Refusals on arrival because the queued requests leave no time: the product's queue in virtual time."""

from __future__ import annotations

import math
from collections.abc import Hashable

import pytest

from tensorferry.batcher import QueueFull, Request
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Outcome
from tensorferry.batcher.settings import BatcherSettings, ClientPolicy
from tensorferry.batcher.testing import VirtualClock

MOST, FULL = 10, 0.1
# Time of ten full batches.
TIMEOUT = 1.0


def ignore(outcome: Outcome) -> None:
    """Ignore the outcome."""


class Door:
    """A queue whose batches take 10 ms per row, on one device, which the test runs."""

    def __init__(self, classes: int = 1, clients: ClientPolicy | None = None) -> None:
        self.clock = VirtualClock()
        self.queue = RequestQueue(
            BatcherSettings(
                MOST,
                0.0,
                max_queue_size=4096,
                max_queue_bytes=1 << 30,
                priority_weights=(1,) * classes,
                clients=clients,
            ),
            self.clock,
        )
        for rows in (1, MOST):
            self.queue.add_warmup_sample(rows, rows * FULL / MOST)
        self.work: BatchAssignment | None = None
        # The prediction is recent.
        self.offer(TIMEOUT)
        self.run()

    def offer(
        self,
        timeout: float = TIMEOUT,
        *,
        client: str = "",
        rank: int = 0,
        key: Hashable = None,
        rows: int = 1,
    ) -> bool:
        """Return whether a request is accepted."""
        deadline = self.clock.now() + timeout
        request = Request(
            (), ignore, names=None, rows=rows, nbytes=0, key=key, deadline=deadline, client=client
        )
        request.rank = rank
        try:
            self.queue.put([request])
        except QueueFull as error:
            self.refusal = error
            return False
        return True

    def fill(self, **options: object) -> int:
        """Return how many requests are accepted before one is refused, of at most 200."""
        return next((count for count in range(200) if not self.offer(**options)), 200)  # type: ignore[arg-type]

    def start(self) -> int:
        """Start a batch; return its rows."""
        work = self.queue.poll()
        assert isinstance(work, BatchAssignment)
        self.work = work
        return len(work.batch)

    def finish(self) -> int:
        """Complete the batch in its predicted time; return how many requests were in time."""
        assert self.work is not None
        batch = self.work.batch
        seconds = sum(request.rows for request in batch) * FULL / MOST
        self.clock.advance(seconds)
        in_time = sum(request.deadline > self.clock.now() for request in self.queue.finish(batch))
        self.queue.batch_done(batch, seconds)
        return in_time

    def run(self) -> int:
        self.start()
        return self.finish()


def test_as_many_are_let_in_as_are_answered_in_time() -> None:
    door = Door()
    let_in = door.fill()
    assert 9 * MOST <= let_in <= 10 * MOST
    assert sum(door.run() for _ in range(let_in // MOST)) == let_in // MOST * MOST, "none was shed"


def test_a_refusal_has_a_retry_time() -> None:
    door = Door()
    door.fill()
    error = door.refusal
    assert "behind the requests queued before it" in str(error)
    assert f"retry in {error.retry_after:g} s" in str(error)
    assert not door.offer()
    door.run()
    assert error.retry_after <= FULL
    assert door.offer()


def test_an_earlier_deadline_runs_first_and_is_accepted() -> None:
    door = Door()
    door.fill()
    assert not door.offer(TIMEOUT)
    assert door.offer(TIMEOUT / 2)


def test_a_later_deadline_is_accepted() -> None:
    door = Door()
    door.fill()
    assert door.offer(2 * TIMEOUT)
    assert door.offer(math.inf)


def test_a_tight_deadline_is_left_to_the_rate_rule() -> None:
    """It would be in time only before the queued requests, which the rate rule decides."""
    assert Door().fill(timeout=1.9 * FULL) == 200
    assert Door().fill(timeout=2.1 * FULL) < 3 * MOST


def test_where_requests_share_no_batch_all_are_let_in() -> None:
    """A long queue makes batches of rare shapes larger."""
    door = Door()
    assert door.offer(key="rare")
    assert door.fill() == 200


def test_outdated_estimates_refuse_no_request() -> None:
    door = Door()
    door.fill()
    door.clock.advance(0.99)
    assert not door.offer()
    door.clock.advance(0.02)
    assert door.offer()


def overloaded(door: Door, batches: int) -> int:
    """Offer twice the capacity for this many batches; return the rows that then wait."""
    for _ in range(batches):
        for _ in range(2 * MOST):
            door.offer()
        door.run()
    return door.queue.sizes().queued_rows


def test_a_queue_that_stands_for_long_is_kept_short() -> None:
    """And as long as before for the next burst, once it was empty."""
    door = Door()
    assert overloaded(door, 40) >= 8 * MOST, "it may be a burst"
    assert overloaded(door, 40) <= 6 * MOST
    assert overloaded(door, 400) <= 3 * MOST
    while door.queue.sizes().queued:
        door.run()
    assert door.fill() >= 9 * MOST


def test_however_long_it_stood_the_device_has_full_batches() -> None:
    door = Door()
    overloaded(door, 2000)
    for _ in range(20):
        assert overloaded(door, 1) >= MOST


def test_a_higher_class_does_not_wait_for_a_lower() -> None:
    door = Door(classes=2)
    door.fill(rank=1)
    assert door.fill(rank=0) >= 9 * MOST


def test_a_client_does_not_wait_for_another_that_sends_more() -> None:
    door = Door(clients=ClientPolicy(fair=True))
    greedy = door.fill(client="greedy")
    assert greedy >= 9 * MOST
    assert door.offer(client="meek")
    # Half of the answers in that time are theirs.
    assert 4 * MOST <= door.fill(client="meek") <= 6 * MOST
    assert not door.offer(client="greedy")


def test_refused_requests_count_as_demand() -> None:
    """The rate rule follows the arrivals, not the accepted requests."""
    door = Door()
    for _ in range(300):
        door.clock.advance(0.001)
        door.offer()
    demand = door.queue._selector._arrival_rates[0].demand(door.clock.now(), 1.0)
    assert demand.rows_per_second == pytest.approx(1000, rel=0.3)


def test_others_like_one_that_was_turned_away_are_so_before_they_are_read() -> None:
    door = Door()
    soon = door.clock.now() + TIMEOUT
    assert door.queue.fast_reject(soon) is None, "nobody was turned away"
    door.fill()
    told = door.queue.fast_reject(soon)
    assert told is not None
    assert (str(told), told.retry_after) == (str(door.refusal), door.refusal.retry_after)
    assert door.queue.fast_reject(soon - 0.5) is None, "it rides before"
    assert door.queue.fast_reject(soon + 1.0) is None, "it has more time"
    door.clock.advance(4.1 * door.refusal.pause_seconds)
    assert door.queue.fast_reject(soon) is None, "it was a while ago"


def test_others_may_wait_for_a_part_of_their_timeout() -> None:
    """And of a batch's time, because no batch starts before its end."""
    door = Door()
    door.fill()
    assert door.refusal.pause_seconds == pytest.approx(FULL / 4)
    assert door.offer(2.5 * FULL)
    assert not door.offer()
    assert door.refusal.pause_seconds == pytest.approx(2.5 * FULL / 16)
    door.run()
    door.fill()
    assert door.refusal.pause_seconds == pytest.approx(2.5 * FULL / 16), "the hasty come again"
    for _ in range(2):
        door.run()
        door.fill()
    assert door.refusal.pause_seconds == pytest.approx(FULL / 4)


def test_one_in_a_while_is_looked_at() -> None:
    door = Door()
    soon = door.clock.now() + TIMEOUT
    door.fill()
    door.clock.advance(4.1 * door.refusal.pause_seconds)
    assert door.queue.fast_reject(soon) is None
    assert door.queue.fast_reject(soon) is not None, "one will do"
    door.clock.advance(1.1 * door.refusal.pause_seconds)
    assert door.queue.fast_reject(soon) is None, "it may have left"


def test_as_many_are_read_as_find_room() -> None:
    """However many arrive before the first of them is queued."""
    door = Door()
    door.fill()
    later = door.clock.now() + TIMEOUT + 0.3 * FULL
    read = [door.queue.fast_reject(later) is None for _ in range(20)]
    assert 2 <= sum(read) <= 4


def test_a_batch_that_closes_as_predicted_changes_nothing() -> None:
    """A request behind the queued ones would start as late as before, unless some of them were
    dropped.
    """
    door = Door()
    soon = door.clock.now() + TIMEOUT
    door.fill()
    door.start()
    assert door.queue.fast_reject(soon) is not None
    door.queue._selector.overload.batch_dispatched(door.clock.now(), MOST)
    assert door.queue.fast_reject(soon) is None


def test_if_all_queued_requests_fit_every_deadline_is_checked() -> None:
    door = Door()
    soon = door.clock.now() + TIMEOUT
    door.fill()
    while door.queue.sizes().queued_rows > 2 * MOST:
        door.run()
        # As if it took no time, so that all the others can still be answered.
        soon = door.clock.now() + TIMEOUT
        door.offer()
    door.start()
    assert door.queue.fast_reject(soon) is None


@pytest.mark.parametrize(("classes", "fair"), [(2, False), (1, True)])
def test_where_requests_are_not_alike_each_is_looked_at(classes: int, fair: bool) -> None:
    door = Door(classes, ClientPolicy(fair=fair))
    door.fill()
    assert door.queue.fast_reject(door.clock.now() + TIMEOUT) is None


def test_where_shapes_differ_each_is_looked_at() -> None:
    door = Door()
    assert door.offer(key="rare")
    door.run()
    door.fill()
    assert not door.offer()
    assert door.queue.fast_reject(door.clock.now() + TIMEOUT) is None
