"""The cost model of a bucket, and which batches it learns."""

from __future__ import annotations

import random
import statistics

import pytest

from tensorferry.batcher.learning.cost_model import BatchCostModel


def test_the_hosts_time_is_known_after_two_sizes() -> None:
    """The host has no warm-up runs. From one batch of one row it would seem to grow with the rows."""
    cost_model = BatchCostModel(128, pipelined=True)
    for rows in (1, 17, 50, 84):
        cost_model.observe(0.0, rows, 0.0025 + 0.0001 * rows, 0.0015)
    assert cost_model.host_lead_time(128) == pytest.approx(0.0015)


def test_slow_first_batches_are_forgotten() -> None:
    cost_model = BatchCostModel(8, pipelined=True)
    for _ in range(4):
        cost_model.observe(0.0, 4, 0.01, 0.03)
    for rows in (2, 4, 8) * 20:
        cost_model.observe(0.0, rows, 0.01, 0.003)
    assert cost_model.host_lead_time(4) == pytest.approx(0.003, rel=0.05)


def run(cost_model: BatchCostModel, now: float, seconds: float, *sizes: int, took: float) -> float:
    """Run batches of these sizes in turn for `seconds`; return the time afterwards."""
    end = now + seconds
    while now < end:
        for rows in sizes:
            now += took
            cost_model.observe(now, rows, took)
    return now


def samples(cost_model: BatchCostModel) -> int:
    learned = cost_model.statistics(0, 0).device
    return 0 if learned is None else learned.observations


def test_few_short_batches_are_learned() -> None:
    """At 50 us a batch, learning all of them would take half of the time."""
    cost_model = BatchCostModel(8)
    now = run(cost_model, 0.0, 1.0, 1, took=50e-6)
    steady = samples(cost_model)
    assert 40 < steady < 80
    run(cost_model, now, 0.1, 1, 1, 1, 8, took=100e-6)
    assert steady + 20 < samples(cost_model) < steady + 60, "it learns more while times are unexpected"


@pytest.mark.parametrize("factor", [0.4, 3.0, 100.0])
def test_a_lasting_change_of_short_batches_is_learned_soon(factor: float) -> None:
    cost_model = BatchCostModel(8)
    for rows in (1, 8):
        cost_model.add_warmup_sample(rows, 50e-6)
    now = run(cost_model, 0.0, 0.2, 1, 8, took=50e-6)
    took = factor * 50e-6
    run(cost_model, now, max(0.05, 12 * took), 1, 8, took=took)
    assert cost_model.mean(1) == pytest.approx(took, rel=0.1)


def test_alternating_sizes_are_all_learned() -> None:
    """With samples at fixed intervals, always the same size might be sampled."""
    cost_model = BatchCostModel(8)
    took = {1: 0.2e-3, 2: 0.3e-3, 8: 0.5e-3}
    now = 0.0
    for _ in range(2000):
        for rows, seconds in took.items():
            now += seconds
            cost_model.observe(now, rows, seconds if now > 0.5 else 0.1e-3)
    for rows, seconds in took.items():
        assert cost_model.mean(rows) == pytest.approx(seconds, rel=0.1)


def test_varying_short_batches_are_not_overestimated() -> None:
    """The batch that runs at a given moment is more likely a long one."""
    draw = random.Random(1)
    cost_model = BatchCostModel(8)
    now, expected = 0.0, []
    for _ in range(40_000):
        took = draw.choice((76e-6, 124e-6))
        now += took
        cost_model.observe(now, 1, took)
        expected.append(cost_model.mean(1))
    assert statistics.mean(expected) == pytest.approx(100e-6, rel=0.03)


def test_a_large_batch_after_a_long_time_without_one_is_learned() -> None:
    """The rate rule ran it to learn its time."""
    cost_model = BatchCostModel(8)
    now = run(cost_model, 0.0, 0.1, 1, took=50e-6)
    for _ in range(20):
        while not cost_model.stale:
            now = run(cost_model, now, 50e-6, 1, took=50e-6)
        before = samples(cost_model)
        now = run(cost_model, now, 50e-6, 8, took=50e-6)
        assert not cost_model.stale
        assert samples(cost_model) == before + 1


# After a warm-up of few rows.


def warmed_by_few_rows() -> BatchCostModel:
    """A device whose batches take 10 ms, as a warm-up that chance delayed does not show: its line leads to 165 ms."""
    cost_model = BatchCostModel(32)
    cost_model.add_warmup_sample(1, 0.010)
    cost_model.add_warmup_sample(2, 0.015)
    return cost_model


def test_no_time_is_guessed_that_refuses_requests() -> None:
    cost_model = warmed_by_few_rows()
    cost_model.observe(0.0, 2, 0.010)
    assert cost_model.mean(32) > 0.05
    assert cost_model.upper_if_recent(32, 0.1) == cost_model.upper(2) < 0.02
    assert cost_model.max_rows_within(0.02) == 32
    assert cost_model.max_rows_within(0.001) < 2
    assert cost_model.grows


def test_a_time_of_half_a_full_batch_is_no_guess() -> None:
    cost_model = warmed_by_few_rows()
    for rows in (16, 16):
        assert cost_model.grows
        cost_model.observe(0.0, rows, 0.010)
    assert not cost_model.grows
    # Without a warm-up nothing is known.
    assert not BatchCostModel(32).grows


def test_the_first_run_of_a_size_is_not_learned_and_the_second_is_not_clipped() -> None:
    cost_model = warmed_by_few_rows()
    cost_model.observe(1.0, 32, 2.0)
    assert cost_model.upper(32) == cost_model.upper(2)
    cost_model.observe(2.0, 32, 0.012)
    learned = cost_model.statistics(0, 0).device
    assert learned is not None
    assert learned.table[32] < 0.014
    assert cost_model.mean(1) < 0.013


def test_a_little_larger_batch_is_learned_at_once() -> None:
    """Else a queue that grows would run ever larger batches before the first is learned."""
    cost_model = warmed_by_few_rows()
    for rows in (8, 12):
        cost_model.observe(0.0, rows, 0.010)
    learned = cost_model.statistics(0, 0).device
    assert learned is not None
    assert 12 in learned.table
