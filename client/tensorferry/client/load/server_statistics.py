"""The server's side of a measurement: differences of its ModelStatistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tensorferry.client import errors
from tensorferry.client.messages.statistics import ModelStatistics

# Totals of a model since the server started, over its versions: counts and seconds by name, and batches by their number
# of rows.
Totals = dict[str | int, float]


@dataclass(frozen=True, slots=True)
class ServerSide:
    """What the server did in a measurement: means in seconds per request, and batches.

    Requests of other clients are included. None stands for no request, or no batch.
    """

    answered: int
    failed: int
    queue_seconds: float | None
    compute_seconds: float | None
    mean_batch_rows: float | None
    batches_by_rows: Mapping[int, int]


def totals_of(models: Sequence[ModelStatistics]) -> Totals:
    """Add up the versions of a model."""
    totals: Totals = defaultdict(float)
    for one in models:
        figures: Totals = {
            "answered": one.success.count,
            "failed": one.failure.count,
            "queue_count": one.queue.count,
            "queue_seconds": one.queue.seconds,
            "compute_count": one.compute_infer.count,
            "compute_seconds": one.compute_input.seconds
            + one.compute_infer.seconds
            + one.compute_output.seconds,
            "rows": one.rows,
            "batches": one.executions,
            **{batch.rows: batch.compute_infer.count for batch in one.batches},
        }
        for name, figure in figures.items():
            totals[name] += figure
    return totals


def difference(before: Totals | None, after: Totals | None) -> ServerSide | None:
    """Return what happened between two totals; None if one is missing, or if the server restarted between."""
    if before is None or after is None:
        return None
    grown = {name: figure - before.get(name, 0) for name, figure in after.items()}
    if grown["answered"] < 0 or grown["batches"] < 0:
        return None

    def mean(total: str, count: str) -> float | None:
        return grown[total] / grown[count] if grown[count] else None

    by_rows = {name: count for name, count in grown.items() if isinstance(name, int)}
    return ServerSide(
        int(grown["answered"]),
        int(grown["failed"]),
        mean("queue_seconds", "queue_count"),
        mean("compute_seconds", "compute_count"),
        mean("rows", "batches"),
        {rows: int(count) for rows, count in sorted(by_rows.items()) if count > 0},
    )


class StatisticsReader:
    """Reader of a model's totals. A server without statistics is asked once. Not thread-safe.

    `ask` calls ModelStatistics, and raises InferenceError.
    """

    def __init__(self, ask: Callable[[], Sequence[ModelStatistics]]) -> None:
        self._ask = ask
        self.missing = ""
        """Why the server has no statistics; "" if it has."""

    def __call__(self) -> Totals | None:
        """Return the totals, or None."""
        if self.missing:
            return None
        try:
            models = self._ask()
        except errors.InferenceError as failure:
            if isinstance(failure, errors.Unimplemented):
                self.missing = f"the server has no ModelStatistics ({failure})"
            elif not isinstance(failure, errors.DeadlineExceeded):
                self.missing = str(failure)
            return None
        self.missing = "" if models else "the answer of ModelStatistics is empty"
        return None if self.missing else totals_of(models)
