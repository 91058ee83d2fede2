"""Sizes of a warm-up: enough to find the steps of batch times, and no more if every row costs the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import reproducible

from tensorferry.batcher.learning.calibration import calibrate, powers_of_two
from tensorferry.batcher.learning.latency_model import LatencyModel

MOST = 128


def stairs(step: int) -> Callable[[int], float]:
    """Return the seconds of a batch whose rows are rounded up to a multiple."""
    return lambda rows: 0.004 + 0.0001 * -(-rows // step) * step


def powers(rows: int) -> float:
    """Return the seconds with a CUDA graph for each power of two."""
    return 0.004 + 0.0001 * min(size for size in powers_of_two(MOST) if size >= rows)


def model_of(times: Callable[[int], float]) -> LatencyModel:
    model = LatencyModel(MOST)
    for rows, seconds in sorted(calibrate(times, MOST)):
        model.add_warmup_sample(rows, seconds)
    return model


@pytest.mark.parametrize("most", [1, 2, 6, 8, 33, 128])
def test_the_powers_of_two_and_the_maximum_run_first(most: int) -> None:
    sizes = powers_of_two(most)
    ran = [rows for rows, _ in calibrate(stairs(1), most)]
    assert tuple(ran[: len(sizes)]) == sizes
    assert len(set(ran)) == len(ran), "each size runs once"


def test_if_every_row_costs_the_same_one_more_size_runs_for_each_gap() -> None:
    ran = [rows for rows, _ in calibrate(lambda rows: 0.001 + 0.004 * rows, 16)]
    assert ran == [1, 2, 4, 8, 16, 9, 5]


@pytest.mark.parametrize("seconds", [0.004, 0.0])
def test_if_all_sizes_take_the_same_no_other_size_runs(seconds: float) -> None:
    assert [rows for rows, _ in calibrate(lambda rows: seconds, MOST)] == list(powers_of_two(MOST))


@pytest.mark.parametrize("times", [*map(stairs, (8, 16, 32, 64)), powers])
def test_a_staircase_is_found_by_the_warm_up(times: Callable[[int], float]) -> None:
    model = model_of(times)
    assert model.statistics().piecewise
    for rows in (31, 33, 63, 65, 96, 97, 127, 128):
        assert model.curve.mean(rows) == pytest.approx(times(rows), rel=0.03), rows


@pytest.mark.parametrize("seed", range(8))
def test_a_line_with_noise_is_no_staircase(seed: int) -> None:
    draw = random.Random(seed)

    def noisy(rows: int) -> float:
        return min(stairs(1)(rows) * draw.lognormvariate(0, 0.03) for _ in range(2))

    assert not model_of(noisy).statistics().piecewise


def test_an_error_of_a_run_ends_the_calibration() -> None:
    def run(rows: int) -> float:
        if rows > 8:
            raise MemoryError
        return 0.004

    sizes = calibrate(run, MOST)
    assert [next(sizes)[0] for _ in range(4)] == [1, 2, 4, 8]
    with pytest.raises(MemoryError):
        next(sizes)


@reproducible
@given(most=st.integers(1, 4096), draws=st.lists(st.floats(0, 10), min_size=1, max_size=40))
def test_it_always_ends_and_runs_no_size_twice_or_beyond_the_maximum(most: int, draws: list[float]) -> None:
    times = itertools.cycle(draws)
    ran = [rows for rows, _ in calibrate(lambda rows: next(times), most)]
    assert len(set(ran)) == len(ran) <= len(powers_of_two(most)) + 17
    assert all(1 <= rows <= most for rows in ran)
