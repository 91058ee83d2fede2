"""Files of results: JSON, which can be read again, a CSV table, and an HTML report; and comparisons.

A document is the object of `--json`, with a dict for each step. docs/guides/load_testing.md describes
the fields. New versions may add fields without another `schema`.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tensorferry.client.load.histogram import GROWTH, LEAST_SECONDS, Histogram
from tensorferry.client.load.results import StepResult
from tensorferry.client.load.steps import BadOption, Step

SCHEMA = 1
# Names and shares of the percentiles.
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}

Document = dict[str, Any]

_FIGURES = ("seconds", "answered", "failed", "arrived", "rows", "requests_per_second", "rows_per_second")


def document(about: Mapping[str, Any], results: Sequence[StepResult]) -> Document:
    """Return the document of a test, which `about` describes."""
    return {"schema": SCHEMA, **about, "steps": [_step(result) for result in results]}


def _step(result: StepResult) -> Document:
    latencies = result.latencies
    return {
        "concurrency": result.step.concurrency,
        "rate": result.step.rate,
        **{name: getattr(result, name) for name in _FIGURES},
        "latency_seconds": {
            "mean": latencies.mean,
            **{name: latencies.percentile(share) for name, share in PERCENTILES.items()},
            "max": latencies.most if result.answered else None,
        },
        "histogram": _histogram(latencies),
        "errors": [
            {"code": code, "count": count, "message": message}
            for code, (count, message) in sorted(result.errors.items(), key=lambda error: -error[1][0])
        ],
        "server": None if result.server is None else asdict(result.server),
        "client": {
            "cores_by_process": result.cpu,
            "waited_by_process": result.waited,
            "seconds_per_call": result.own_seconds,
            "lag_p99_seconds": result.lags.percentile(0.99),
            "lag_histogram": _histogram(result.lags),
        },
        "intervals": [asdict(one) for one in result.intervals],
        "warnings": result.warnings,
    }


def _histogram(histogram: Histogram) -> Document:
    return {
        "first_bound_seconds": LEAST_SECONDS,
        "growth": GROWTH,
        "total_seconds": histogram.total,
        "min_seconds": histogram.least if math.isfinite(histogram.least) else None,
        "max_seconds": histogram.most,
        "counts": histogram.sparse(),
    }


def label_of(step: Document) -> str:
    """Return the load of a step in words."""
    return Step(step["concurrency"], step["rate"]).label


def read(path: Path) -> Document:
    """Read a file of `write`; raise OSError, or BadOption for another file."""
    try:
        contents: Document = json.loads(path.read_text())
        schema = contents["schema"]
        if schema == SCHEMA:
            # Reads all figures of a comparison.
            compare(contents, contents)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise BadOption(f"{path} is no file that tensorferry bench --json wrote") from None
    if schema != SCHEMA:
        raise BadOption(f"{path} has schema {schema!r}; this version reads schema {SCHEMA}")
    return contents


def write(path: Path, contents: Document) -> None:
    """Write a document; raise OSError if that fails."""
    path.write_text(json.dumps(contents, indent=1) + "\n")


def write_csv(path: Path, contents: Document) -> None:
    """Write a line for each step: its load, its figures and its latencies in seconds. OSError if that fails."""
    columns, latencies = ("concurrency", "rate", *_FIGURES), ("mean", *PERCENTILES, "max")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *(f"{name}_seconds" for name in latencies)])
        for step in contents["steps"]:
            figures = (step[name] for name in columns)
            writer.writerow([*figures, *(step["latency_seconds"][name] for name in latencies)])


def write_report(path: Path, contents: Document, other: Document | None = None, other_name: str = "") -> None:
    """Write a page with the results of one test, and what differs from another; raise OSError if that fails.

    It needs no network.
    """
    differences = [] if other is None else [asdict(one) for one in compare(contents, other)]
    data = {"results": contents, "other": other, "other_name": other_name, "differences": differences}
    # No text of a server can end the script: "<" is escaped.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    path.write_text(template.replace("__RESULTS__", text), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of one step in two tests. `unit` is "/s", "s", "rows", or "" for a number.

    `change` is relative, 0.1 for 10 % more than the other; None if the other is 0. `within_spread`
    is None if the figure has no intervals, or too few.
    """

    step: str
    figure: str
    unit: str
    other: float
    this: float
    change: float | None
    within_spread: bool | None


def _rate_of(interval: Document) -> float:
    return float(interval["answered"] / interval["seconds"])


def _of_server(name: str) -> Callable[[Document], float | None]:
    return lambda step: step["server"] and step["server"][name]


# Name and unit of a figure, its value in a step, and its value in an interval, if it has one there.
_Value = Callable[[Document], float | None]
_COMPARED: tuple[tuple[str, str, _Value, _Value | None], ...] = (
    ("requests per second", "/s", lambda step: step["requests_per_second"], _rate_of),
    ("p50", "s", lambda step: step["latency_seconds"]["p50"], lambda one: one["p50_seconds"]),
    ("p95", "s", lambda step: step["latency_seconds"]["p95"], None),
    ("p99", "s", lambda step: step["latency_seconds"]["p99"], lambda one: one["p99_seconds"]),
    ("failed", "", lambda step: step["failed"], None),
    ("queue", "s", _of_server("queue_seconds"), None),
    ("compute", "s", _of_server("compute_seconds"), None),
    ("batch", "rows", _of_server("mean_batch_rows"), None),
)


def compare(this: Document, other: Document) -> list[Difference]:
    """Return the differences of all figures that both tests have, for the steps that both have."""
    found = []
    others = {(step["concurrency"], step["rate"]): step for step in other["steps"]}
    for step in this["steps"]:
        before = others.get((step["concurrency"], step["rate"]))
        if before is None:
            continue
        for figure, unit, value, in_interval in _COMPARED:
            new, old = value(step), value(before)
            if new is None or old is None or (new == old == 0):
                continue
            noise = _spread(step, before, in_interval) if in_interval else None
            within = None if noise is None else abs(new - old) <= noise
            change = new / old - 1 if old else None
            found.append(Difference(label_of(step), figure, unit, old, new, change, within))
    return found


def _spread(this: Document, other: Document, value: _Value) -> float | None:
    """Return the spread of a figure between the intervals of two tests; None with less than two in one.

    It is the standard deviation of a difference between one interval of each.
    """
    variances = []
    for step in (this, other):
        values = [found for one in step["intervals"] if (found := value(one)) is not None]
        if len(values) < 2:
            return None
        variances.append(statistics.variance(values))
    return math.sqrt(sum(variances))
