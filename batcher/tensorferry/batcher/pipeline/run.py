"""One request on its way through a pipeline's stages."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorferry.batcher.batcher import Batcher
from tensorferry.batcher.errors import BatcherClosed, BatcherError, DeadlineExceeded, ModelOutputError
from tensorferry.batcher.execution.deferred_wakeups import deferred_wakeups
from tensorferry.batcher.pipeline.graph import Graph
from tensorferry.batcher.pipeline.tensors import RequestMaker, array_of
from tensorferry.batcher.request import Array, BatchInfo, Outcome, Request, StageOutcome

if TYPE_CHECKING:
    from tensorferry.batcher.pipeline.pipeline import Pipeline

_log = logging.getLogger("tensorferry.batcher")

_new = tuple.__new__

# A stage that can start, and the values of its inputs.
_Ready = tuple[int, Sequence[Any]]


class PipelineRun:
    """A request's tensors, and its parts in the stages' batchers. Thread-safe.

    The thread that completes a part starts the stages that waited for it. The first error ends the request; the last part
    answers it.
    """

    __slots__ = (
        "_ended",
        "_entering",
        "_left",
        "_lock",
        "_outcome",
        "_outcomes",
        "_parts",
        "_pipeline",
        "_readers",
        "_started_by",
        "_tensors",
        "_waits_for",
        "accepted",
        "request",
    )

    def __init__(self, pipeline: Pipeline, graph: Graph, request: Request) -> None:
        self._pipeline = pipeline
        self.request = request
        # It is counted as accepted. Guarded by the lock of `AdmittedRuns`.
        self.accepted = False
        # Guards all fields below. No batcher and no callback is called while it is held.
        self._lock = threading.Lock()
        # The tensors that stages that have not started still read, or that are outputs; and how many stages that are.
        names = request.names or ()
        self._tensors: dict[str, Any] = dict(zip(names, request.tensors, strict=True))
        self._readers = dict(graph.readers)
        # How many stages each stage still waits for, and how many are not done; which stage started each; their outcomes.
        self._waits_for = list(graph.waits_for)
        self._left = len(graph.stages)
        self._started_by: list[int | None] = [None] * len(graph.stages)
        self._outcomes: dict[int, StageOutcome] = {}
        # The parts that are in a batcher, or about to be.
        self._parts: dict[int, tuple[Batcher | Pipeline, Request]] = {}
        # Whether the first stages are being started. The outcome is held back until then.
        self._entering = True
        self._outcome: Outcome | None = None
        self._ended = False

    # The way through the stages.

    def enter(self, *, notify: bool, skip_admission: bool) -> bool:
        """Start the first stages; return whether the caller must run or wake their batchers. Raises as `enqueue` does."""
        graph = self._pipeline.graph
        with self._lock:
            ready = [self._take_locked(graph, stage) for stage in graph.first]
        must_run = False
        try:
            for stage, values in ready:
                must_run |= self._start(stage, values, notify=notify, skip_admission=skip_admission)
        except BaseException:
            self.end(None)
            raise
        with self._lock:
            self._entering = False
            outcome, self._outcome = self._outcome, None
        if outcome is not None:
            self._pipeline.end(self, outcome)
        return must_run

    def _take_locked(self, graph: Graph, stage: int) -> _Ready:
        """Return a stage with the values of its inputs; those that no other stage reads are released."""
        tensors, readers, reads = self._tensors, self._readers, graph.stages[stage].inputs.values()
        values = [tensors[tensor] for tensor in reads]
        # A tensor that is read twice has one reader.
        for tensor in set(reads) if len(values) > 1 else reads:
            readers[tensor] -= 1
            if not readers[tensor]:
                del tensors[tensor]
        return stage, values

    def _start(
        self, number: int, values: Sequence[Any], *, notify: bool | None = None, skip_admission: bool = False
    ) -> bool:
        """Enqueue a stage's part. Without `notify` its batcher is woken by this thread, once that is through."""
        pipeline, request = self._pipeline, self.request
        stage = pipeline.graph.stages[number]
        deadline, later = request.deadline, 0.0
        if deadline < math.inf:
            later = pipeline.later_times.after(request.rows, deadline - request.arrival)[number]
            deadline -= later
        must_run = False
        for last in (stage.own is not None, True):
            model = stage.model()
            batcher = model.batcher
            maker = pipeline.makers[number] or RequestMaker(stage, model)
            part = maker.make(values, partial(self._completed, number), request, deadline)
            with self._lock:
                if self._ended:
                    return False
                self._parts[number] = batcher, part
            try:
                if notify is None:
                    deferred_wakeups.enqueue(batcher, part, skip_admission=stage.own is not None)
                elif stage.own is not None:
                    must_run = batcher.enqueue(part, notify=notify, skip_admission=skip_admission)
                else:
                    batcher.enqueue(part)
                break
            except BatcherError as error:
                with self._lock:
                    self._parts.pop(number, None)
                if isinstance(error, BatcherClosed) and not last:
                    # Perhaps the model was replaced between the look-up and now.
                    continue
                if isinstance(error, DeadlineExceeded) and later:
                    raise DeadlineExceeded(
                        f"{error} (in stage {stage.name!r}, after which {later * 1e3:.1f} ms are needed at least)"
                    ) from None
                raise
        if self._ended:
            # It ended after the check above, perhaps before the batcher had the part.
            batcher.cancel(part)
        return must_run

    def _completed(self, number: int, outcome: Outcome) -> None:
        """Take the outcome of a stage's part; start the next stages, or end the request."""
        pipeline, error, batch = self._pipeline, outcome.error, outcome.batch
        graph = pipeline.graph
        values: Sequence[Any] | None = None
        outputs: Mapping[str, Array] | None = None
        try:
            new = () if error is not None else _outputs_needed_later(graph, number, outcome.outputs)
        except ModelOutputError as failure:
            error, new = failure, ()
        ready: Sequence[_Ready] = ()
        with self._lock:
            if self._ended:
                return
            _, part = self._parts.pop(number)
            arrival = (part.split_parts[0] if part.split_parts else part).arrival
            name = graph.stages[number].name
            # `StageOutcome(...)` takes twice as long.
            self._outcomes[number] = _new(
                StageOutcome, (name, arrival, outcome.queue_delay, batch, outcome.stages)
            )
            if error is None:
                self._left -= 1
                self._tensors.update(new)
                if self._left:
                    ready = self._ready_locked(graph, number)
                else:
                    values = [self._tensors[tensor] for tensor in graph.outputs]
        if batch is not None and part.deadline < math.inf:
            timeout = self.request.deadline - self.request.arrival
            pipeline.later_times.waits[number].observe(batch, outcome.queue_delay, timeout)
        try:
            for stage, inputs in ready:
                self._start(stage, inputs)
            if values is not None:
                outputs = {
                    name: array_of(value, f"output {name!r} of pipeline {pipeline.name!r}")
                    for name, value in zip(graph.outputs, values, strict=True)
                }
                batch = self._batch(number, batch)
        except Exception as failure:
            _log.debug("a request of %s did not get beyond a stage", pipeline.name, exc_info=failure)
            error = failure
        if error is not None:
            if error is not outcome.error:
                # Its traceback would keep the tensors alive.
                error.__traceback__ = error.__context__ = None
            self.end(Outcome(error=error))
        elif outputs is not None:
            self.end(Outcome(outputs, None, batch, 0.0, outcome.position))

    def _ready_locked(self, graph: Graph, number: int) -> Sequence[_Ready]:
        """Return the stages that can start now that a stage is done, with the values of their inputs."""
        ready = []
        for later in graph.followers[number]:
            self._waits_for[later] -= 1
            if not self._waits_for[later]:
                self._started_by[later] = number
                ready.append(self._take_locked(graph, later))
        return ready

    # The end.

    def _batch(self, last: int, batch: BatchInfo | None) -> BatchInfo | None:
        """Return the last stage's batch, with the times of the stages that led to it. After all stages are done."""
        if batch is None or self._started_by[last] is None:
            return batch
        compute_time = input_time = 0.0
        # From the last stage back: each was started by the one that it waited for longest.
        stage: int | None = last
        while stage is not None:
            if (ran := self._outcomes[stage].batch) is not None:
                compute_time += ran.compute_time
                input_time += ran.input_time
            stage = self._started_by[stage]
        return batch._replace(compute_time=compute_time, input_time=input_time)

    def end(self, outcome: Outcome | None) -> bool:
        """End the request with this outcome, or, without one, as rejected, and withdraw its parts.

        Return whether it had not ended before.
        """
        with self._lock:
            if self._ended:
                return False
            self._ended = True
            parts: Sequence[tuple[Batcher | Pipeline, Request]] = ()
            if self._parts:
                parts = list(self._parts.values())
                self._parts.clear()
            self._tensors.clear()
            if self._entering:
                self._outcome, outcome = outcome, None
        for batcher, part in parts:
            batcher.cancel(part)
        if outcome is not None:
            self._pipeline.end(self, outcome)
        return True

    @property
    def stages(self) -> tuple[StageOutcome, ...]:
        """Return what became of the request in each stage that is done with it. After its end."""
        return tuple(self._outcomes.values())

    @property
    def runs_in_other_models_only(self) -> bool:
        """Whether no part of it is in a batcher of the pipeline's own."""
        with self._lock:
            stages = self._pipeline.graph.stages
            return not any(stages[number].own is not None for number in self._parts)


def _outputs_needed_later(graph: Graph, number: int, outputs: Any) -> Sequence[tuple[str, Any]]:
    """Return those of a stage's outputs that are needed later, with the names of their tensors."""
    if type(outputs) is not dict and not isinstance(outputs, Mapping):
        raise ModelOutputError(_wrong_outputs(graph, number, type(outputs).__name__))
    try:
        return [(tensor, outputs[output]) for output, tensor in graph.needed_later[number]]
    except KeyError:
        raise ModelOutputError(_wrong_outputs(graph, number, list(outputs))) from None


def _wrong_outputs(graph: Graph, number: int, found: object) -> str:
    stage = graph.stages[number]
    return f"stage {stage.name!r} returned {found}; it is declared to return {list(stage.outputs)}, by name"
