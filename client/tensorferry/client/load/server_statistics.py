"""The server's side of a measurement: differences of its ModelStatistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tensorferry.client import errors
from tensorferry.protos import inference_pb2 as pb

# Totals of a model since the server started, over its versions: counts and nanoseconds by name,
# and batches by their number of rows.
Totals = Counter[str | int]


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


def totals_of(answer: pb.ModelStatisticsResponse) -> Totals:
    """Add up the versions of a model."""
    totals = Totals()
    for one in answer.model_stats:
        stats = one.inference_stats
        totals.update(
            answered=stats.success.count,
            failed=stats.fail.count,
            queue_count=stats.queue.count,
            queue_ns=stats.queue.ns,
            compute_count=stats.compute_infer.count,
            compute_ns=stats.compute_input.ns + stats.compute_infer.ns + stats.compute_output.ns,
            rows=one.inference_count,
            batches=one.execution_count,
        )
        for batch in one.batch_stats:
            totals[batch.batch_size] += batch.compute_infer.count
    return totals


def difference(before: Totals | None, after: Totals | None) -> ServerSide | None:
    """Return what happened between two totals; None if one is missing, or if the server restarted between."""
    if before is None or after is None:
        return None
    grown = Totals(after)
    grown.subtract(before)
    if grown["answered"] < 0 or grown["batches"] < 0:
        return None

    def mean(total: str, count: str, unit: float = 1.0) -> float | None:
        return grown[total] / grown[count] / unit if grown[count] else None

    return ServerSide(
        grown["answered"],
        grown["failed"],
        mean("queue_ns", "queue_count", 1e9),
        mean("compute_ns", "compute_count", 1e9),
        mean("rows", "batches"),
        {
            rows: grown[rows]
            for rows in sorted(key for key in grown if isinstance(key, int))
            if grown[rows] > 0
        },
    )


class StatisticsReader:
    """Reader of a model's totals. A server without statistics is asked once. Not thread-safe.

    `ask` calls ModelStatistics, and raises InferenceError.
    """

    def __init__(self, ask: Callable[[], pb.ModelStatisticsResponse]) -> None:
        self._ask = ask
        self.missing = ""
        """Why the server has no statistics; "" if it has."""

    def __call__(self) -> Totals | None:
        """Return the totals, or None."""
        if self.missing:
            return None
        try:
            answer = self._ask()
        except errors.InferenceError as failure:
            if isinstance(failure, errors.Unimplemented):
                self.missing = f"the server has no ModelStatistics ({failure})"
            elif not isinstance(failure, errors.DeadlineExceeded):
                self.missing = str(failure)
            return None
        self.missing = "" if answer.model_stats else "the answer of ModelStatistics is empty"
        return None if self.missing else totals_of(answer)
