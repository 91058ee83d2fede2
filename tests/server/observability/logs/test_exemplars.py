"""Choice of traced requests as exemplars of a latency."""

from __future__ import annotations

from tensorferry.batcher import interval_of
from tensorferry.server.observability.logs.exemplars import Exemplars

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_the_latest_of_each_interval_is_kept() -> None:
    exemplars = Exemplars()
    assert not any(exemplars.latest())
    for number, seconds in enumerate((0.002, 0.003, 0.0021, 70.0)):
        exemplars.record(f"00-{number + 1:032x}-{SPAN}-01", seconds)
    # Neither a trace that is not sampled nor an invalid header is an exemplar.
    exemplars.record(f"00-{TRACE}-{SPAN}-00", 70.0)
    exemplars.record(b"\xff" * 55, 70.0)
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
