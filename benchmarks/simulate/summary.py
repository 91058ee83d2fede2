"""Summary figures of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

from engine import Run
from traces import Trace


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares of all requests; answers a second in time, and until the last arrival in all; latencies in seconds.

    `idle` is the lost share of the devices' time, and `early` the time that a prepared batch waited
    for its device; both are of the whole run. `classes` has a summary of each class.
    """

    in_time: float
    goodput: float
    mean: float = math.nan
    p50: float = math.nan
    p99: float = math.nan
    mean_batch: float = math.nan
    late: float = math.nan
    dropped: float = math.nan
    time_to_drop: float = math.nan
    throughput: float = math.nan
    idle: float = math.nan
    early: float = math.nan
    classes: tuple[Summary, ...] = ()

    @classmethod
    def average(cls, summaries: Sequence[Summary]) -> Summary:
        """Return the mean of each number."""
        names = [field.name for field in fields(cls) if field.name != "classes"]
        means = {name: statistics.mean(getattr(one, name) for one in summaries) for name in names}
        classes = zip(*(one.classes for one in summaries), strict=True)
        return cls(**means, classes=tuple(cls.average(same) for same in classes))


def summarize(trace: Trace, run: Run) -> Summary:
    """Summarise a run: dropped requests are misses, answers after the deadline are late."""
    levels = sorted(set(trace.levels)) if trace.levels else []
    classes = tuple(
        _summarize(trace, run, [index for index, level in enumerate(trace.levels) if level == wanted])
        for wanted in levels
    )
    return _summarize(trace, run, range(len(trace.arrivals)), classes)


def _summarize(trace: Trace, run: Run, indices: Sequence[int], classes: tuple[Summary, ...] = ()) -> Summary:
    count = len(indices)
    answers = [index for index in indices if run.answered[index] == run.answered[index]]
    latencies = sorted(run.answered[index] - trace.arrivals[index] for index in answers)
    in_time = sum(run.answered[index] <= trace.deadlines[index] for index in answers)
    waits = [
        run.dropped[index] - trace.arrivals[index]
        for index in indices
        if run.dropped[index] == run.dropped[index]
    ]
    last = trace.arrivals[-1]
    return Summary(
        in_time=in_time / count,
        goodput=in_time / trace.duration,
        mean=_mean(latencies),
        p50=_quantile(latencies, 0.5),
        p99=_quantile(latencies, 0.99),
        mean_batch=_mean(run.batches),
        late=(len(latencies) - in_time) / count,
        dropped=len(waits) / count,
        time_to_drop=_mean(waits),
        throughput=sum(run.answered[index] <= last for index in answers) / trace.duration,
        idle=run.idle / (run.idle + run.busy) if run.busy else math.nan,
        early=run.early,
        classes=classes,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan
