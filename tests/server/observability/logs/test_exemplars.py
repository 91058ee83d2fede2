"""Choice of traced requests as exemplars of a latency."""

from __future__ import annotations

import pytest

from tensorferry.batcher import interval_of
from tensorferry.server.observability.logs.exemplars import Exemplars, sampled_trace

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("flags", ["01", "ff"])
def test_a_sampled_trace_is_an_exemplar(flags: str) -> None:
    assert sampled_trace(f"00-{TRACE}-{SPAN}-{flags}") == TRACE


def test_later_versions_may_append_fields() -> None:
    assert sampled_trace(f"01-{TRACE}-{SPAN}-01-what-ever") == TRACE
    assert sampled_trace(f"cc-{TRACE}-{SPAN}-01") == TRACE


@pytest.mark.parametrize("header", [f"00-{TRACE}-{SPAN}-00", f"00-{'0' * 32}-{SPAN}-01", b"\xff" * 55])
def test_invalid_or_unsampled_traces_are_ignored(header: str | bytes) -> None:
    assert sampled_trace(header) is None


def test_the_latest_of_each_interval_is_kept() -> None:
    exemplars = Exemplars()
    assert not any(exemplars.latest())
    for number, seconds in enumerate((0.002, 0.003, 0.0021, 70.0)):
        exemplars.record(f"00-{number + 1:032x}-{SPAN}-01", seconds)
    exemplars.record(f"00-{TRACE}-{SPAN}-00", 70.0)
    kept = {
        interval: (one.trace_id, one.seconds)
        for interval, one in enumerate(exemplars.latest())
        if one is not None
    }
    assert kept == {
        interval_of(0.002): (f"{3:032x}", 0.0021),
        interval_of(0.003): (f"{2:032x}", 0.003),
        18: (f"{4:032x}", 70.0),
    }
