"""The policy is pure: which bucket leaves, who rides, and until when nothing happens."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import reproducible

from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.policy.batch_forming import form_batch
from tensorferry.batcher.policy.close_rule import Close, Wait, decide
from tensorferry.batcher.policy.load_shedding import ArrivalDemand, infeasible
from tensorferry.batcher.policy.prefixes import take_prefix
from tensorferry.batcher.request import CloseReason
from tensorferry.batcher.settings import Limits


@dataclass(frozen=True)
class Passenger:
    rows_counted: int = 1
    arrival: float = 0.0
    deadline: float = math.inf


@dataclass(frozen=True)
class ClassQueueOf:
    """A lane of these requests, due when they have waited for long."""

    with_deadline: list[Passenger]
    without_deadline: list[Passenger]
    max_wait_before_priority: float = 1000.0
    serve_by: float = math.inf

    @property
    def rows(self) -> int:
        return sum(passenger.rows_counted for passenger in self.with_deadline + self.without_deadline)


@dataclass(frozen=True)
class View:
    rows: int
    oldest_arrival: float
    latest_start: float = math.inf

    @property
    def class_queues(self) -> list[ClassQueueOf]:
        waiting = [Passenger(arrival=self.oldest_arrival)] * self.rows
        return [ClassQueueOf([], waiting, serve_by=self.oldest_arrival + 1000)]


GREEDY = Limits(4, 0.0)
WINDOW = Limits(4, 10.0)


@pytest.mark.parametrize(
    ("buckets", "now", "limits", "draining", "expected"),
    [
        pytest.param({}, 0, GREEDY, False, Wait(math.inf), id="nothing queued: nothing leaves"),
        pytest.param({}, 0, WINDOW, True, Wait(math.inf), id="nothing queued, draining"),
        pytest.param(
            {"a": View(1, 5)}, 5, GREEDY, False, Close("a", CloseReason.IDLE, 4), id="alone: at once"
        ),
        pytest.param(
            {"a": View(4, 5)}, 5, GREEDY, False, Close("a", CloseReason.FULL, 4), id="full, no window"
        ),
        pytest.param({"a": View(1, 5)}, 5, WINDOW, False, Wait(15), id="window runs from arrival"),
        pytest.param({"a": View(1, 5)}, 14.9, WINDOW, False, Wait(15), id="window not over"),
        pytest.param(
            {"a": View(1, 5)}, 15, WINDOW, False, Close("a", CloseReason.WINDOW, 4), id="window over"
        ),
        pytest.param({"a": View(4, 5)}, 5, WINDOW, False, Close("a", CloseReason.FULL, 4), id="full: early"),
        pytest.param(
            {"a": View(9, 5)}, 5, WINDOW, False, Close("a", CloseReason.FULL, 4), id="over-full: early"
        ),
        pytest.param({"a": View(1, 5)}, 5, WINDOW, True, Close("a", CloseReason.DRAIN, 4), id="drain: early"),
        pytest.param({"a": View(1, 5, 8)}, 5, WINDOW, False, Wait(8), id="ends for a deadline in the window"),
        pytest.param(
            {"a": View(1, 5, 8)},
            8,
            WINDOW,
            False,
            Close("a", CloseReason.WINDOW, 4),
            id="leaves for a deadline",
        ),
        pytest.param({"a": View(1, 5, 99)}, 5, WINDOW, False, Wait(15), id="a deadline behind the window"),
        pytest.param(
            {"a": View(1, 5), "b": View(1, 3)}, 5, WINDOW, False, Wait(13), id="the first window end"
        ),
        pytest.param(
            {"a": View(1, 5), "b": View(1, 3)},
            5,
            GREEDY,
            False,
            Close("b", CloseReason.IDLE, 4),
            id="oldest first",
        ),
        pytest.param(
            {"a": View(4, 5), "b": View(1, 3)},
            5,
            GREEDY,
            False,
            Close("b", CloseReason.IDLE, 4),
            id="full no rank",
        ),
        pytest.param(
            {"a": View(4, 5), "b": View(1, 3)},
            6,
            WINDOW,
            False,
            Close("a", CloseReason.FULL, 4),
            id="who may",
        ),
        pytest.param(
            {"a": View(4, 5), "b": View(1, 3)},
            13,
            WINDOW,
            False,
            Close("b", CloseReason.WINDOW, 4),
            id="both may",
        ),
        pytest.param(
            {"a": View(1, 3), "b": View(1, 3)},
            5,
            GREEDY,
            False,
            Close("a", CloseReason.IDLE, 4),
            id="tie: first",
        ),
    ],
)
def test_decides(
    buckets: Mapping[Hashable, View], now: float, limits: Limits, draining: bool, expected: Close | Wait
) -> None:
    assert decide(buckets, now, limits, draining) == expected


@pytest.mark.parametrize(
    ("costs", "ride"),
    [
        pytest.param([], [], id="nobody"),
        pytest.param([1], [1], id="one"),
        pytest.param([1, 1, 1, 1, 1], [1, 1, 1, 1], id="full"),
        pytest.param([2, 2, 1], [2, 2], id="rows, not requests"),
        pytest.param([3, 2, 1], [3], id="nobody overtakes"),
        pytest.param([9, 1], [9], id="too large rides alone"),
        pytest.param([1, 9], [1], id="too large waits for its turn"),
    ],
)
def test_riders(costs: list[int], ride: list[int]) -> None:
    assert [
        passenger.rows_counted for passenger in take_prefix(map(Passenger, costs), GREEDY.max_batch_size)
    ] == ride


class Affine:
    """Batch times of 10 s and 1 s a row, known exactly."""

    stale = False

    def mean(self, rows: int) -> float:
        return 10.0 + rows

    def upper(self, rows: int) -> float:
        return self.mean(rows)

    def max_rows_within(self, slack: float) -> int:
        return max(0, math.floor(slack - 10))


class Unknown:
    """Nothing is known of batch times."""

    stale = False

    def mean(self, rows: int) -> float:
        return 0.0

    def upper(self, rows: int) -> float:
        return 0.0

    def max_rows_within(self, slack: float) -> int:
        return 1_000


@pytest.mark.parametrize(
    ("deadline", "gone"), [(115.9, True), (116, True), (116.1, False), (math.inf, False)]
)
def test_is_infeasible_when_even_alone_it_would_be_late(deadline: float, gone: bool) -> None:
    passenger = Passenger(6, deadline=deadline)
    assert infeasible([passenger], 100.0, Affine().upper) == ([passenger] if gone else [])


@pytest.mark.parametrize(("deadline", "gone"), [(99.9, True), (100, True), (100.1, False)])
def test_nothing_known_of_times_only_the_passed_are_infeasible(deadline: float, gone: bool) -> None:
    passenger = Passenger(deadline=deadline)
    assert infeasible([passenger], 100.0, Unknown().upper) == ([passenger] if gone else [])


BUSY = ArrivalDemand(rows_per_second=1.0, typical_deadline=40.0)


def with_deadline(*deadlines: float, rows_counted: int = 1) -> list[Passenger]:
    return [Passenger(rows_counted, deadline=deadline) for deadline in deadlines]


def form(
    with_deadline: list[Passenger],
    without_deadline: list[Passenger] = [],  # noqa: B006 (never changed)
    *,
    most: int = 8,
    now: float = 0.0,
    demand: ArrivalDemand = BUSY,
    max_wait_before_priority: float = 1000.0,
) -> tuple[list[Passenger], list[Passenger]]:
    formed = form_batch(
        [ClassQueueOf(with_deadline, without_deadline, max_wait_before_priority)],
        0,
        [most],
        now,
        most,
        Affine(),
        lambda: demand,
    )
    assert formed.rows == [sum(passenger.rows_counted for passenger in formed.batch)]
    return formed.batch, formed.shed


def test_who_can_all_make_their_deadlines_all_ride_and_nobody_is_shed() -> None:
    queue = with_deadline(*range(20, 28))
    assert form(queue) == (queue, [])


def test_sheds_the_fewest_oldest_such_that_the_batch_keeps_up() -> None:
    """The first three have slack for a row each: batches of one row, of 11 s, would never keep up."""
    queue = with_deadline(11.5, 11.6, 11.7, 40, 41, 42, 43, 44, 45)
    ride, shed = form(queue)
    assert shed == queue[:3]
    assert ride == queue[3:]


def test_sheds_nobody_when_a_small_batch_keeps_up_with_few_arrivals() -> None:
    queue = with_deadline(11.5, 40, 41)
    ride, shed = form(queue, demand=ArrivalDemand(rows_per_second=0.01, typical_deadline=40.0))
    assert (ride, shed) == (queue[:1], [])


@pytest.mark.parametrize(
    ("rate", "devices", "gone"),
    [(0.6, 1, 0), (0.6, 8, 1), (0.4, 1, 0), (0.4, 8, 0)],
    ids=lambda value: f"{value:g}",
)
def test_more_is_shed_where_other_devices_share_an_overload(rate: float, devices: int, gone: int) -> None:
    """What came for them fills the batch; but nobody is shed for it where full ones, 8 rows in 18 s, keep up."""
    queue = with_deadline(14.5, *[16.5] * 8)
    ride, shed = form(queue, demand=ArrivalDemand(rate, 22.0, devices))
    assert (shed, len(ride)) == (queue[:gone], 6 if gone else 4)


@pytest.mark.parametrize("slowdown", [1.2, 1.3, 1.5, 1.75, 2.0])
def test_a_slow_spell_that_is_over_is_forgotten_though_only_small_batches_keep_the_deadlines(
    slowdown: float,
) -> None:
    """As long as a full batch is thought to be slow it is not run, so nobody learns that it is not."""
    times, rows = BatchCostModel(16), 0
    for size in (1, 2, 4, 8, 16):
        times.add_warmup_sample(size, 0.0045 + 0.005 * size)
    for _ in range(60):
        times.observe(0.0, 16, slowdown * 0.0845)
    backlog = with_deadline(*[0.02 + 0.48 * at / 250 for at in range(250)])
    for _ in range(200):
        formed = form_batch(
            [ClassQueueOf(backlog, [])], 0, [16], 0.0, 16, times, lambda: ArrivalDemand(520.0, 0.5)
        )
        (rows,) = formed.rows
        times.observe(0.0, rows, 0.0045 + 0.005 * rows)
    assert rows == 16
    assert times.mean(16) == pytest.approx(0.0845, rel=0.05)


def test_a_request_without_deadline_is_never_shed_and_fills_the_room() -> None:
    without_deadline = [Passenger(), Passenger()]
    queue = with_deadline(30, 31, 32)
    assert form(queue, without_deadline, most=4) == (queue + without_deadline[:1], [])
    assert form([], without_deadline, most=4) == (without_deadline, [])


def test_an_overdue_request_without_deadline_rides_before_the_dated_which_keep_half_the_room() -> None:
    without_deadline = [Passenger(arrival=0.0) for _ in range(9)]
    queue = with_deadline(*[200.0 + i for i in range(9)])
    ride, shed = form(queue, without_deadline, now=100.0, max_wait_before_priority=50.0)
    assert ride == without_deadline[:4] + queue[:4]
    assert shed == []


def test_an_overdue_request_that_leaves_no_room_rides_alone() -> None:
    without_deadline = [Passenger(8, arrival=0.0)]
    assert form(with_deadline(200.0), without_deadline, now=100.0, max_wait_before_priority=50.0) == (
        without_deadline,
        [],
    )


passengers = st.lists(st.tuples(st.integers(1, 8), st.floats(12, 80)), max_size=30)


@reproducible
@given(
    dates=passengers,
    others=st.lists(st.integers(1, 8), max_size=9),
    rate=st.floats(0, 5),
    age=st.floats(0, 50),
)
def test_whatever_waits_a_batch_is_sound(
    dates: list[tuple[int, float]], others: list[int], rate: float, age: float
) -> None:
    queue = sorted(
        (Passenger(rows_counted, 0.0, deadline) for rows_counted, deadline in dates), key=lambda p: p.deadline
    )
    queue = [p for p in queue if p not in infeasible([p], 0.0, Affine().upper)]
    without_deadline = [Passenger(rows_counted, -age) for rows_counted in others]
    ride, shed = form(
        queue, without_deadline, demand=ArrivalDemand(rate, 40.0), max_wait_before_priority=25.0
    )
    rows = sum(passenger.rows_counted for passenger in ride)
    assert rows <= 8
    assert bool(ride) == bool(queue or without_deadline)
    assert all(passenger.deadline < math.inf for passenger in shed), "who has no deadline is never shed"
    gone = [id(p) for p in shed]
    riding = [id(p) for p in ride]
    assert not set(gone) & set(riding)
    assert gone == [id(p) for p in queue[: len(gone)]], "only the oldest are shed"
    if age < 25.0:
        late = [p for p in ride if p.deadline < Affine().upper(rows)]
        assert not late, "nobody rides who would be late"


@reproducible
@given(costs=st.lists(st.integers(1, 12), max_size=20), most=st.integers(1, 10))
def test_riders_are_the_longest_prefix_that_fits(costs: list[int], most: int) -> None:
    queue = [Passenger(rows_counted) for rows_counted in costs]
    ride = take_prefix(queue, most)
    rows = sum(passenger.rows_counted for passenger in ride)
    assert all(a is b for a, b in zip(ride, queue, strict=False)), "in order, without gaps"
    assert bool(ride) == bool(queue), "whoever is first rides"
    assert rows <= most or len(ride) == 1, "only a lone first may exceed the maximum"
    assert len(ride) == len(queue) or rows + queue[len(ride)].rows_counted > most, (
        "no room is left for the next"
    )


NOW = 100.0
views = st.builds(
    View,
    rows=st.integers(1, 8),
    oldest_arrival=st.floats(NOW - 20, NOW),
    latest_start=st.one_of(st.just(math.inf), st.floats(NOW, NOW + 20, exclude_min=True)),
)
limits = st.builds(Limits, st.integers(1, 6), st.sampled_from([0.0, 0.5, 10.0]))
buckets = st.dictionaries(st.integers(0, 9), views, max_size=6)


def _may_leave(view: View, limit: Limits, draining: bool) -> bool:
    window_over = min(view.oldest_arrival + limit.max_queue_delay, view.latest_start) <= NOW
    return draining or window_over or view.rows >= limit.max_batch_size


@reproducible
@given(buckets=buckets, limit=limits, draining=st.booleans())
def test_of_those_that_may_leave_the_oldest_does(
    buckets: Mapping[Hashable, View], limit: Limits, draining: bool
) -> None:
    ready = {key: view for key, view in buckets.items() if _may_leave(view, limit, draining)}
    decision = decide(buckets, NOW, limit, draining)
    assert isinstance(decision, Close) == bool(ready)
    if isinstance(decision, Close):
        assert decision.key in ready
        oldest = min(view.oldest_arrival for view in ready.values())
        assert ready[decision.key].oldest_arrival == oldest


@reproducible
@given(buckets=buckets, limit=limits)
def test_a_wait_ends_when_the_next_thing_happens_and_not_before(
    buckets: Mapping[Hashable, View], limit: Limits
) -> None:
    decision = decide(buckets, NOW, limit, draining=False)
    if isinstance(decision, Close):
        return
    assert decision.until > NOW, "no wait is already over: a worker would spin"
    ends = [view.oldest_arrival + limit.max_queue_delay for view in buckets.values()]
    starts = [view.latest_start for view in buckets.values()]
    assert decision.until == min([*ends, *starts], default=math.inf)
    if math.isfinite(decision.until):
        assert isinstance(decide(buckets, decision.until, limit, draining=False), Close)


@reproducible
@given(view=views, most=st.integers(1, 6))
def test_without_a_window_whatever_waits_leaves(view: View, most: int) -> None:
    assert isinstance(decide({"a": view}, NOW, Limits(most, 0.0), draining=False), Close)
