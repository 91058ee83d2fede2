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

    sums: Counter[str] = field(default_factory=Counter)
    batches_by_rows: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, answer: pb.ModelStatisticsResponse) -> ServerTotals:
        """Add up the versions of a model."""
        totals = cls()
        for one in answer.model_stats:
            stats = one.inference_stats
            compute = (stats.compute_input.ns, stats.compute_infer.ns, stats.compute_output.ns)
            totals.sums.update(
                answered=stats.success.count,
                failed=stats.fail.count,
                queue_count=stats.queue.count,
                queue_ns=stats.queue.ns,
                compute_count=stats.compute_infer.count,
                compute_ns=sum(compute),
                rows=one.inference_count,
                batches=one.execution_count,
            )
            for batch in one.batch_stats:
                totals.batches_by_rows[batch.batch_size] += batch.compute_infer.count
        return totals


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
    if before is None or after is None:
        return None
    sums = Counter(after.sums)
    sums.subtract(before.sums)
    if sums["answered"] < 0 or sums["batches"] < 0:
        return None
    return ServerSide(
        sums["answered"],
        sums["failed"],
        sums["queue_ns"] / sums["queue_count"] / 1e9 if sums["queue_count"] else None,
        sums["compute_ns"] / sums["compute_count"] / 1e9 if sums["compute_count"] else None,
        sums["rows"] / sums["batches"] if sums["batches"] else None,
        dict(sorted((after.batches_by_rows - before.batches_by_rows).items())),
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
        self.missing = "" if answer.model_stats else "the answer of ModelStatistics is empty"
        return None if self.missing else ServerTotals.of(answer)
