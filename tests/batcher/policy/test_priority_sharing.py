"""Deficit round robin: rows in proportion to weights, no saved credit, no starvation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import reproducible

from tensorferry.batcher.policy.batch_forming import divide_rows
from tensorferry.batcher.policy.priority_sharing import DeficitRoundRobin

MOST = 32
PLENTY = 1_000_000


def turn(shares: DeficitRoundRobin, queued: list[int]) -> tuple[int, list[int]]:
    """Form one batch of one-row requests; return the leading class and the rows of each class."""
    shares.replenish(queued)
    lead = min(range(len(queued)), key=lambda rank: (not queued[rank], shares.credits[rank] < 1, rank))
    rows = shares.allocate(queued, queued, MOST)
    for rank, count in enumerate(rows):
        queued[rank] -= count
    shares.charge(rows, lead, queued)
    return lead, rows


weights_of_classes = st.lists(st.integers(1, 20), min_size=1, max_size=4)


@reproducible
@given(weights=weights_of_classes, batches=st.integers(10, 60))
def test_backlogged_classes_get_rows_by_weight(weights: list[int], batches: int) -> None:
    shares, queued = DeficitRoundRobin(weights, MOST), [PLENTY] * len(weights)
    got = [0] * len(weights)
    for _ in range(batches):
        _, rows = turn(shares, queued)
        got = [have + more for have, more in zip(got, rows, strict=True)]
    assert sum(got) == batches * MOST, "every batch is full"
    for have, weight in zip(got, weights, strict=True):
        assert abs(have - batches * MOST * weight / sum(weights)) <= 2 * MOST


def test_unused_credit_is_lost_when_the_queue_is_empty() -> None:
    """Otherwise a class that was idle for an hour would then occupy the device alone."""
    shares = DeficitRoundRobin((1, 1), MOST)
    for _ in range(1000):
        turn(shares, [0, PLENTY])
    for _ in range(3):
        assert turn(shares, [PLENTY, PLENTY])[1] == [16, 16]
    turn(shares, [1, 0])
    assert shares.credits[0] == 0, "emptied by its batch"
    shares.replenish([1, 1])
    shares.replenish([0, 1])
    assert shares.credits[0] == 0, "for example emptied by a cancel"


def test_the_leading_class_pays_for_all_rows_and_others_only_by_credit() -> None:
    shares, waiting = DeficitRoundRobin((1, 1), MOST), [PLENTY, PLENTY]
    shares.replenish(waiting)
    shares.charge([32, 0], 0, waiting)
    assert shares.credits == [-16, 16], "the leading class pays even for spare room"
    shares.charge([0, 32], 0, waiting)
    assert shares.credits == [-16, 0], "rows beyond its credit were spare room"
    shares.charge([5, 0], 1, waiting)
    assert shares.credits == [-16, 0], "what a class without credit fills is spare room, too"


def test_a_debt_is_paid_before_the_class_leads_again_even_after_a_pause() -> None:
    """Otherwise large requests, each into an empty queue, would get more than their share."""
    shares = DeficitRoundRobin((3, 1), MOST)
    shares.replenish([0, 32])
    shares.charge([0, 32], 1, [0, 0])
    assert shares.credits == [0, -24]
    queued = [PLENTY, PLENTY]
    got = [turn(shares, queued)[1] for _ in range(4)]
    assert got == [[32, 0]] * 3 + [[24, 8]]


def test_a_class_whose_requests_are_larger_than_its_round_still_gets_its_share() -> None:
    """A round gives the lower class one row; its requests have eight, and it leads with any credit."""
    shares, waiting = DeficitRoundRobin((31, 1), MOST), [PLENTY, PLENTY]
    got = [0, 0]
    for _ in range(320):
        shares.replenish(waiting)
        lead = 0 if shares.credits[0] >= 1 else 1
        rows = [0, 8] if lead == 1 else [32, 0]
        shares.charge(rows, lead, waiting)
        got = [have + more for have, more in zip(got, rows, strict=True)]
    assert got[1] / sum(got) == pytest.approx(1 / 32, rel=0.1)


def test_very_different_weights_cost_no_time() -> None:
    """Rounds are computed, not looped, because there may be a billion of them."""
    shares = DeficitRoundRobin((10**9, 1), MOST)
    for _ in range(100):
        assert turn(shares, [0, 32]) == (1, [0, 32])


def test_classes_that_share_no_bucket_get_rows_by_weight_too() -> None:
    """Each batch has one class only."""
    shares, queued, got = DeficitRoundRobin((1, 3), MOST), [PLENTY, PLENTY], [0, 0]
    for _ in range(80):
        shares.replenish(queued)
        lead = 0 if shares.credits[0] >= 1 else 1
        rows = shares.allocate([0, PLENTY] if lead else [PLENTY, 0], queued, MOST)
        assert sum(rows) == rows[lead] == MOST
        shares.charge(rows, lead, queued)
        got[lead] += MOST
    assert got == [20 * MOST, 60 * MOST]


def test_a_class_that_leads_while_another_waits_for_a_window_gets_no_debt() -> None:
    """The other cannot use its credit, and must not occupy the device alone for long afterwards."""
    shares, queued = DeficitRoundRobin((1, 1), MOST), [PLENTY, PLENTY]
    for _ in range(1000):
        shares.replenish(queued)
        shares.charge(shares.allocate([0, PLENTY], queued, MOST), 1, queued)
    alone = 0
    while turn(shares, queued)[1][1] == 0:
        alone += 1
    assert alone <= 2


@pytest.mark.parametrize(
    ("queued", "allotted", "room", "rows"),
    [
        pytest.param([9, 9], [4, 4], 8, [4, 4], id="by quota"),
        pytest.param([9, 9], [4, 4], 6, [4, 2], id="the higher first when there is not room for all"),
        pytest.param([9, 1], [4, 4], 8, [7, 1], id="what a class does not need goes to the highest"),
        pytest.param([1, 9], [4, 4], 8, [1, 7], id="and what the highest does not, to the next"),
        pytest.param([9, 9], [0, 0], 8, [8, 0], id="no quota: by rank"),
        pytest.param([9, 9], [4, 4], -3, [0, 0], id="less than no room"),
        pytest.param([9, 9, 9], [1, 1, 1], 8, [6, 1, 1], id="three classes"),
    ],
)
def test_unused_quota_goes_to_others(
    queued: list[int], allotted: list[int], room: int, rows: list[int]
) -> None:
    assert divide_rows(queued, allotted, room) == rows


@reproducible
@given(data=st.data(), room=st.integers(0, 40))
def test_the_room_is_filled_as_far_as_there_are_rows(data: st.DataObject, room: int) -> None:
    count = data.draw(st.integers(1, 4))
    queued = data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    shares = DeficitRoundRobin(data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)), 32)
    shares.credits = data.draw(st.lists(st.floats(-40, 40), min_size=count, max_size=count))
    for rows in (shares.allocate(queued, queued, room), divide_rows(queued, [0] * count, room)):
        assert sum(rows) == min(room, sum(queued))
        assert all(0 <= got <= waiting for got, waiting in zip(rows, queued, strict=True))
