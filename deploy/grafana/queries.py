"""Prometheus queries of the panels, with the legends of their curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SERVER = 'job=~"$job",instance=~"$instance"'
MODEL = f'{SERVER},model=~"$model"'


@dataclass(frozen=True, slots=True)
class Query:
    """A Prometheus query, and the legend of its curves."""

    expr: str
    legend: str = ""


def rate(name: str, *matchers: str, by: str = "", scope: str = MODEL) -> str:
    """Sum, by these labels, of a counter's growth per second."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({name}{{{','.join((scope, *matchers))}}}[$__rate_interval]))"


def largest(expr: str) -> str:
    """Largest value among the processes of a server, which all report it."""
    return f"max without (process) ({expr})"


def curves(expr: str, by: str, what: str = "") -> Query:
    """Query of an expression with these labels. The legend has their values, and words if there are several queries."""
    labels = [f"{{{{{label}}}}}" for label in by.split(", ")]
    return Query(expr, " ".join([*labels, what]).rstrip())


def rates(name: str, *matchers: str, by: str = "model", scope: str = MODEL, what: str = "") -> Query:
    """A counter's growth per second."""
    return curves(rate(name, *matchers, by=by, scope=scope), by, what)


def increases(name: str, by: str, scope: str = MODEL) -> Query:
    """A counter's growth in an interval."""
    return curves(f"sum by ({by}) (increase({name}{{{scope}}}[$__rate_interval]))", by)


def totals(name: str, by: str = "model", scope: str = MODEL, what: str = "") -> Query:
    """A gauge."""
    return curves(f"sum by ({by}) ({name}{{{scope}}})", by, what)


def means(total: str, count: str, *matchers: str, by: str = "model", what: str = "") -> Query:
    """Ratio of the growth of two counters. The matchers are those of the second."""
    return curves(f"{rate(total, by=by)} / {rate(count, *matchers, by=by)}", by, what)


def quantiles(name: str) -> Sequence[Query]:
    """Percentiles of a histogram of times, by model."""
    buckets = rate(f"{name}_bucket", by="model, le")
    return [
        curves(f"histogram_quantile({share}, {buckets})", "model", label)
        for share, label in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    ]
