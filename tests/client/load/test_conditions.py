"""Conditions on results, and the largest rate that meets one."""

from __future__ import annotations

import pytest

from tensorferry.client.load.conditions import BadCondition, condition, find_rate, meets
from tensorferry.client.load.histogram import Histogram
from tensorferry.client.load.results import ErrorCount, StepResult
from tensorferry.client.load.steps import Step


def result(*latencies: float, failed: int = 0, rate: float | None = None, seconds: float = 1.0) -> StepResult:
    made = Histogram()
    made.add(latencies)
    errors = (ErrorCount("INTERNAL", failed, ""),) if failed else ()
    step = Step(rate=rate)
    return StepResult(step, seconds, made, len(latencies), errors, Histogram(), (), (), ())


SPREAD = result(*[at / 1000 for at in range(1, 101)], failed=25)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("p50<60ms", True),
        ("p50<40ms", False),
        ("p99 < 0.2s", True),
        ("p99<90000us", False),
        ("p999<101ms", True),
        ("p50>40ms", True),
        ("mean<51ms", True),
        ("errors<21%", True),
        ("errors<20%", False),
        ("rate>99", True),
        ("rate>100/s", False),
    ],
)
def test_a_condition_holds_or_not(text: str, holds: bool) -> None:
    assert condition(text).holds(SPREAD) == holds


@pytest.mark.parametrize(
    "text", ["", "p99", "p99<", "p9<1s", "p99<1", "p99<1%", "errors<1ms", "rate<3s", "p99=1s"]
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(BadCondition, match="expected "):
        condition(text)


def test_nothing_holds_without_an_answer() -> None:
    assert not condition("p99<1s").holds(result(failed=3))
    assert not condition("errors<1%").holds(result())
    assert condition("errors>99%").holds(result(failed=3))


def test_the_largest_rate_is_found_by_bisection() -> None:
    """A server that is fast up to 700 requests/s, keeps 900, and has a capacity of 1,000."""
    wanted, tried = condition("p99<10ms"), []

    def run(step: Step) -> StepResult:
        assert step.rate is not None
        tried.append(step.rate)
        latency = 0.005 if step.rate <= 700 else 0.05
        return result(*[latency] * round(min(step.rate, 900)), rate=step.rate)

    found = find_rate(run, wanted, 1000.0)
    assert [each.step.rate for each in found] == sorted(tried)
    good = [each.step.rate for each in found if meets(each, wanted)]
    assert 700 / 1.04 < max(rate for rate in good if rate is not None) <= 700
    assert len(tried) <= 12


def test_a_rate_that_is_not_kept_or_fails_does_not_count() -> None:
    wanted = condition("p99<1s")
    assert meets(result(*[0.1] * 98, rate=100.0), wanted)
    assert not meets(result(*[0.1] * 96, rate=100.0), wanted)
    assert not meets(result(*[0.1] * 100, failed=1, rate=100.0), wanted)
