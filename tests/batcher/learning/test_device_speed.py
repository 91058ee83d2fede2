"""How many times as long batches take on a device as on the first: learned from few, and not from accidents."""

from __future__ import annotations

import random

import pytest

from tensorferry.batcher.learning.device_speed import Pace


def seen(*ratios: float) -> Pace:
    pace = Pace()
    for ratio in ratios:
        pace.observe(ratio)
    return pace


@pytest.mark.parametrize("spread", [0.03, 0.1])
def test_equal_devices_are_taken_for_equal(spread: float) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        pace = seen(*[draw.lognormvariate(0, spread) for _ in range(5)])
        for _ in range(300):
            pace.observe(draw.lognormvariate(0, spread) * (2 if draw.random() < 0.01 else 1))
            assert pace.value == 1.0


@pytest.mark.parametrize("ratio", [3.0, 1.5, 0.3])
def test_another_speed_is_known_from_the_first_batch(ratio: float) -> None:
    pace = seen(ratio)
    assert pace.value == pytest.approx(ratio)
    assert not pace.known, "enough to be careful, not to tell others' times by"
    assert seen(ratio, ratio, ratio).known


def test_a_slow_first_batch_is_forgotten_with_the_second() -> None:
    assert seen(4.0).value > 3.9
    assert seen(4.0, 1.0).value == 1.0


def test_one_accident_changes_little() -> None:
    pace = seen(*[3.0] * 20, 30.0)
    assert pace.value == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize(("before", "after"), [(3.0, 1.0), (1.0, 3.0), (3.0, 9.0)])
def test_a_lasting_change_is_followed(before: float, after: float) -> None:
    assert seen(*[before] * 50, *[after] * 10).value == pytest.approx(after, rel=0.05)
