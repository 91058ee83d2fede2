"""Sessions that share the cores are compared with one that has all of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tensorferry.server.onnx.measuring.core_layouts import (
    Layout,
    LayoutTime,
    better_layout,
    layouts_of,
    time_layouts,
)

ONE, TWO = Layout(1, 2), Layout(2, 1)


class Clock:
    """A clock that each thread has for itself, so that runs beside each other take their own times."""

    def __init__(self) -> None:
        self._now = threading.local()

    def __call__(self) -> float:
        return getattr(self._now, "seconds", 0.0)

    def advance(self, seconds: float) -> None:
        self._now.seconds = self() + seconds


def inputs(rows: int) -> Mapping[str, Any]:
    return {"x": np.zeros((rows, 1))}


def runs_of(clock: Clock, row_seconds: Mapping[Layout, float]) -> Any:
    def make(layout: Layout) -> Sequence[Any]:
        return [lambda batch: clock.advance(len(batch["x"]) * row_seconds[layout])] * layout.sessions

    return make


def times(layouts: Sequence[Layout], make: Any, clock: Clock, rounds: int = 100) -> list[LayoutTime]:
    allowed = iter([True] * rounds)
    return list(time_layouts(layouts, make, 4, inputs, lambda: next(allowed, False), clock))


@pytest.mark.parametrize(
    ("cores", "layouts"),
    [
        (1, []),
        (2, [(1, 2), (2, 1)]),
        (6, [(1, 6), (2, 3), (4, 1)]),
        (64, [(1, 64), (2, 32), (4, 16), (8, 8)]),
    ],
)
def test_one_session_comes_first(cores: int, layouts: list[tuple[int, int]]) -> None:
    assert list(layouts_of(cores)) == [Layout(*layout) for layout in layouts]


def test_the_rates_of_all_sessions_are_added() -> None:
    clock = Clock()
    one, two = times((ONE, TWO), runs_of(clock, {ONE: 0.02, TWO: 0.03}), clock)
    assert (one.rows_per_second, two.rows_per_second) == pytest.approx((1 / 0.02, 2 / 0.03))
    assert (one.alone_seconds, two.alone_seconds) == pytest.approx((0.02, 0.03))
    assert better_layout((one, two)) == two


def test_a_layout_is_better_only_if_it_gains_much() -> None:
    clock = Clock()
    assert better_layout(times((ONE, TWO), runs_of(clock, {ONE: 0.02, TWO: 0.038}), clock)) is None
    assert better_layout(()) is None


def test_layouts_without_time_left_are_missing() -> None:
    clock = Clock()
    (one,) = times((ONE, TWO), runs_of(clock, {ONE: 0.02}), clock, rounds=1)
    assert (one.sessions, one.threads) == (1, 2)


def test_a_failure_in_a_session_is_raised() -> None:
    def fail(batch: Mapping[str, Any]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        times((ONE,), lambda layout: [fail], Clock())
