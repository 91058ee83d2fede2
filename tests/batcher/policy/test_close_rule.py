"""The close rule and batch forming by table and by property."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import ignore, reproducible

from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.policy.batch_forming import form_batch
from tensorferry.batcher.policy.class_queue import ClassQueue
from tensorferry.batcher.policy.close_rule import Close, decide
from tensorferry.batcher.policy.load_shedding import ArrivalDemand, infeasible
from tensorferry.batcher.request import CloseReason, Request
from tensorferry.batcher.settings import BatcherSettings


def waiting(rows: int = 1, arrival: float = 0.0, deadline: float = math.inf) -> Request:
    request = Request((), ignore, names=None, rows=rows, nbytes=0, deadline=deadline)
    request.arrival = arrival
    return request


def class_queue(requests: Sequence[Request], max_wait_before_priority: float = 1000.0) -> ClassQueue:
    """A class queue of these requests, due when they have waited for long."""
    queue = ClassQueue()
    queue.max_wait_before_priority = max_wait_before_priority
    for request in requests:
        queue.add(request)
    return queue


@dataclass(frozen=True)
class View:
    rows: int
    oldest_arrival: float
    latest_start: float = math.inf
    full_rows: int = 4

    @property
    def class_queues(self) -> list[ClassQueue]:
        return [class_queue([waiting(arrival=self.oldest_arrival)] * self.rows)]


GREEDY = BatcherSettings(4, 0.0)
WINDOW = BatcherSettings(4, 10.0)


@pytest.mark.parametrize(
    ("view", "now", "settings", "draining", "reason"),
    [
        pytest.param(View(1, 5), 5, GREEDY, False, CloseReason.IDLE, id="alone: at once"),
        pytest.param(View(4, 5), 5, GREEDY, False, CloseReason.FULL, id="full, no window"),
        pytest.param(View(1, 5), 15, WINDOW, False, CloseReason.WINDOW, id="window over"),
        pytest.param(View(9, 5), 5, WINDOW, False, CloseReason.FULL, id="over-full: early"),
        pytest.param(View(1, 5), 5, WINDOW, True, CloseReason.DRAIN, id="drain: early"),
        pytest.param(View(1, 5, 8), 8, WINDOW, False, CloseReason.WINDOW, id="closed for a deadline"),
    ],
)
def test_the_reason_of_a_close(
    view: View, now: float, settings: BatcherSettings, draining: bool, reason: CloseReason
) -> None:
    assert decide({"a": view}, now, settings, draining) == Close("a", reason, 4)


class Affine:
    """Batch times of 10 s and 1 s a row, known exactly."""

    stale = False

    def mean(self, rows: int) -> float:
        return 10.0 + rows

    def upper(self, rows: int) -> float:
        return self.mean(rows)

    def max_rows_within(self, slack: float) -> int:
        return max(0, math.floor(slack - 10))


class Uncertain(Affine):
    """Batch times that may be a fifth longer."""

    def upper(self, rows: int) -> float:
        return 1.2 * self.mean(rows)

    def max_rows_within(self, slack: float) -> int:
        return super().max_rows_within(slack / 1.2)


@pytest.mark.parametrize(
    ("deadline", "dropped"), [(115.9, True), (116, True), (116.1, False), (math.inf, False)]
)
def test_a_request_that_would_be_late_even_alone_is_infeasible(deadline: float, dropped: bool) -> None:
    request = waiting(6, deadline=deadline)
    assert infeasible([request], 100.0, Affine().upper) == ([request] if dropped else [])


BUSY = ArrivalDemand(rows_per_second=1.0, typical_deadline=40.0)


def with_deadline(*deadlines: float, rows_counted: int = 1) -> list[Request]:
    return [waiting(rows_counted, deadline=deadline) for deadline in deadlines]


def form(
    with_deadline: list[Request],
    without_deadline: list[Request] = [],  # noqa: B006 (never changed)
    *,
    most: int = 8,
    now: float = 0.0,
    demand: ArrivalDemand = BUSY,
    times: Affine | None = None,
    max_wait_before_priority: float = 1000.0,
) -> tuple[list[Request], list[Request]]:
    formed = form_batch(
        [class_queue(with_deadline + without_deadline, max_wait_before_priority)],
        0,
        [most],
        now,
        most,
        times or Affine(),
        lambda: demand,
    )
    assert formed.rows == [sum(request.rows_counted for request in formed.batch)]
    return formed.batch, formed.shed


def test_if_all_can_make_their_deadlines_none_is_shed() -> None:
    queue = with_deadline(*range(20, 28))
    assert form(queue) == (queue, [])


def test_the_fewest_oldest_are_shed_so_that_the_batch_keeps_up() -> None:
    """The first three have slack for a row each: batches of one row, of 11 s, would never keep up."""
    queue = with_deadline(11.5, 11.6, 11.7, 40, 41, 42, 43, 44, 45)
    kept, shed = form(queue)
    assert shed == queue[:3]
    assert kept == queue[3:]


def test_none_is_shed_if_a_small_batch_keeps_up_with_few_arrivals() -> None:
    queue = with_deadline(11.5, 40, 41)
    kept, shed = form(queue, demand=ArrivalDemand(rows_per_second=0.01, typical_deadline=40.0))
    assert (kept, shed) == (queue[:1], [])


@pytest.mark.parametrize(
    ("rate", "devices", "dropped"),
    [(0.6, 1, 0), (0.6, 8, 1), (0.4, 1, 0), (0.4, 8, 0)],
    ids=lambda value: f"{value:g}",
)
def test_more_is_shed_if_several_devices_share_an_overload(rate: float, devices: int, dropped: int) -> None:
    """Their arrivals fill the batch; but none is shed for it if full batches, 8 rows in 18 s, keep up."""
    queue = with_deadline(14.5, *[16.5] * 8)
    kept, shed = form(queue, demand=ArrivalDemand(rate, 22.0, devices))
    assert (shed, len(kept)) == (queue[:dropped], 6 if dropped else 4)


def test_a_single_device_must_keep_up_with_what_the_mean_times_allow() -> None:
    """With three rows it would keep up only if all batches were as slow as they may be."""
    queue = with_deadline(16.0, *[30.0] * 8)
    assert form(queue, demand=ArrivalDemand(0.6, 22.0), times=Uncertain()) == (queue[1:], queue[:1])


@pytest.mark.parametrize("slowdown", [1.3, 2.0])
def test_a_slow_spell_that_is_over_is_forgotten_though_only_small_batches_keep_the_deadlines(
    slowdown: float,
) -> None:
    """While a full batch is predicted to be slow it does not run, so the prediction is never corrected."""
    times, rows = BatchCostModel(16, adaptive=False), 0
    for size in (1, 2, 4, 8, 16):
        times.add_warmup_sample(size, 0.0045 + 0.005 * size)
    for _ in range(60):
        times.observe(0.0, 16, slowdown * 0.0845)
    backlog = class_queue(with_deadline(*[0.02 + 0.48 * at / 250 for at in range(250)]))
    for _ in range(200):
        formed = form_batch([backlog], 0, [16], 0.0, 16, times, lambda: ArrivalDemand(520.0, 0.5))
        (rows,) = formed.rows
        times.observe(0.0, rows, 0.0045 + 0.005 * rows)
    assert rows == 16
    assert times.mean(16) == pytest.approx(0.0845, rel=0.05)


def test_a_request_without_deadline_is_never_shed_and_fills_the_room() -> None:
    without_deadline = [waiting(), waiting()]
    queue = with_deadline(30, 31, 32)
    assert form(queue, without_deadline, most=4) == (queue + without_deadline[:1], [])
    assert form([], without_deadline, most=4) == (without_deadline, [])


def test_an_overdue_request_without_deadline_precedes_those_with_deadlines_which_keep_half_the_room() -> None:
    without_deadline = [waiting(arrival=0.0) for _ in range(9)]
    queue = with_deadline(*[200.0 + i for i in range(9)])
    kept, shed = form(queue, without_deadline, now=100.0, max_wait_before_priority=50.0)
    assert kept == without_deadline[:4] + queue[:4]
    assert shed == []


NOW = 100.0
views = st.builds(
    View,
    rows=st.integers(1, 8),
    oldest_arrival=st.floats(NOW - 20, NOW),
    latest_start=st.one_of(st.just(math.inf), st.floats(NOW, NOW + 20, exclude_min=True)),
)
limits = st.builds(BatcherSettings, st.integers(1, 6), st.sampled_from([0.0, 0.5, 10.0]))
buckets = st.dictionaries(st.integers(0, 9), views, max_size=6)


def _may_close(view: View, limit: BatcherSettings, draining: bool) -> bool:
    window_over = min(view.oldest_arrival + limit.max_queue_delay, view.latest_start) <= NOW
    return draining or window_over or view.rows >= view.full_rows


@reproducible
@given(buckets=buckets, limit=limits, draining=st.booleans())
def test_of_the_buckets_that_may_be_closed_the_oldest_is(
    buckets: Mapping[Hashable, View], limit: BatcherSettings, draining: bool
) -> None:
    ready = {key: view for key, view in buckets.items() if _may_close(view, limit, draining)}
    decision = decide(buckets, NOW, limit, draining)
    assert isinstance(decision, Close) == bool(ready)
    if isinstance(decision, Close):
        assert decision.key in ready
        oldest = min(view.oldest_arrival for view in ready.values())
        assert ready[decision.key].oldest_arrival == oldest


@reproducible
@given(buckets=buckets, limit=limits)
def test_a_wait_ends_with_the_next_event_and_not_before(
    buckets: Mapping[Hashable, View], limit: BatcherSettings
) -> None:
    decision = decide(buckets, NOW, limit, draining=False)
    if isinstance(decision, Close):
        return
    assert decision.until > NOW, "a wait that is already over would make the worker spin"
    ends = [view.oldest_arrival + limit.max_queue_delay for view in buckets.values()]
    starts = [view.latest_start for view in buckets.values()]
    assert decision.until == min([*ends, *starts], default=math.inf)
    if math.isfinite(decision.until):
        assert isinstance(decide(buckets, decision.until, limit, draining=False), Close)
