"""ModelStatistics: what a model's batcher has counted, in Triton's words. docs/reference/metrics.md says what each means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tensorferry.batcher import Batcher, BatcherStatistics
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.models.failure_counts import failures_by_reason
from tensorferry.server.models.registry import Model, ModelRegistry, ModelState


class StatisticsMethods:
    """The method ModelStatistics over a registry. Thread-safe."""

    names: Sequence[str] = ("statistics",)

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        self._wall_times = _WallTimes()

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """ModelStatistics."""
        return {"ModelStatistics": self.model_statistics}

    def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Of a version, of all versions of a model that are ready, or, without a name, of all models."""
        if request.name and request.version:
            models = [self._registry.get(request.name, request.version)]
        else:
            if request.name:
                # Raises where there is none.
                self._registry.get(request.name)
            models = [
                entry.model
                for entry in self._registry.entries()
                if entry.model is not None
                and entry.state is ModelState.READY
                and request.name in ("", entry.name)
            ]
        return pb.ModelStatisticsResponse(model_stats=[self._of(model) for model in models])

    def _of(self, model: Model) -> pb.ModelStatistics:
        counts = model.batcher.statistics()
        return pb.ModelStatistics(
            name=model.name,
            version=model.version,
            last_inference=self._wall_times.milliseconds(model.batcher, counts.last_run),
            inference_count=counts.rows,
            execution_count=counts.batches,
            inference_stats=_of_requests(counts),
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


def _of_requests(counts: BatcherStatistics) -> pb.InferStatistics:
    times, answered = counts.answer_times, counts.answered
    stages = {
        "queue": _duration(answered, times.queue_delay_sum),
        "compute_input": _duration(answered, times.input_time_sum),
        "compute_infer": _duration(answered, times.compute_time_sum),
        "compute_output": _duration(answered, times.output_time_sum),
    }
    return pb.InferStatistics(
        # So that the stages add up to it, to the nanosecond.
        success=pb.StatisticDuration(count=answered, ns=sum(stage.ns for stage in stages.values())),
        fail=_duration(sum(failures_by_reason(counts).values()), counts.unanswered_time_sum),
        **stages,
    )


def _duration(count: int, seconds: float) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=round(seconds * 1e9))


class _WallTimes:
    """What o'clock it was when a batcher last ran a batch. Thread-safe.

    Batchers live by monotonic time. An answer is remembered, so that it stays the same until the next
    batch, however the system's clock is corrected meanwhile.
    """

    def __init__(self) -> None:
        # Guards _known; the clocks are read while it is held, nothing else is called.
        self._lock = threading.Lock()
        self._known: WeakKeyDictionary[Batcher, tuple[float, int]] = WeakKeyDictionary()

    def milliseconds(self, batcher: Batcher, last_run: float | None) -> int:
        """Since 1970; 0 when it never ran one. `last_run` is on the clock of `time.monotonic`."""
        if last_run is None:
            return 0
        with self._lock:
            known = self._known.get(batcher)
            if known is None or known[0] < last_run:
                since = time.monotonic() - last_run
                known = self._known[batcher] = last_run, int((time.time() - since) * 1e3)
            return known[1]
