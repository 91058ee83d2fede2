"""What is learned of a bucket's batches: the host's part is known from the first few on."""

from __future__ import annotations

import pytest

from tensorferry.batcher.profile import Profile


def test_the_hosts_part_is_known_after_two_sizes() -> None:
    """It has no warm-up runs. From one batch of one row it would be guessed to grow by the row."""
    profile = Profile(128, pipelined=True)
    for rows in (1, 17, 50, 84):
        profile.observe(0.0, rows, 0.0025 + 0.0001 * rows, 0.0015)
    assert profile.preparation(128) == pytest.approx(0.0015)


def test_the_share_before_the_device_is_that_of_the_first_batches_at_first() -> None:
    profile = Profile(8, pipelined=True)
    profile.observe(0.0, 4, 0.01, 0.003, 0.001)
    assert profile.preparation(4) == pytest.approx(0.003)
    profile.observe(0.0, 4, 0.01, 0.001, 0.003)
    assert profile.preparation(4) == pytest.approx(0.002)


def test_slow_first_batches_are_forgotten() -> None:
    profile = Profile(8, pipelined=True)
    for _ in range(4):
        profile.observe(0.0, 4, 0.01, 0.03)
    for rows in (2, 4, 8) * 20:
        profile.observe(0.0, rows, 0.01, 0.003)
    assert profile.preparation(4) == pytest.approx(0.003, rel=0.05)
