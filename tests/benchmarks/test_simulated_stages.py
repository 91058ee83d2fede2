"""The simulation of pipelines: every request ends once, and later stages' times pay in overload."""

from __future__ import annotations

import costs
import pytest
from scenarios import FAST_FIRST, SLOW_FIRST
from stages import SEPARATE, STAGE_POLICIES, run_stages
from summary import Summary, summarize


def simulate(policy: str, load: float) -> Summary:
    trace = SLOW_FIRST.trace(load, 1500, 1)
    return summarize(trace, run_stages(trace, SLOW_FIRST, policy, costs.noise(1)))


def test_the_slower_stage_limits_a_pipeline() -> None:
    assert (FAST_FIRST.capacity, SLOW_FIRST.capacity) == pytest.approx((32 / 0.0072, 32 / 0.0072))


@pytest.mark.parametrize("policy", STAGE_POLICIES)
def test_every_policy_keeps_up_with_a_low_load(policy: str) -> None:
    assert simulate(policy, 0.5).in_time == 1.0


def test_in_overload_stages_that_know_of_each_other_answer_more_in_time() -> None:
    shares = [simulate(policy, 2.0).in_time for policy in ("greedy", SEPARATE, "tensorferry")]
    assert shares == sorted(shares)
    assert shares[2] > 1.2 * shares[1]
