"""The server's side of a measurement: differences of its ModelStatistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc

from tensorferry.client import errors
from tensorferry.client.connection.channel import CallMetadata
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ServerTotals:
    """Totals of a model since the server started, over its versions: counts, and nanoseconds."""

    answered: int = 0
    failed: int = 0
    queue_count: int = 0
    queue_ns: int = 0
    compute_count: int = 0
    compute_ns: int = 0
    rows: int = 0
    batches: int = 0
    batches_by_rows: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: pb.ModelStatisticsResponse) -> ServerTotals:
        """Add up the versions of a model."""
        by_rows: Counter[int] = Counter()
        sums: Counter[str] = Counter()
        for one in answer.model_stats:
            stats = one.inference_stats
            sums["answered"] += stats.success.count
            sums["failed"] += stats.fail.count
            sums["queue_count"] += stats.queue.count
            sums["queue_ns"] += stats.queue.ns
            sums["compute_count"] += stats.compute_infer.count
            sums["compute_ns"] += stats.compute_input.ns + stats.compute_infer.ns + stats.compute_output.ns
            sums["rows"] += one.inference_count
            sums["batches"] += one.execution_count
            for batch in one.batch_stats:
                by_rows[batch.batch_size] += batch.compute_infer.count
        return cls(**sums, batches_by_rows=dict(by_rows))


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


def difference(before: ServerTotals | None, after: ServerTotals | None) -> ServerSide | None:
    """Return what happened between two totals; None if one is missing, or if the server restarted between."""
    if before is None or after is None or after.answered < before.answered or after.batches < before.batches:
        return None
    queued, computed = after.queue_count - before.queue_count, after.compute_count - before.compute_count
    batches = after.batches - before.batches
    by_rows = {
        rows: number - before.batches_by_rows.get(rows, 0) for rows, number in after.batches_by_rows.items()
    }
    return ServerSide(
        after.answered - before.answered,
        after.failed - before.failed,
        (after.queue_ns - before.queue_ns) / queued / 1e9 if queued else None,
        (after.compute_ns - before.compute_ns) / computed / 1e9 if computed else None,
        (after.rows - before.rows) / batches if batches else None,
        {rows: number for rows, number in sorted(by_rows.items()) if number > 0},
    )


class StatisticsReader:
    """Reader of a model's totals. A server without statistics is asked once. Not thread-safe."""

    def __init__(
        self,
        stub: inference_pb2_grpc.GRPCInferenceServiceStub,
        model: str,
        version: str,
        metadata: CallMetadata,
    ) -> None:
        self._stub, self._metadata = stub, metadata
        self._request = pb.ModelStatisticsRequest(name=model, version=version)
        self.missing = ""
        """Why the server has no statistics; "" if it has."""

    def __call__(self) -> ServerTotals | None:
        """Return the totals, or None."""
        if self.missing:
            return None
        try:
            answer = self._stub.ModelStatistics(self._request, timeout=_SECONDS, metadata=self._metadata)
        except grpc.RpcError as error:
            failure = errors.from_rpc(error)
            if isinstance(failure, errors.Unimplemented):
                self.missing = f"the server has no ModelStatistics ({failure})"
            elif not isinstance(failure, errors.DeadlineExceeded):
                self.missing = str(failure)
            return None
        if not answer.model_stats:
            self.missing = "the answer of ModelStatistics is empty"
            return None
        return ServerTotals.of(answer)
