"""Who rides when there are several classes, and that nobody is made late by who rides along."""

from __future__ import annotations

import math
from collections.abc import Hashable

import pytest
from batcher.policy.test_close_rule import BUSY, Affine, ClassQueueOf, Passenger, Unknown, with_deadline
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batcher.rig import reproducible

from tensorferry.batcher.policy.batch_forming import FormedBatch, TimesWithOthers, form_batch
from tensorferry.batcher.policy.close_rule import Close, decide
from tensorferry.batcher.policy.priority_sharing import DeficitRoundRobin
from tensorferry.batcher.policy.protocols import BatchTimes, BucketView
from tensorferry.batcher.settings import Limits

MOST = 8


def lane(requests: list[Passenger], max_wait_before_priority: float = 1000.0) -> ClassQueueOf:
    queue = sorted((p for p in requests if p.deadline < math.inf), key=lambda p: p.deadline)
    return ClassQueueOf(queue, [p for p in requests if p.deadline == math.inf], max_wait_before_priority)


def form(
    class_queues: list[ClassQueueOf],
    lead: int,
    allotted: list[int],
    *,
    most: int = MOST,
    times: BatchTimes | None = None,
) -> FormedBatch[Passenger]:
    formed = form_batch(class_queues, lead, allotted, 0.0, most, times or Affine(), lambda: BUSY)
    assert sum(formed.rows) == sum(passenger.rows_counted for passenger in formed.batch)
    return formed


def test_who_leads_rides_first_and_gets_what_is_allotted_to_it() -> None:
    high, low = [Passenger() for _ in range(9)], [Passenger() for _ in range(9)]
    formed = form([lane(high), lane(low)], 1, [6, 2])
    assert formed.rows == [6, 2]
    assert formed.batch == low[:2] + high[:6]


def test_rows_beside_others_take_as_long_as_all_together() -> None:
    times = Affine()
    beside = TimesWithOthers(times, 3)
    for rows in (1, 2, 5):
        assert beside.mean(rows) == times.mean(rows + 3)
        assert beside.upper(rows) == times.upper(rows + 3)
        assert (
            beside.max_rows_within(times.upper(rows + 3)) == times.max_rows_within(times.upper(rows + 3)) - 3
        )
    assert beside.stale == times.stale


def test_room_that_who_leads_cannot_use_goes_to_others_by_rank() -> None:
    class_queues = [lane([Passenger()] * 2), lane([Passenger(5)]), lane([Passenger()] * 9)]
    assert form(class_queues, 0, [2, 3, 3]).rows == [2, 0, 3], (
        "the second has no request that fits what it got"
    )
    class_queues = [lane([Passenger()] * 2), lane([Passenger()] * 9), lane([Passenger()])]
    assert form(class_queues, 0, [2, 3, 3]).rows == [2, 5, 1]


@pytest.mark.parametrize("deadline", [math.inf, 90.0])
def test_the_first_that_leads_rides_even_if_it_is_larger_than_what_its_class_got(deadline: float) -> None:
    """Else a class whose requests are larger than its share of a batch would never ride."""
    class_queues = [lane([Passenger(6, deadline=deadline)]) for _ in range(3)]
    formed = form(class_queues, 1, [3, 3, 2])
    assert formed.rows == [0, 6, 0]


def test_those_of_lower_classes_ride_only_if_they_are_in_time() -> None:
    """Ten seconds and one a row: the lead's six rows leave time for two more."""
    class_queues = [lane([Passenger()] * 6), lane(with_deadline(17.5, 18.0, 18.1))]
    formed = form(class_queues, 0, [6, 2])
    assert [passenger.deadline for passenger in formed.batch[6:]] == [18.0, 18.1]


def test_those_of_the_lowest_class_do_not_make_those_above_late() -> None:
    class_queues = [lane([Passenger()] * 2), lane(with_deadline(13.5)), lane([Passenger()] * 9)]
    formed = form(class_queues, 0, [2, 1, 5])
    assert formed.rows == [2, 1, 0]


def test_who_fills_the_room_does_not_make_who_leads_late() -> None:
    class_queues = [lane(with_deadline(12.5, 12.6)), lane([Passenger()] * 9), lane(with_deadline(90, 91))]
    assert form(class_queues, 0, [2, 3, 3]).rows == [2, 0, 0]


def test_while_nothing_is_known_of_times_all_ride() -> None:
    class_queues = [lane(with_deadline(0.1, 0.2)), lane([Passenger()] * 9), lane(with_deadline(0.1, 0.2))]
    assert form(class_queues, 0, [2, 4, 2], times=Unknown()).rows == [2, 4, 2]


def test_only_of_the_class_that_leads_is_anybody_shed() -> None:
    """Of the others those who would be late simply do not ride."""
    tight = [11.5, 11.6, 11.7, 40, 41, 42, 43, 44]
    class_queues = [lane(with_deadline(*tight)), lane(with_deadline(*tight))]
    formed = form(class_queues, 0, [4, 4])
    assert formed.shed
    assert all(any(passenger is gone for passenger in class_queues[0].with_deadline) for gone in formed.shed)


classes = st.lists(
    st.lists(
        st.builds(
            Passenger,
            st.integers(1, MOST),
            st.floats(-50, 0),
            st.one_of(st.just(math.inf), st.floats(11.5, 20), st.floats(12, 60)),
        ),
        max_size=12,
    ),
    min_size=1,
    max_size=4,
)


@settings(reproducible, max_examples=300)
@given(waiting=classes, weights=st.lists(st.integers(1, 9), min_size=4, max_size=4), data=st.data())
def test_whatever_waits_a_batch_of_several_classes_is_sound(
    waiting: list[list[Passenger]], weights: list[int], data: st.DataObject
) -> None:
    """Properties 2, 4, 6 and 7: rows, order, nobody late, only the earliest of who leads are shed."""
    class_queues = [
        lane([p for p in of if p.deadline > Affine().upper(p.rows_counted)], max_wait_before_priority=25.0)
        for of in waiting
    ]
    ranks = [rank for rank, one in enumerate(class_queues) if one.rows]
    if not ranks:
        return
    lead = data.draw(st.sampled_from(ranks))
    shares = DeficitRoundRobin(weights[: len(class_queues)], MOST)
    queued = [one.rows for one in class_queues]
    allotted = shares.allocate(queued, queued, MOST)
    formed = form(class_queues, lead, allotted)
    assert formed.batch, "a batch that leaves has riders"
    assert sum(formed.rows) <= MOST
    assert len(set(map(id, formed.batch))) == len(formed.batch)
    riding = set(map(id, formed.batch))
    for rank, one in enumerate(class_queues):
        without_deadline = [id(p) in riding for p in one.without_deadline]
        assert without_deadline == sorted(without_deadline, reverse=True), (
            "those without deadline ride in order"
        )
        rode = [p.deadline for p in formed.batch if any(p is q for q in one.with_deadline)]
        assert rode == sorted(rode), "those with one by their deadlines"
        assert formed.rows[rank] == sum(
            p.rows_counted for p in one.with_deadline + one.without_deadline if id(p) in riding
        )
    assert not any(p.deadline < Affine().upper(sum(formed.rows)) for p in formed.batch), "nobody is late"
    gone = [id(p) for p in formed.shed]
    assert not riding & set(gone)
    behind = [
        id(p)
        for p in class_queues[lead].with_deadline
        if p.deadline < min((q.deadline for q in formed.shed), default=0)
    ]
    assert not set(behind) & riding, "never a newer one before an older"
    assert set(gone) <= set(map(id, class_queues[lead].with_deadline))


@pytest.mark.parametrize(
    ("credits", "lead"),
    [([1.0, 1.0], 0), ([0.9, 1.0], 1), ([-3.0, 5.0], 1), ([0.0, 0.0], 0), ([0.5, 0.9], 0)],
)
def test_the_highest_class_with_credit_leads(credits: list[float], lead: int) -> None:
    class View:
        class_queues = (lane([Passenger()]), lane([Passenger()]))
        rows = 2
        oldest_arrival = 0.0
        latest_start = math.inf

    close = decide({"a": View()}, 0.0, Limits(MOST, 0.0), False, credits)
    assert isinstance(close, Close)
    assert close.leading_class == lead


def test_the_class_that_leads_chooses_the_bucket() -> None:
    """The higher class waits in one bucket, the lower, due long ago, in another."""

    class View:
        rows = 1
        oldest_arrival = 0.0
        latest_start = math.inf

        def __init__(self, rank: int, serve_by: float) -> None:
            mine = ClassQueueOf([], [Passenger()], serve_by=serve_by)
            self.class_queues = [mine if at == rank else ClassQueueOf([], []) for at in range(2)]

    buckets: dict[Hashable, BucketView] = {
        "low": View(1, 1.0),
        "late": View(0, 9.0),
        "serve_by": View(0, 5.0),
    }
    close = decide(buckets, 0.0, Limits(MOST, 0.0), False, [1.0, 1.0])
    assert isinstance(close, Close)
    assert (close.key, close.leading_class) == ("serve_by", 0)
    close = decide(buckets, 0.0, Limits(MOST, 0.0), False, [0.0, 1.0])
    assert isinstance(close, Close)
    assert (close.key, close.leading_class) == ("low", 1)
