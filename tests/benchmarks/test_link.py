"""Benchmark of the link."""

from __future__ import annotations

import os

from link import STEPS, round_trips, step_seconds


def test_every_step_is_timed() -> None:
    for size in (100, 5000):
        values = step_seconds(size, 2, 0)
        assert len(values) == len(STEPS)
        assert all(value > 0 for value in values)


def test_round_trips_between_processes() -> None:
    cores = os.sched_getaffinity(0)
    assert round_trips(5000, 3, 0.01) > 0
    assert os.sched_getaffinity(0) == cores
