"""Conditions on results, and the largest rate that meets one."""

from __future__ import annotations

import pytest
from client.load.measured import measured, tally

from tensorferry.client.load.conditions import condition, find_rate, meets
from tensorferry.client.load.results import StepResult
from tensorferry.client.load.steps import BadOption, Step

SPREAD = measured(tally(*[at / 1000 for at in range(1, 101)], failures={"INTERNAL": (25, "")}))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("p50<40ms", False),
        ("p99 < 0.2s", True),
        ("p99<90000us", False),
        ("p999<101ms", True),
        ("p99.9<99ms", False),
        ("p50>40ms", True),
        ("mean<51ms", True),
        ("errors<20%", False),
        ("rate>100/s", False),
    ],
)
def test_a_condition_holds_or_not(text: str, holds: bool) -> None:
    assert condition(text).holds(SPREAD) == holds


@pytest.mark.parametrize(
    "text", ["", "p99", "p99<", "p9<1s", "p100<1s", "p99<1", "p99<1%", "errors<1ms", "rate<3s", "p99=1s"]
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match="expected "):
        condition(text)


def test_nothing_holds_without_an_answer() -> None:
    failed = measured(tally(failures={"INTERNAL": (3, "")}))
    assert not condition("p99<1s").holds(failed)
    assert condition("errors>99%").holds(failed)
    assert not condition("errors<1%").holds(measured(tally()))


def at_rate(rate: float, latency: float, answered: int, failed: int = 0) -> StepResult:
    failures = {"INTERNAL": (failed, "")} if failed else {}
    return measured(tally(*[latency] * answered, failures=failures), step=Step(rate=rate))


@pytest.mark.parametrize(("capacity", "noisy"), [(1000.0, False), (1000.0, True), (400.0, False)])
def test_the_largest_rate_is_found_by_bisection(capacity: float, noisy: bool) -> None:
    """A server that is fast up to 700 requests/s and keeps 900.

    With noise every other measurement has latencies that are too high. The capacity may be measured too low.
    """
    wanted, tried = condition("p99<10ms"), []

    def run(step: Step) -> StepResult:
        assert step.rate is not None
        tried.append(step.rate)
        slow = step.rate > 700 or (noisy and len(tried) % 2)
        return at_rate(step.rate, 0.05 if slow else 0.005, round(min(step.rate, 900)))

    found = list(find_rate(run, wanted, capacity))
    assert [result.step.rate for result in found] == list(dict.fromkeys(tried))
    good = [result.step.rate or 0.0 for result in found if meets(result, wanted)]
    assert 700 / 1.04 < max(good) <= 700
    assert len(found) <= 12
    assert all(tried.count(rate) == 2 for rate in tried if rate > 700), "a failure is measured once more"


def test_a_rate_that_is_not_kept_or_fails_does_not_count() -> None:
    wanted = condition("p99<1s")
    assert meets(at_rate(10_000.0, 0.1, 9_401), wanted)
    assert not meets(at_rate(10_000.0, 0.1, 9_399), wanted)
    assert meets(at_rate(10.0, 0.1, 6), wanted), "random arrivals of a low rate can be few"
    assert not meets(at_rate(100.0, 0.1, 100, failed=1), wanted)
