"""ModelStatistics: the counts of a model's batcher, under Triton's names. docs/reference/metrics.md explains them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tensorferry.batcher import AnswerCache, Batcher, BatcherStatistics, Pipeline
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.models.lifecycle.failure_counts import failures_by_reason
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry, ModelState
from tensorferry.server.processes.peers import Peers

if TYPE_CHECKING:
    from tensorferry.server.observability.monitoring.merged import Statistics


class StatisticsMethods:
    """The protocol's extension `statistics`. Thread-safe. `peers` are the server's other processes."""

    names: Sequence[str] = ("statistics",)

    def __init__(self, registry: ModelRegistry, peers: Peers | None = None) -> None:
        self._registry = registry
        self._method: Statistics = self.model_statistics
        if peers is not None:
            # Imported here, because the import is slow.
            from tensorferry.server.observability.monitoring.merged import statistics_of_all

            self._method = statistics_of_all(peers, self.model_statistics)
        # The wall-clock times of batchers' last batches, with the monotonic times that batchers use. A converted time is kept
        # until the next batch, so that it stays the same when the system's clock is corrected.
        self._last_runs: WeakKeyDictionary[Batcher | Pipeline, tuple[float, int]] = WeakKeyDictionary()
        # Guards _last_runs. Only the clocks are called while it is held.
        self._lock = threading.Lock()

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the method ModelStatistics."""
        return {"ModelStatistics": self._method}

    def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Return this process's statistics of a version, of a model's ready versions, or, without a name, of all models."""
        if request.name and request.version:
            models = [self._registry.get(request.name, request.version)]
        else:
            if request.name:
                # Raises for an unknown model.
                self._registry.get(request.name)
            models = [
                entry.model
                for entry in self._registry.entries()
                if entry.model is not None
                and entry.state is ModelState.READY
                and request.name in ("", entry.name)
            ]
        return pb.ModelStatisticsResponse(model_stats=[self._statistics_of(model) for model in models])

    def _statistics_of(self, model: Model) -> pb.ModelStatistics:
        counts = model.batcher.statistics()
        return pb.ModelStatistics(
            name=model.name,
            version=model.version,
            last_inference=self._milliseconds(model.batcher, counts.last_run),
            inference_count=counts.rows,
            execution_count=counts.batches,
            inference_stats=_request_statistics(counts, model.cache),
            batch_stats=[
                pb.InferBatchStatistics(
                    batch_size=rows,
                    compute_input=_duration(times.batches, times.input_time_sum),
                    compute_infer=_duration(times.batches, times.compute_time_sum),
                    compute_output=_duration(times.batches, times.output_time_sum),
                )
                for rows, times in sorted(counts.batch_times.items())
            ],
        )

    def _milliseconds(self, batcher: Batcher | Pipeline, last_run: float | None) -> int:
        """Return `last_run`, on the clock of `time.monotonic`, as milliseconds since 1970; 0 for None."""
        if last_run is None:
            return 0
        with self._lock:
            converted = self._last_runs.get(batcher)
            if converted is None or converted[0] < last_run:
                since = time.monotonic() - last_run
                converted = self._last_runs[batcher] = last_run, int((time.time() - since) * 1e3)
            return converted[1]


def _request_statistics(counts: BatcherStatistics, cache: AnswerCache | None) -> pb.InferStatistics:
    times, answered = counts.answer_times, counts.answered
    stages = {
        "queue": _duration(answered, times.queue_delay_sum),
        "compute_input": _duration(answered, times.input_time_sum),
        "compute_infer": _duration(answered, times.compute_time_sum),
        "compute_output": _duration(answered, times.output_time_sum),
    }
    of_cache: dict[str, pb.StatisticDuration] = {}
    if cache is not None:
        found = cache.statistics()
        of_cache["cache_hit"] = _duration(found.hits, found.hit_seconds)
        of_cache["cache_miss"] = _duration(found.misses, found.miss_seconds)
    return pb.InferStatistics(
        # The sum of the stages, so that they add up to the nanosecond.
        success=pb.StatisticDuration(count=answered, ns=sum(stage.ns for stage in stages.values())),
        fail=_duration(sum(failures_by_reason(counts).values()), counts.unanswered_time_sum),
        **stages,
        **of_cache,
    )


def _duration(count: int, seconds: float) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=round(seconds * 1e9))
