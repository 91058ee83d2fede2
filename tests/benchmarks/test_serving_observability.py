"""Pure parts of the observability benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from serving.load import Load, shape_of
from serving.observability import Comparison, Shown, _header, compared, line, scraping


def test_ratios_are_of_each_round_and_not_of_the_medians() -> None:
    """Ratios are taken within a round, because the machine may be twice as fast in one round as in
    another.
    """
    pairs = [(Shown(rate, 50.0), Shown(0.98 * rate, 51.0)) for rate in (1000, 2000, 4000)]
    found = compared(pairs)
    assert (found.without.rate, found.given.rate) == (2000, 1960)
    assert found.rate_ratio == pytest.approx(0.98)
    assert found.cpu_ratio == pytest.approx(1.02)
    assert compared([*pairs, (Shown(1.0, 1.0), Shown(9.0, 9.0))]).rate_ratio == pytest.approx(0.98)


def test_a_line_says_both_sides_and_their_ratio() -> None:
    shown = line("metrics", 64, Comparison(Shown(9000, 50), Shown(8900, 50.5), 0.99, 1.01))
    assert " ".join(shown.split()) == (
        "metrics 64 in flight: 9000 → 8900 calls/s (0.990) 50.0 → 50.5 us CPU a call (1.010)"
    )


def test_headers_of_calls() -> None:
    assert _header("authorization=Bearer a=b") == ("authorization", "Bearer a=b")
    for text in ("none", "=value"):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=VALUE"):
            _header(text)
    load = Load(
        1, "/", Path("body"), shape_of("unary", 1, False), 1.0, 0.5, 16, headers=[("a", "b"), ("c", "d=e")]
    )
    assert [word for word in load.words() if "header" in word] == ["--header=a=b", "--header=c=d=e"]


def test_metrics_that_cannot_be_read_end_it() -> None:
    with pytest.raises(SystemExit, match="the metrics cannot be read"), scraping(1):
        pass
