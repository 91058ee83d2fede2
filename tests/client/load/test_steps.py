from __future__ import annotations

import itertools

import pytest

from tensorferry.client.load.steps import (
    Arrival,
    BadLoad,
    Step,
    arrivals_of,
    concurrencies,
    rates,
    share,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", [8]),
        ("1,8,32", [1, 8, 32]),
        ("1:256", [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        ("3:20", [3, 6, 12, 20]),
        ("4:4", [4]),
    ],
)
def test_concurrencies(text: str, expected: list[int]) -> None:
    assert concurrencies(text) == tuple(Step(concurrency=number) for number in expected)


def test_rates() -> None:
    assert rates("0.5") == (Step(rate=0.5),)
    assert [step.rate for step in rates("100:500")] == [100, 200, 400, 500]


@pytest.mark.parametrize("text", ["", "0", "1.5", "1,", "8:1", "1:2:3", "65537"])
def test_what_is_no_concurrency(text: str) -> None:
    with pytest.raises(BadLoad, match="expected"):
        concurrencies(text)


@pytest.mark.parametrize("text", ["0", "nan", "inf", "a:b"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(BadLoad, match="expected"):
        rates(text)


@pytest.mark.parametrize(("total", "parts"), [(7, 3), (3, 3)])
def test_shares_add_up_and_differ_by_at_most_one(total: int, parts: int) -> None:
    shares = [share(total, parts, part) for part in range(parts)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_constant_arrivals_of_all_processes_interleave() -> None:
    parts = [itertools.islice(arrivals_of("constant", 100, 2, 3, part, 1), 4) for part in range(3)]
    times = sorted(arrival.at for part in parts for arrival in part)
    assert times == pytest.approx([number / 100 for number in range(12)])


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    merged = [
        arrival
        for part in range(4)
        for arrival in itertools.takewhile(
            lambda arrival: arrival.at < 50, arrivals_of("poisson", 200, 1, 4, part, 7)
        )
    ]
    # The number within 50 s has a mean of 10,000 and a standard deviation of 100.
    assert 9_500 < len(merged) < 10_500
    times = sorted(arrival.at for arrival in merged)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    # Independent arrivals: the standard deviation of a gap is its mean.
    assert variance**0.5 == pytest.approx(mean, rel=0.1)


def test_arrivals_are_those_of_the_seed_and_differ_between_processes() -> None:
    def some(part: int, seed: int) -> list[Arrival]:
        return list(itertools.islice(arrivals_of("poisson", 10, 1, 2, part, seed), 5))

    assert some(0, 1) == some(0, 1)
    assert len({some(part, seed)[0].at for part in range(2) for seed in range(3)}) == 6
