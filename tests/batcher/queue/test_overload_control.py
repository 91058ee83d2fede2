"""Refusals on arrival because the queued requests leave no time: the product's queue in virtual time."""

from __future__ import annotations

import math
from collections.abc import Hashable

import pytest
from support.batcher.rig import ignore

from tensorferry.batcher import QueueFull, Request
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings, ClientPolicy
from tensorferry.batcher.testing import VirtualClock

MOST, FULL = 10, 0.1
# Time of ten full batches.
TIMEOUT = 1.0


class QueueUnderLoad:
    """A queue whose batches take 10 ms per row, on one device, which the test runs."""

    def __init__(self, classes: int = 1, clients: ClientPolicy | None = None) -> None:
        self.clock = VirtualClock()
        self.inner = RequestQueue(
            BatcherSettings(MOST, priority_weights=(1,) * classes, clients=clients), self.clock
        )
        for rows in (1, MOST):
            self.inner.learning.add_warmup_sample(rows, rows * FULL / MOST)
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
            self.inner.put([request])
        except QueueFull as error:
            self.refusal = error
            return False
        return True

    def fill(self, **options: object) -> int:
        """Return how many requests are accepted before one is refused, of at most 200."""
        return next((count for count in range(200) if not self.offer(**options)), 200)  # type: ignore[arg-type]

    def start(self) -> int:
        """Start a batch; return its rows."""
        work = self.inner.poll()
        assert isinstance(work, BatchAssignment)
        self.work = work
        return len(work.batch)

    def finish(self) -> int:
        """Complete the batch in its predicted time; return how many requests were in time."""
        assert self.work is not None
        batch = self.work.batch
        seconds = sum(request.rows for request in batch) * FULL / MOST
        self.clock.advance(seconds)
        in_time = sum(request.deadline > self.clock.now() for request in self.inner.finish(batch))
        self.inner.batch_done(batch, seconds)
        return in_time

    def run(self) -> int:
        self.start()
        return self.finish()


def test_as_many_are_accepted_as_are_answered_in_time() -> None:
    queue = QueueUnderLoad()
    accepted = queue.fill()
    assert 9 * MOST <= accepted <= 10 * MOST
    answered = 0
    while queue.inner.sizes().queued:
        answered += queue.run()
    assert answered == accepted, "none was shed"


def test_a_refusal_has_a_retry_time() -> None:
    queue = QueueUnderLoad()
    queue.fill()
    error = queue.refusal
    assert "behind the requests queued before it" in str(error)
    assert f"retry in {error.retry_after:g} s" in str(error)
    assert not queue.offer()
    queue.run()
    assert error.retry_after <= FULL
    assert queue.offer()


def test_a_later_deadline_is_accepted() -> None:
    queue = QueueUnderLoad()
    queue.fill()
    assert queue.offer(2 * TIMEOUT)
    assert queue.offer(math.inf)


def test_a_tight_deadline_is_left_to_the_rate_rule() -> None:
    """It would be in time only before the queued requests, which the rate rule decides."""
    assert QueueUnderLoad().fill(timeout=1.9 * FULL) == 200
    assert QueueUnderLoad().fill(timeout=2.1 * FULL) < 3 * MOST


def test_if_requests_share_no_batch_all_are_accepted() -> None:
    """A long queue makes batches of rare shapes larger."""
    queue = QueueUnderLoad()
    assert queue.offer(key="rare")
    assert queue.fill() == 200


def test_outdated_estimates_refuse_no_request() -> None:
    queue = QueueUnderLoad()
    queue.fill()
    queue.clock.advance(0.99)
    assert not queue.offer()
    queue.clock.advance(0.02)
    assert queue.offer()


def overloaded(queue: QueueUnderLoad, batches: int) -> int:
    """Offer twice the capacity for this many batches; return the rows that then wait."""
    for _ in range(batches):
        for _ in range(2 * MOST):
            queue.offer()
        queue.run()
    return queue.inner.sizes().queued_rows


def test_a_queue_that_has_been_long_is_kept_short() -> None:
    """And as long as before for the next burst, once it was empty."""
    queue = QueueUnderLoad()
    assert overloaded(queue, 40) >= 8 * MOST, "it may be a burst"
    assert overloaded(queue, 40) <= 6 * MOST
    assert overloaded(queue, 400) <= 3 * MOST
    while queue.inner.sizes().queued:
        queue.run()
    assert queue.fill() >= 9 * MOST


def test_a_higher_class_does_not_wait_for_a_lower() -> None:
    queue = QueueUnderLoad(classes=2)
    queue.fill(rank=1)
    assert queue.fill(rank=0) >= 9 * MOST


def test_a_client_does_not_wait_for_another_that_sends_more() -> None:
    queue = QueueUnderLoad(clients=ClientPolicy(fair=True))
    greedy = queue.fill(client="greedy")
    assert greedy >= 9 * MOST
    assert queue.offer(client="meek")
    # Half of the answers in that time are theirs.
    assert 4 * MOST <= queue.fill(client="meek") <= 6 * MOST
    assert not queue.offer(client="greedy")


def test_refused_requests_count_as_demand() -> None:
    """The rate rule follows the arrivals, not the accepted requests."""
    queue = QueueUnderLoad()
    for _ in range(300):
        queue.clock.advance(0.001)
        queue.offer()
    demand = queue.inner._selector.arrivals.demand(0, queue.clock.now(), 1.0)
    assert demand.rows_per_second == pytest.approx(1000, rel=0.3)


def test_requests_like_a_refused_one_are_refused_before_they_are_read() -> None:
    queue = QueueUnderLoad()
    soon = queue.clock.now() + TIMEOUT
    assert queue.inner.admission.fast_reject(soon) is None, "no request was rejected"
    queue.fill()
    refusal = queue.inner.admission.fast_reject(soon)
    assert refusal is not None
    assert (str(refusal), refusal.retry_after) == (str(queue.refusal), queue.refusal.retry_after)
    assert queue.inner.admission.fast_reject(soon - 0.5) is None, "it runs before"
    assert queue.inner.admission.fast_reject(soon + 1.0) is None, "it has more time"
    queue.clock.advance(4.1 * queue.refusal.pause_seconds)
    assert queue.inner.admission.fast_reject(soon) is None, "it was a while ago"


def test_others_may_wait_for_a_part_of_their_timeout() -> None:
    """And of a batch's time, because no batch starts before its end."""
    queue = QueueUnderLoad()
    queue.fill()
    assert queue.refusal.pause_seconds == pytest.approx(FULL / 4)
    assert queue.offer(2.5 * FULL)
    assert not queue.offer()
    assert queue.refusal.pause_seconds == pytest.approx(2.5 * FULL / 16)
    queue.run()
    queue.fill()
    assert queue.refusal.pause_seconds == pytest.approx(2.5 * FULL / 16), "short deadlines return"
    for _ in range(2):
        queue.run()
        queue.fill()
    assert queue.refusal.pause_seconds == pytest.approx(FULL / 4)


def test_now_and_then_one_is_checked() -> None:
    queue = QueueUnderLoad()
    soon = queue.clock.now() + TIMEOUT
    queue.fill()
    queue.clock.advance(4.1 * queue.refusal.pause_seconds)
    assert queue.inner.admission.fast_reject(soon) is None
    assert queue.inner.admission.fast_reject(soon) is not None, "one will do"
    queue.clock.advance(1.1 * queue.refusal.pause_seconds)
    assert queue.inner.admission.fast_reject(soon) is None, "the request that was let through may be gone"


def test_as_many_are_read_as_find_room() -> None:
    """However many arrive before the first of them is queued."""
    queue = QueueUnderLoad()
    queue.fill()
    later = queue.clock.now() + TIMEOUT + 0.3 * FULL
    read = [queue.inner.admission.fast_reject(later) is None for _ in range(20)]
    assert 2 <= sum(read) <= 4


def test_a_batch_that_closes_as_predicted_changes_nothing() -> None:
    """A request behind the queued ones would start as late as before, unless some of them were
    dropped.
    """
    queue = QueueUnderLoad()
    soon = queue.clock.now() + TIMEOUT
    queue.fill()
    queue.start()
    assert queue.inner.admission.fast_reject(soon) is not None
    queue.inner._selector.overload.batch_dispatched(queue.clock.now(), MOST, MOST)
    assert queue.inner.admission.fast_reject(soon) is None


def test_if_all_queued_requests_fit_every_deadline_is_checked() -> None:
    queue = QueueUnderLoad()
    soon = queue.clock.now() + TIMEOUT
    queue.fill()
    while queue.inner.sizes().queued_rows > 2 * MOST:
        queue.run()
        # As if it took no time, so that all the others can still be answered.
        soon = queue.clock.now() + TIMEOUT
        queue.offer()
    queue.start()
    assert queue.inner.admission.fast_reject(soon) is None


@pytest.mark.parametrize(("classes", "fair"), [(2, False), (1, True)])
def test_if_requests_are_not_alike_each_is_checked(classes: int, fair: bool) -> None:
    queue = QueueUnderLoad(classes, ClientPolicy(fair=fair))
    queue.fill()
    assert queue.inner.admission.fast_reject(queue.clock.now() + TIMEOUT) is None
