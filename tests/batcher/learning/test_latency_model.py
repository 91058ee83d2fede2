"""The latency model learns batch times, and ignores single outliers."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import reproducible

from tensorferry.batcher.learning.latency_model import LatencyModel

MOST = 64
SIZES = (1, 2, 5, 8, 16, 33, 48, 64)


def affine(rows: int) -> float:
    return 0.004 + 0.0001 * rows


def anchored(most: int = MOST) -> LatencyModel:
    model = LatencyModel(most)
    for rows in (1, most // 4, most):
        model.add_warmup_sample(rows, affine(rows))
    return model


def worst_error(model: LatencyModel, scale: float = 1.0) -> float:
    return max(abs(model.curve.mean(rows) / (scale * affine(rows)) - 1) for rows in SIZES)


def test_without_samples_it_predicts_nothing() -> None:
    model = LatencyModel(MOST)
    assert not model.curve.known
    assert (model.curve.mean(8), model.curve.upper(8), model.curve.max_rows_within(0.0)) == (0.0, 0.0, MOST)


def test_outliers_change_the_mean_little() -> None:
    random_ = random.Random(3)
    model = anchored()
    for number in range(400):
        rows = random_.randint(1, MOST)
        model.observe(rows, affine(rows) * (10 if number % 100 == 50 else 1))
    assert worst_error(model) < 0.03
    assert model.statistics().clipped == 4


@pytest.mark.parametrize("factor", [2.0, 0.5, 10.0])
def test_it_follows_a_lasting_change(factor: float) -> None:
    random_ = random.Random(4)
    model = anchored()
    for scale, batches in ((1.0, 200), (factor, 60)):
        for _ in range(batches):
            rows = random_.randint(1, MOST)
            model.observe(rows, scale * affine(rows))
    assert worst_error(model, factor) < 0.15


def staircase(rows: int) -> float:
    return 0.004 + 0.0032 * math.ceil(rows / 32)


def test_it_learns_a_staircase_from_random_sizes() -> None:
    draw = random.Random(5)
    model = LatencyModel(128)
    for rows in (1, 32, 128):
        model.add_warmup_sample(rows, staircase(rows))
    for _ in range(400):
        rows = min(128, max(1, round(draw.gauss(70, 20))))
        model.observe(rows, staircase(rows) * draw.lognormvariate(0, 0.03))
    assert model.statistics().piecewise
    for rows in (40, 60, 63, 66, 80, 95):
        assert model.curve.mean(rows) == pytest.approx(staircase(rows), rel=0.06), rows
    assert 60 <= model.curve.max_rows_within(staircase(64) * 1.1) <= 65, "the step is known"


def test_sizes_that_never_ran_are_not_excluded() -> None:
    """If a step were assumed after each size that ran, no larger one would run when time is short."""
    model = LatencyModel(128)
    for rows in (1, 32, 128):
        model.add_warmup_sample(rows, staircase(rows))
    for _ in range(200):
        for rows in (32, 33, 50):
            model.observe(rows, staircase(rows))
    assert model.statistics().piecewise
    assert model.curve.max_rows_within(staircase(64) * 1.1) > 55


def test_one_batch_beyond_a_step_is_enough_to_learn_it() -> None:
    """Otherwise the next batch of that size would be late, too."""
    model = LatencyModel(128)
    for rows in (1, 32, 128):
        model.add_warmup_sample(rows, staircase(rows))
    for _ in range(100):
        for rows in (32, 48, 64):
            model.observe(rows, staircase(rows))
    for rows in (66, 99):
        assert model.statistics().piecewise
        assert model.curve.upper(rows) < staircase(rows), "this step is not known yet"
        model.observe(rows, staircase(rows))
        assert model.curve.mean(rows) == pytest.approx(staircase(rows), rel=0.02)
        assert model.curve.max_rows_within(staircase(rows) * 0.95) < rows


def test_sizes_that_have_not_run_for_long_are_not_forgotten() -> None:
    """In an overload only two sizes run; a line through these must not replace the others."""
    draw = random.Random(7)

    def stairs(rows: int) -> float:
        return 0.001 + 0.016 * math.ceil(rows / 4)

    model = LatencyModel(16)
    for rows in (1, 4, 16):
        model.add_warmup_sample(rows, stairs(rows))
    for sizes, batches in ((range(1, 17), 300), ((12, 16), 3000)):
        for _ in range(batches):
            rows = draw.choice(sizes)
            model.observe(rows, stairs(rows) * draw.lognormvariate(0, 0.03))
    for rows in (1, 4, 5, 8, 9):
        assert model.curve.mean(rows) == pytest.approx(stairs(rows), rel=0.1), rows


@pytest.mark.parametrize("factor", [0.5, 1.5, 4.0])
def test_a_bucket_unlike_the_warmed_up_one_is_learned_after_a_few_batches(factor: float) -> None:
    model = anchored()
    for rows in (20, 7, 40, 12, 30, 50):
        model.observe(rows, factor * affine(rows))
    assert worst_error(model, factor) < 0.15


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (-1, 1.0), (1, -0.1), (1, math.nan), (1, math.inf)])
def test_impossible_samples_are_refused(rows: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="rows must be at least 1, seconds at least 0"):
        LatencyModel(MOST).observe(rows, seconds)


runs = st.lists(st.tuples(st.integers(1, 40), st.floats(1e-6, 10)), max_size=60)


@reproducible
@given(anchors=runs, observed=runs)
def test_predictions_are_monotone_and_finite_for_any_samples(
    anchors: list[tuple[int, float]], observed: list[tuple[int, float]]
) -> None:
    model = LatencyModel(40)
    for rows, seconds in anchors:
        model.add_warmup_sample(rows, seconds)
    for rows, seconds in observed:
        model.observe(rows, seconds)
    means = [model.curve.mean(rows) for rows in range(1, 45)]
    uppers = [model.curve.upper(rows) for rows in range(1, 41)]
    assert means == sorted(means), "more rows never take less"
    assert all(0 <= mean < math.inf for mean in means)
    assert all(upper >= mean for upper, mean in zip(uppers, means, strict=False))
    if model.curve.known:
        for slack in (uppers[0] / 2, uppers[0], uppers[10], uppers[-1], uppers[-1] * 2):
            fits = model.curve.max_rows_within(slack)
            assert fits == 0 or model.curve.upper(fits) <= slack
            assert fits == 40 or model.curve.upper(fits + 1) > slack
