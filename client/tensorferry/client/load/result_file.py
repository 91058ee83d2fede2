"""The file of `--json`: results of a load test in a stable form, written and read.

docs/guides/load_testing.md describes the fields. New versions may add fields without another
`schema`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from tensorferry.client.load.histogram import GROWTH, LEAST_SECONDS, Histogram
from tensorferry.client.load.results import PERCENTILES, ErrorCount, Interval, StepResult
from tensorferry.client.load.server_statistics import ServerSide
from tensorferry.client.load.steps import Step

SCHEMA = 1

Document = dict[str, Any]
_T = TypeVar("_T")

_FIGURES = ("seconds", "answered", "failed", "rows", "requests_per_second", "rows_per_second")


class BadResults(ValueError):
    """A file that has no results of this schema."""


def document(about: Mapping[str, Any], steps: Sequence[StepResult]) -> Document:
    """Return the contents of the file; `about` describes the test."""
    return {"schema": SCHEMA, **about, "steps": [_step(step) for step in steps]}


def write(path: Path, contents: Document) -> None:
    """Write the file; raise OSError if that fails."""
    path.write_text(json.dumps(contents, indent=1) + "\n")


def write_csv(path: Path, contents: Document) -> None:
    """Write a line for each step: its load, its figures and its latencies in seconds. OSError if that fails."""
    columns = ["concurrency", "rate", *_FIGURES]
    latencies = ["mean", *(name for name, _ in PERCENTILES), "max"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *(f"{name}_seconds" for name in latencies)])
        for step in contents["steps"]:
            writer.writerow(
                [*(step[name] for name in columns), *(step["latency_seconds"][name] for name in latencies)]
            )


def read(path: Path) -> Document:
    """Read a file; raise OSError, or BadResults for another file than one of `--json`."""
    try:
        contents = json.loads(path.read_text())
        if contents["schema"] != SCHEMA:
            raise BadResults(f"{path} has schema {contents['schema']!r}; this version reads schema {SCHEMA}")
        steps_of(contents)
    except BadResults:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise BadResults(f"{path} is no file that tensorferry bench --json wrote") from None
    return dict(contents)


def steps_of(contents: Document) -> list[StepResult]:
    """Return the steps of a file."""
    return [_read_step(step) for step in contents["steps"]]


def _step(result: StepResult) -> Document:
    latencies = result.latencies
    return {
        "concurrency": result.step.concurrency,
        "rate": result.step.rate,
        **{name: getattr(result, name) for name in _FIGURES},
        "latency_seconds": {
            "mean": latencies.mean,
            **{name: latencies.percentile(share) for name, share in PERCENTILES},
            "max": latencies.most if result.answered else None,
        },
        "histogram": _histogram(latencies),
        "errors": [asdict(error) for error in result.errors],
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


def _read_step(fields: Document) -> StepResult:
    client, server = fields["client"], fields["server"]
    if server is not None:
        by_rows = {int(rows): number for rows, number in server["batches_by_rows"].items()}
        server = _record(ServerSide, {**server, "batches_by_rows": by_rows})
    return StepResult(
        Step(fields["concurrency"], fields["rate"]),
        float(fields["seconds"]),
        _read_histogram(fields["histogram"]),
        int(fields["rows"]),
        tuple(_record(ErrorCount, error) for error in fields["errors"]),
        _read_histogram(client["lag_histogram"]),
        tuple(client["cores_by_process"]),
        tuple(client["waited_by_process"]),
        tuple(_record(Interval, interval) for interval in fields["intervals"]),
        server,
    )


def _record(kind: type[_T], values: Document) -> _T:
    """Return a record with its fields of a file, which may have others from a newer version."""
    return kind(**{name: values[name] for name in kind.__annotations__})


def _read_histogram(fields: Document) -> Histogram:
    if (fields["first_bound_seconds"], fields["growth"]) != (LEAST_SECONDS, GROWTH):
        raise BadResults("the histograms of the file have other buckets than this version's")
    counts = {int(bucket): count for bucket, count in fields["counts"].items()}
    least = math.inf if fields["min_seconds"] is None else fields["min_seconds"]
    return Histogram.of(counts, fields["total_seconds"], least, fields["max_seconds"])
