"""Batches of several classes: their order, and that added requests make none late."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import pytest
from batcher.policy.test_close_rule import BUSY, Affine, class_queue, waiting, with_deadline
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batcher.rig import reproducible

from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.policy.batch_forming import FormedBatch, TimesWithOthers, form_batch
from tensorferry.batcher.policy.class_queue import ClassQueue
from tensorferry.batcher.policy.close_rule import Close, decide
from tensorferry.batcher.policy.priority_sharing import DeficitRoundRobin
from tensorferry.batcher.policy.protocols import BatchTimes
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import BatcherSettings

MOST = 8


def form(
    class_queues: list[ClassQueue],
    lead: int,
    allotted: list[int],
    *,
    most: int = MOST,
    times: BatchTimes | None = None,
) -> FormedBatch:
    formed = form_batch(class_queues, lead, allotted, 0.0, most, times or Affine(), lambda: BUSY)
    assert sum(formed.rows) == sum(request.rows_counted for request in formed.batch)
    return formed


def test_the_leading_class_comes_first_and_gets_its_quota() -> None:
    high, low = [waiting() for _ in range(9)], [waiting() for _ in range(9)]
    formed = form([class_queue(high), class_queue(low)], 1, [6, 2])
    assert formed.rows == [6, 2]
    assert formed.batch == low[:2] + high[:6]


def test_times_with_others_are_those_of_the_whole_batch() -> None:
    times, beside = Affine(), TimesWithOthers(Affine(), 3)
    for rows in (1, 2, 5):
        assert (beside.mean(rows), beside.upper(rows)) == (times.mean(rows + 3), times.upper(rows + 3))
        assert beside.max_rows_within(times.upper(rows + 3)) == rows
    assert beside.stale == times.stale


def test_room_that_the_leading_class_cannot_use_goes_to_others_by_rank() -> None:
    class_queues = [class_queue([waiting()] * 2), class_queue([waiting(5)]), class_queue([waiting()] * 9)]
    assert form(class_queues, 0, [2, 3, 3]).rows == [2, 0, 3], (
        "the second has no request that fits what it got"
    )
    class_queues = [class_queue([waiting()] * 2), class_queue([waiting()] * 9), class_queue([waiting()])]
    assert form(class_queues, 0, [2, 3, 3]).rows == [2, 5, 1]


@pytest.mark.parametrize("deadline", [math.inf, 90.0])
def test_the_first_request_is_taken_even_if_it_exceeds_the_quota(deadline: float) -> None:
    """Otherwise a class with requests larger than its quota would starve."""
    class_queues = [class_queue([waiting(6, deadline=deadline)]) for _ in range(3)]
    formed = form(class_queues, 1, [3, 3, 2])
    assert formed.rows == [0, 6, 0]


def test_lower_classes_are_added_only_if_they_are_in_time() -> None:
    """A batch takes ten seconds and one a row: the six leading rows leave time for two more."""
    class_queues = [class_queue([waiting()] * 6), class_queue(with_deadline(17.5, 18.0, 18.1))]
    formed = form(class_queues, 0, [6, 2])
    assert [request.deadline for request in formed.batch[6:]] == [18.0, 18.1]


def test_without_known_times_all_requests_are_taken() -> None:
    class_queues = [
        class_queue(with_deadline(0.1, 0.2)),
        class_queue([waiting()] * 9),
        class_queue(with_deadline(0.1, 0.2)),
    ]
    assert form(class_queues, 0, [2, 4, 2], times=BatchCostModel(MOST)).rows == [2, 4, 2]


classes = st.lists(
    st.lists(
        st.builds(
            waiting,
            st.integers(1, MOST),
            st.floats(-50, 0),
            st.one_of(st.just(math.inf), st.floats(11.5, 20), st.floats(12, 60)),
        ),
        max_size=12,
    ),
    min_size=1,
    max_size=4,
)


@settings(reproducible, max_examples=150)
@given(queued_requests=classes, weights=st.lists(st.integers(1, 9), min_size=4, max_size=4), data=st.data())
def test_every_batch_of_several_classes_is_sound(
    queued_requests: list[list[Request]], weights: list[int], data: st.DataObject
) -> None:
    """Properties 2, 4, 6 and 7: rows, order, none late, only the earliest of the leading class are shed."""
    class_queues = [
        class_queue(
            [p for p in of if p.deadline > Affine().upper(p.rows_counted)], max_wait_before_priority=25.0
        )
        for of in queued_requests
    ]
    ranks = [rank for rank, one in enumerate(class_queues) if one.rows]
    if not ranks:
        return
    lead = data.draw(st.sampled_from(ranks))
    shares = DeficitRoundRobin(weights[: len(class_queues)], MOST)
    queued = [one.rows for one in class_queues]
    allotted = shares.allocate(queued, queued, MOST)
    formed = form(class_queues, lead, allotted)
    assert formed.batch, "a closed batch is not empty"
    assert sum(formed.rows) <= MOST
    assert len(set(map(id, formed.batch))) == len(formed.batch)
    taken_ids = set(map(id, formed.batch))
    for rank, one in enumerate(class_queues):
        without_deadline = [id(p) in taken_ids for p in one.without_deadline]
        assert without_deadline == sorted(without_deadline, reverse=True), (
            "those without deadline kept in order"
        )
        deadlines_taken = [p.deadline for p in formed.batch if any(p is q for q in one.with_deadline)]
        assert deadlines_taken == sorted(deadlines_taken), "requests with deadlines are in their order"
        assert formed.rows[rank] == sum(
            p.rows_counted for p in one.with_deadline + one.without_deadline if id(p) in taken_ids
        )
    assert not any(p.deadline < Affine().upper(sum(formed.rows)) for p in formed.batch), "no request is late"
    dropped = [id(p) for p in formed.shed]
    assert not taken_ids & set(dropped)
    behind = [
        id(p)
        for p in class_queues[lead].with_deadline
        if p.deadline < min((q.deadline for q in formed.shed), default=0)
    ]
    assert not set(behind) & taken_ids, "never a newer one before an older"
    assert set(dropped) <= set(map(id, class_queues[lead].with_deadline))


@dataclass(frozen=True)
class View:
    class_queues: list[ClassQueue]
    rows: int = 1
    oldest_arrival: float = 0.0
    latest_start: float = math.inf
    full_rows: int = MOST


@pytest.mark.parametrize(
    ("credits", "lead"),
    [([1.0, 1.0], 0), ([0.9, 1.0], 1), ([-3.0, 5.0], 1), ([0.0, 0.0], 0), ([0.5, 0.9], 0)],
)
def test_the_highest_class_with_credit_leads(credits: list[float], lead: int) -> None:
    view = View([class_queue([waiting()]), class_queue([waiting()])], rows=2)
    close = decide({"a": view}, 0.0, BatcherSettings(MOST, 0.0), False, credits)
    assert isinstance(close, Close)
    assert close.leading_class == lead


@pytest.mark.parametrize(("credits", "expected"), [([1.0, 1.0], ("serve_by", 0)), ([0.0, 1.0], ("low", 1))])
def test_the_leading_class_chooses_the_bucket(credits: list[float], expected: tuple[str, int]) -> None:
    """The higher class is queued in one bucket; the lower, due long ago, in another."""
    nothing = class_queue([])
    buckets: dict[Hashable, View] = {
        "low": View([nothing, class_queue([waiting(deadline=1.0)])]),
        "late": View([class_queue([waiting(deadline=9.0)]), nothing]),
        "serve_by": View([class_queue([waiting(deadline=5.0)]), nothing]),
    }
    close = decide(buckets, 0.0, BatcherSettings(MOST, 0.0), False, credits)
    assert isinstance(close, Close)
    assert (close.key, close.leading_class) == expected
