"""Metric families in the form that prometheus-client encodes, and the buckets of their histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.samples import Exemplar as ShownExemplar

from tensorferry.batcher import BOUNDS, Histogram
from tensorferry.server.observability.logs.exemplars import Exemplars
from tensorferry.server.observability.monitoring.metrics.metric_names import MetricName

_KINDS: Mapping[str, Callable[..., Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_N = TypeVar("_N", bound=MetricName)


def empty_families(group: type[_N], labels: tuple[str, ...]) -> dict[_N, Any]:
    """Return an empty family for each metric of a group. The type is Any, because `add_metric` differs."""
    return {
        metric: _KINDS[metric.type](metric.family, metric.meaning, labels=(*labels, *metric.labels))
        for metric in group
    }


def time_buckets(times: Histogram, exemplars: Exemplars | None = None) -> Sequence[Sequence[Any]]:
    """Return cumulative counts for each bound, with an exemplar of the interval if there is one."""
    latest = exemplars.latest() if exemplars is not None else (None,) * len(times.counts)
    made: list[Sequence[Any]] = []
    count = 0
    for bound, more, exemplar in zip((*BOUNDS, math.inf), times.counts, latest, strict=True):
        count += more
        written = exemplar and ShownExemplar({"trace_id": exemplar.trace_id}, exemplar.seconds, exemplar.at)
        made.append((_le(bound), count, written))
    return made


def row_buckets(batch_rows: Mapping[int, int], max_rows: int) -> Sequence[tuple[str, float]]:
    """Return cumulative counts of batches by rows, for powers of two up to `max_rows`."""
    return [
        (_le(bound), sum(batches for rows, batches in batch_rows.items() if rows <= bound))
        for bound in _row_bounds(max(1, max_rows))
    ] + [("+Inf", sum(batch_rows.values()))]


def _le(bound: float) -> str:
    """Return a bound as OpenMetrics writes it, in both formats, because it is part of the series' name."""
    return "+Inf" if math.isinf(bound) else str(float(bound))


def _row_bounds(max_rows: int) -> Iterator[int]:
    bound = 1
    while bound < max_rows:
        yield bound
        bound *= 2
    yield max_rows
