"""The policy is pure: which bucket leaves, who rides, and until when nothing happens."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import pytest
from batcher.rig import reproducible
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.batcher.policy import Close, CloseReason, Limits, Wait, decide, expired, riders


@dataclass(frozen=True)
class Passenger:
    cost: int = 1
    arrival: float = 0.0
    deadline: float = math.inf


@dataclass(frozen=True)
class View:
    rows: int
    oldest_arrival: float
    earliest_deadline: float = math.inf


GREEDY = Limits(4, 0.0)
WINDOW = Limits(4, 10.0)


@pytest.mark.parametrize(
    ("buckets", "now", "limits", "draining", "expected"),
    [
        pytest.param({}, 0, GREEDY, False, Wait(math.inf), id="nothing queued: nothing leaves"),
        pytest.param({}, 0, WINDOW, True, Wait(math.inf), id="nothing queued, draining"),
        pytest.param({"a": View(1, 5)}, 5, GREEDY, False, Close("a", CloseReason.IDLE), id="alone: at once"),
        pytest.param({"a": View(4, 5)}, 5, GREEDY, False, Close("a", CloseReason.FULL), id="full, no window"),
        pytest.param({"a": View(1, 5)}, 5, WINDOW, False, Wait(15), id="window runs from arrival"),
        pytest.param({"a": View(1, 5)}, 14.9, WINDOW, False, Wait(15), id="window not over"),
        pytest.param({"a": View(1, 5)}, 15, WINDOW, False, Close("a", CloseReason.WINDOW), id="window over"),
        pytest.param({"a": View(4, 5)}, 5, WINDOW, False, Close("a", CloseReason.FULL), id="full: early"),
        pytest.param(
            {"a": View(9, 5)}, 5, WINDOW, False, Close("a", CloseReason.FULL), id="over-full: early"
        ),
        pytest.param({"a": View(1, 5)}, 5, WINDOW, True, Close("a", CloseReason.DRAIN), id="drain: early"),
        pytest.param(
            {"a": View(1, 5, 8)}, 5, WINDOW, False, Wait(8), id="wakes for a deadline in the window"
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
            Close("b", CloseReason.IDLE),
            id="oldest first",
        ),
        pytest.param(
            {"a": View(4, 5), "b": View(1, 3)},
            5,
            GREEDY,
            False,
            Close("b", CloseReason.IDLE),
            id="full no rank",
        ),
        pytest.param(
            {"a": View(4, 5), "b": View(1, 3)}, 6, WINDOW, False, Close("a", CloseReason.FULL), id="who may"
        ),
        pytest.param(
            {"a": View(4, 5), "b": View(1, 3)},
            13,
            WINDOW,
            False,
            Close("b", CloseReason.WINDOW),
            id="both may",
        ),
        pytest.param(
            {"a": View(1, 3), "b": View(1, 3)},
            5,
            GREEDY,
            False,
            Close("a", CloseReason.IDLE),
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
    assert [passenger.cost for passenger in riders(map(Passenger, costs), GREEDY)] == ride


@pytest.mark.parametrize(("deadline", "gone"), [(4.9, True), (5.0, True), (5.1, False), (math.inf, False)])
def test_expires_at_its_deadline_and_not_before(deadline: float, gone: bool) -> None:
    passenger = Passenger(deadline=deadline)
    assert expired([passenger], 5.0) == ([passenger] if gone else [])


@reproducible
@given(costs=st.lists(st.integers(1, 12), max_size=20), most=st.integers(1, 10))
def test_riders_are_the_longest_prefix_that_fits(costs: list[int], most: int) -> None:
    queue = [Passenger(cost) for cost in costs]
    ride = riders(queue, Limits(most, 0.0))
    rows = sum(passenger.cost for passenger in ride)
    assert all(a is b for a, b in zip(ride, queue, strict=False)), "in order, without gaps"
    assert bool(ride) == bool(queue), "whoever is first rides"
    assert rows <= most or len(ride) == 1, "only a lone first may exceed the maximum"
    assert len(ride) == len(queue) or rows + queue[len(ride)].cost > most, "no room is left for the next"


NOW = 100.0
views = st.builds(
    View,
    rows=st.integers(1, 8),
    oldest_arrival=st.floats(NOW - 20, NOW),
    earliest_deadline=st.one_of(st.just(math.inf), st.floats(NOW, NOW + 20, exclude_min=True)),
)
limits = st.builds(Limits, st.integers(1, 6), st.sampled_from([0.0, 0.5, 10.0]))
buckets = st.dictionaries(st.integers(0, 9), views, max_size=6)


def _may_leave(view: View, limit: Limits, draining: bool) -> bool:
    window_over = view.oldest_arrival + limit.max_queue_delay <= NOW
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
    deadlines = [view.earliest_deadline for view in buckets.values()]
    assert decision.until == min([*ends, *deadlines], default=math.inf)
    if math.isfinite(decision.until) and decision.until not in deadlines:
        assert isinstance(decide(buckets, decision.until, limit, draining=False), Close)


@reproducible
@given(view=views, most=st.integers(1, 6))
def test_without_a_window_whatever_waits_leaves(view: View, most: int) -> None:
    assert isinstance(decide({"a": view}, NOW, Limits(most, 0.0), draining=False), Close)
