"""Account of a server's run, from its own statistics and its threads' processor time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu.cores import cpu_seconds, thread_seconds

_STATISTICS = "/inference.GRPCInferenceService/ModelStatistics"
_SECONDS = 20
_BUSIEST = 3


@dataclass(frozen=True, slots=True)
class Stages:
    """Batches of one size, and their total seconds: joined, run, split and answered."""

    batches: int
    before: float
    device: float
    after: float

    def __sub__(self, other: Stages) -> Stages:
        return Stages(
            self.batches - other.batches,
            self.before - other.before,
            self.device - other.device,
            self.after - other.after,
        )


_NOTHING = Stages(0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a server's counters at one time."""

    at: float
    stages: Mapping[int, Stages]
    answered: int
    cpu: float
    threads: Mapping[int, float]

    @classmethod
    def of(cls, address: str, model: str, pid: int) -> Snapshot:
        """Read the server's statistics, and its threads' times from the system."""
        import grpc

        from tensorferry.protos import inference_pb2 as pb

        with grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            ask: Any = channel.unary_unary(_STATISTICS)
            said = ask(pb.ModelStatisticsRequest(name=model).SerializeToString(), timeout=_SECONDS)
        (statistics,) = pb.ModelStatisticsResponse.FromString(said).model_stats
        return cls(
            time.monotonic(),
            {size.batch_size: _stages(size) for size in statistics.batch_stats},
            statistics.inference_stats.success.count,
            cpu_seconds(pid),
            thread_seconds(pid),
        )


def _stages(size: Any) -> Stages:
    parts = (size.compute_input.ns, size.compute_infer.ns, size.compute_output.ns)
    return Stages(size.compute_infer.count, *(ns / 1e9 for ns in parts))


@dataclass(frozen=True, slots=True)
class Account:
    """Difference of two snapshots: where the time of the device and of the server's cores went.

    `busy` is the share of the time in which a batch was running. `run`, `before` and `after` are
    mean seconds of a batch of `rows` on average. `cpu` is processor seconds per request, `cores`
    the number of cores used, and `threads` those of the busiest threads.
    """

    rows: float
    busy: float
    run: float
    before: float
    after: float
    cpu: float
    cores: float
    threads: tuple[float, ...]

    @classmethod
    def between(cls, first: Snapshot, second: Snapshot) -> Account:
        """Compare two snapshots; raise ValueError if the server answered nothing in between."""
        sizes = sizes_between(first, second)
        answered, seconds = second.answered - first.answered, second.at - first.at
        batches = sum(stages.batches for stages in sizes.values())
        if not answered or not batches:
            raise ValueError("the server answered nothing")
        run = sum(stages.device for stages in sizes.values())
        cpu = second.cpu - first.cpu
        threads = sorted(
            (used - first.threads.get(thread, 0.0) for thread, used in second.threads.items()), reverse=True
        )
        return cls(
            rows=sum(rows * stages.batches for rows, stages in sizes.items()) / batches,
            busy=run / seconds,
            run=run / batches,
            before=sum(stages.before for stages in sizes.values()) / batches,
            after=sum(stages.after for stages in sizes.values()) / batches,
            cpu=cpu / answered,
            cores=cpu / seconds,
            threads=tuple(used / seconds for used in threads[:_BUSIEST]),
        )


def sizes_between(first: Snapshot, second: Snapshot) -> dict[int, Stages]:
    """Return the batches that ran between the two, by their rows."""
    found = {rows: stages - first.stages.get(rows, _NOTHING) for rows, stages in second.stages.items()}
    return {rows: stages for rows, stages in found.items() if stages.batches}
