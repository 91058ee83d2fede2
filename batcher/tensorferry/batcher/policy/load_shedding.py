"""Load shedding: the requests that cannot make their deadlines, and the *rate rule*.

If not all queued requests can make their deadlines, the rate rule drops the fewest oldest, so that the batch that then
fits is large enough to keep up with the arrivals. Dropping only requests that are already lost would be a trap: the
slack of the oldest fits a batch too small to keep up, so the next oldest has no more slack, and so on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tensorferry.batcher.policy.class_queue import take_prefix, total_rows
from tensorferry.batcher.policy.protocols import BatchTimes
from tensorferry.batcher.request import Request

# A batch finds more rows than its device's part of all arrivals: that part, times this power of the number of devices.
# It was the best in simulations of two, three, four and eight devices.
_SHARED = 0.4


class ArrivalDemand(NamedTuple):
    """The arrivals for one device; `devices` share all arrivals.

    `typical_deadline` is the usual time from arrival to deadline, in seconds.
    """

    rows_per_second: float
    typical_deadline: float
    devices: int = 1


class KeptAndShed(NamedTuple):
    """The requests that go into a batch, those that are dropped, and the rows that the deadlines of `kept` allow."""

    kept: list[Request]
    shed: list[Request]
    rows_allowed: int


def infeasible(requests: Iterable[Request], start: float, needs: Callable[[int], float]) -> list[Request]:
    """Return the requests that would miss their deadline even if they ran alone from `start` on.

    `needs` returns the most seconds that a batch takes, by its rows.
    """
    return [
        request
        for request in requests
        if request.deadline < math.inf and start + needs(request.rows_counted) >= request.deadline
    ]


def rate_rule(
    with_deadline: Sequence[Request],
    room: int,
    now: float,
    times: BatchTimes,
    demand: Callable[[], ArrivalDemand],
) -> KeptAndShed:
    """Choose from requests in order of their deadlines; `demand` is called only if not all can make theirs."""
    fits = times.max_rows_within(with_deadline[0].deadline - now)
    wanted = take_prefix(with_deadline, room)
    least = max(fits, with_deadline[0].rows_counted)
    if fits >= room or (rows := total_rows(wanted)) <= least:
        return KeptAndShed(wanted, [], least)
    target = _sustainable_rate(room, times, demand())
    # Cumulative rows of the requests in their order, as far as the search has come.
    upcoming, ends = iter(with_deadline), [0]
    best_rate, best = -1.0, (0, 1, 0)
    # Sizes that do not run are not learned. If the times of a slow spell were trusted for ever, batches too small to
    # keep up would run for ever. So a stale model makes one batch as large as possible.
    explore = times.stale and 2 * rows > room
    for start in range(len(with_deadline)):
        if with_deadline[start].rows_counted > room:
            break
        while ends[-1] <= ends[start] + room and (request := next(upcoming, None)) is not None:
            ends.append(ends[-1] + request.rows_counted)
        fits = max(
            times.max_rows_within(with_deadline[start].deadline - now), with_deadline[start].rows_counted
        )
        stop = max(start + 1, bisect_right(ends, ends[start] + min(room, fits)) - 1)
        rows = ends[stop] - ends[start]
        rate = rows if explore else rows / max(times.mean(rows), 1e-9)
        if rate > best_rate:
            best_rate, best = rate, (start, stop, fits)
        unlimited = stop == len(with_deadline) or ends[stop + 1] - ends[start] > room
        if unlimited or (rate >= target and not explore):
            break
    start, stop, fits = best
    return KeptAndShed(list(with_deadline[start:stop]), list(with_deadline[:start]), fits)


def _sustainable_rate(room: int, times: BatchTimes, demand: ArrivalDemand) -> float:
    """Return the rows a second to keep up with: those that arrive, or what deadlines allow in a steady state.

    It uses the line from one row to a full batch, even if the times are a staircase. A size just before or just after a
    step says nothing about the sustainable rate.
    """
    fixed, slope = _line(times.mean, room)
    arriving, first, more = demand.rows_per_second, fixed, slope
    if demand.devices > 1:
        # What arrives for other devices waits in the same queue. A device would find all of it if the devices started
        # evenly spaced, which they do not. If full batches keep up anyway, shedding for this costs more than it gains.
        first, more = _line(times.upper, room)
        if arriving * times.mean(room) > room:
            arriving *= demand.devices**_SHARED
    # The arrivals while the first request can wait for a batch of them: n = arriving · (deadline - time of n).
    steady = arriving * (demand.typical_deadline - first) / (1 + arriving * more)
    size = min(max(round(steady), 1), room)
    return min(demand.rows_per_second, size / max(fixed + slope * size, 1e-9))


def _line(seconds: Callable[[int], float], room: int) -> tuple[float, float]:
    """Return the fixed part and the seconds per row of the line from one row to `room` rows."""
    alone, full = seconds(1), seconds(room)
    slope = max((full - alone) / max(room - 1, 1), 1e-12)
    return max(alone - slope, 0.0), slope
