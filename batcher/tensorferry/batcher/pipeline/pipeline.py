"""The pipeline: takes requests through the batchers of several stages."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tensorferry.batcher.batcher import Batcher
from tensorferry.batcher.clock import Clock, MonotonicClock
from tensorferry.batcher.errors import (
    BatcherClosed,
    BatcherError,
    InvalidRequest,
    QueueFull,
)
from tensorferry.batcher.execution.completion import already_completed, withdrawn
from tensorferry.batcher.execution.deferred_wakeups import deferred_wakeups
from tensorferry.batcher.pipeline.admitted_runs import AdmittedRuns
from tensorferry.batcher.pipeline.graph import graph_of
from tensorferry.batcher.pipeline.later_times import LaterTimes
from tensorferry.batcher.pipeline.run import PipelineRun
from tensorferry.batcher.pipeline.stage import Stage
from tensorferry.batcher.pipeline.statistics import statistics_of
from tensorferry.batcher.pipeline.tensors import RequestMaker
from tensorferry.batcher.request import DONE, NEW, NO_BATCH, RUNNING, Outcome, Request
from tensorferry.batcher.settings import BatcherSettings, ClientPolicy
from tensorferry.batcher.statistics.counters import BatcherStatistics, Counters
from tensorferry.batcher.statistics.recent_batches import BatchRecord
from tensorferry.batcher.submitter import Submitter

_log = logging.getLogger("tensorferry.batcher")


class Pipeline(Submitter):
    """Stages, each with a batcher, through which requests pass. Every method is thread-safe.

        with Pipeline("embed", stages, inputs=["text"], outputs=["vector"]) as pipeline:
            vector = pipeline.submit({"text": "hello"}).result()["vector"]

    It has the methods of a `Batcher` for its callers. Each stage forms its own batches: of one size, and at the moment, that
    suit its model.

    Tensors
        The pipeline's tensors have names: its inputs, and the outputs of all stages. A stage starts when all tensors that it
        reads are there, so stages that do not need each other run at the same time. Tensors are passed by reference, and
        released once no later stage reads them. So a stage's function must not change an array that it has returned. A
        stage's request has as many rows as the tensors it reads.

        An output that is a list with one array a row may be ragged: the rows may differ in length along one axis. Within the
        request they are padded to its longest row, with the pad value of the stage that reads them, else 0. With the
        `padding` of that stage, requests of different lengths then share batches. Outputs of the pipeline are always arrays.

    Admission
        The batchers of the first stages admit requests as usual. `enqueue` also raises QueueFull while the queue of a later
        stage is full. A request that was accepted is always queued in the later stages that the pipeline owns, whatever their
        bounds. `clients` bounds the requests of each client in the whole pipeline; a stage's `ClientPolicy` counts that stage
        only.

    Deadlines
        In each stage a request has its deadline less the least time that the later stages need: that of a batch of it alone,
        and the shortest wait in the stage's last batches. So each batcher drops what can hardly arrive in time any more,
        before it runs. What is not known, or was learned long ago, counts as nothing.

    Errors and cancellation
        The first error of a stage is the request's, and its other parts are cancelled. `cancel` withdraws the request from
        every batcher that has a part of it. Nothing of the request runs after that, except batches that run already.

    Outcome
        `batch` is that of the last stage, with `input_time` and `compute_time` summed over the stages that led to it.
        `queue_delay` is the rest of the request's time. `stages` has what became of it in each stage.

    `settings` are those that callers see (classes, queue policies); by default those of the first stage that has a batcher
    of its own. The stages' batchers must have the same `clock`.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        *,
        inputs: Sequence[str],
        outputs: Sequence[str],
        settings: BatcherSettings | None = None,
        clients: ClientPolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.graph = graph_of(name, stages, inputs, outputs)
        own = [(stage.name, stage.own.batcher) for stage in self.graph.stages if stage.own is not None]
        self._own: Mapping[str, Batcher | Pipeline] = dict(own)
        batchers = list(self._own.values())
        if len(set(map(id, batchers))) != len(batchers):
            raise ValueError(
                f"stages of pipeline {name!r} have the same batcher; give each its own, or a function that returns it"
            )
        # What makes the requests of each stage with a batcher of its own.
        self.makers = [
            None if stage.own is None else RequestMaker(stage, stage.own) for stage in self.graph.stages
        ]
        # Those of the first stages, by number, and of the others, by name.
        self._first: dict[int, Batcher | Pipeline] = {}
        self._later: dict[str, Batcher | Pipeline] = {}
        for place, stage in enumerate(self.graph.stages):
            if stage.own is not None and place in self.graph.first:
                self._first[place] = stage.own.batcher
            elif stage.own is not None:
                self._later[stage.name] = stage.own.batcher
        settings = settings or (batchers[0].settings if batchers else BatcherSettings())
        super().__init__(settings, clock or MonotonicClock())
        self.later_times = LaterTimes(self.graph, self._clock)
        self._counters = Counters()
        self._last_run: float | None = None
        # The names of inputs that were checked last: most requests have the same object.
        self._checked_names: tuple[str, ...] | None = None
        self._runs = AdmittedRuns(self._clock, clients)
        # Threads that call completions now. Each set operation is atomic.
        self._completing: set[int] = set()

    # What it is.

    @property
    def stages(self) -> Sequence[Stage]:
        """Return the stages, each after those whose outputs it reads."""
        return self.graph.stages

    # Requests.

    def enqueue(self, request: Request, *, notify: bool = True, skip_admission: bool = False) -> bool:
        """Accept a request built by the caller; see `Batcher.enqueue`. Its `names` are the pipeline's inputs.

        Also raises what a function raises that returns the batcher of a first stage.
        """
        try:
            self._check(request, skip_admission=skip_admission)
            run = PipelineRun(self, self.graph, request)
            drain_time = self.drain_time() if self._runs.bounds_clients and not skip_admission else 0.0
            now = self._runs.enter(run, drain_time, skip_admission=skip_admission)
            request.arrival, request.state, request.pipeline_run = now, RUNNING, run
            try:
                must_run = run.enter(notify=notify, skip_admission=skip_admission)
            except BaseException:
                request.state, request.pipeline_run = NEW, None
                self._runs.reject(request)
                self._leave(run)
                raise
        except BatcherError as error:
            self._counters.refused(error, request.rows_counted)
            raise
        self._runs.accept(run)
        # The stages' parts have them.
        request.tensors = ()
        return must_run

    def _check(self, request: Request, *, skip_admission: bool) -> None:
        """Raise InvalidRequest for an unknown class or wrong inputs, or QueueFull if a later stage has no room."""
        if not request.priority:
            request.priority = self._settings.default_priority
        elif not 0 < request.priority <= self.priorities:
            raise self._unknown_class(request.priority)
        names = request.names
        if names is not self._checked_names or names is None:
            if names is None or sorted(names) != sorted(self.graph.inputs):
                given = "one bare array" if names is None else list(names)
                raise InvalidRequest(
                    f"the request has {given}; pipeline {self.name!r} takes the inputs {list(self.graph.inputs)}, by name"
                )
            self._checked_names = names
        if not skip_admission:
            for stage, batcher in self._later.items():
                if (full := batcher.queue_full()) is not None:
                    raise QueueFull(f"stage {stage!r}: {full}", full.retry_after)

    def _leave(self, run: PipelineRun) -> None:
        """Forget a request; the last one that leaves a closed pipeline closes the stages' queues."""
        if self._runs.leave(run):
            self._close_queues()

    def end(self, run: PipelineRun, outcome: Outcome) -> None:
        """Count a request's outcome and complete it. For `PipelineRun`, which calls it once."""
        request, error = run.request, outcome.error
        try:
            now = self._clock.now()
            total = now - request.arrival
            self._runs.accept(run)
            self._runs.release(request)
            request.state, request.pipeline_run, request.tensors = DONE, None, ()
            if error is None:
                batch = outcome.batch or NO_BATCH
                self._last_run = now
                # As in Triton, a request of a pipeline that only calls other models is a batch by itself.
                self._counters.answered_in_parts(total, batch, 0 if self._own else request.rows_counted)
                spent = batch.input_time + batch.compute_time + batch.output_time
                delay = max(0.0, total - spent)
            else:
                self._counters.failed(error, request.rows_counted, total)
                delay = sum([stage.queue_delay for stage in run.stages])
            outputs, error, info, _, position, *_ = outcome
            self._complete(
                request, Outcome(outputs, error, info, delay, position, request.priority, run.stages)
            )
        finally:
            self._leave(run)

    def _complete(self, request: Request, outcome: Outcome) -> None:
        complete, request.complete = request.complete, already_completed
        thread = threading.get_ident()
        # A completion may cancel another request.
        nested = thread in self._completing
        self._completing.add(thread)
        try:
            complete(outcome)
        except BaseException:
            # The callback is the caller's code. Even SystemExit must not end the worker, because others still wait.
            _log.exception("the completion of a request of %s raised", self.name)
        finally:
            if not nested:
                self._completing.discard(thread)

    def check_answered(self, request: Request) -> None:
        """Raise if the pipeline or a first stage could not accept a request; see `Batcher.check_answered`."""
        self._runs.check_open()
        for place in self.graph.first:
            self.graph.stages[place].model().batcher.check_answered(request)

    def answer_without_run(self, request: Request, outputs: Any) -> None:
        """Answer a request with these outputs, without running anything; see `Batcher.answer_without_run`."""
        try:
            self.check_answered(request)
        except BatcherError as error:
            self._counters.refused(error, request.rows_counted)
            raise
        self._runs.accept_empty()
        request.state = DONE
        self._counters.answered_in_parts(0.0, NO_BATCH)
        self._complete(
            request, Outcome(outputs, priority=request.priority or self._settings.default_priority)
        )

    def answer_queued(self, request: Request, outputs: Any) -> bool:
        """Answer a request that has not ended with these outputs, and withdraw it from every stage; see `Batcher.answer_queued`."""
        run: PipelineRun | None = request.pipeline_run
        if run is None:
            return False
        if request.deadline > self._clock.now():
            return run.end(Outcome(outputs))
        return run.end(Outcome(error=withdrawn(request, self._clock.now())))

    def cancel(self, request: Request) -> bool:
        """Withdraw a request from every stage; see `Batcher.cancel`."""
        run: PipelineRun | None = request.pipeline_run
        if run is None:
            return False
        return run.end(Outcome(error=withdrawn(request, self._clock.now())))

    def run_inline(self, max_seconds: float) -> float:
        """Start the batches of requests that were enqueued without `notify`, stage by stage; see `Batcher.run_inline`."""
        again = math.inf
        # What a stage's completions enqueue in the next is not given to a worker, but run here, too.
        deferred_wakeups.begin()
        try:
            for batcher in self._own.values():
                again = min(again, batcher.run_inline(max_seconds))
        finally:
            deferred_wakeups.end()
        return again

    def wake(self) -> None:
        """Wake workers of the first stages for requests that were enqueued without `notify`; see `Batcher.wake`."""
        for batcher in self._first.values():
            batcher.wake()

    def queue_full(self) -> QueueFull | None:
        """Return why no request is accepted now: the queue of a stage is full; None if there is room."""
        for batcher in self._own.values():
            if (full := batcher.queue_full()) is not None:
                return full
        return None

    def least_time(self, rows: int) -> float:
        """Return the least seconds that a request of `rows` rows takes in all stages; see `Batcher.least_time`."""
        return self.later_times.total(rows)

    @property
    def idle(self) -> bool:
        """Return whether no stage that has a batcher of its own has requests. May be late."""
        return all(batcher.idle for batcher in self._own.values())

    def drain_time(self) -> float:
        """Estimate how long the queued requests of the slowest stage take to run; see `Batcher.drain_time`."""
        return max([batcher.drain_time() for batcher in self._own.values()], default=0.001)

    def fast_reject(self, deadline: float) -> QueueFull | None:
        """Return why a first stage would reject a request with this deadline; see `Batcher.fast_reject`."""
        timeout = deadline - self._clock.now()
        for place, batcher in self._first.items():
            error = batcher.fast_reject(deadline - self.later_times.after(1, timeout)[place])
            if error is not None:
                self._counters.refused(error, 1)
                return error
        return None

    # The end.

    def flush(self) -> None:
        """Let no batch of the pipeline's own stages wait for more requests from now on; see `Batcher.flush`."""
        for batcher in self._own.values():
            batcher.flush()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until all accepted requests are done, but accept new ones; see `Batcher.wait_idle`."""
        until = self._until(timeout)
        if threading.get_ident() in self._completing:
            return False
        if not self._runs.wait_empty(until):
            return False
        idle = [batcher.wait_idle(self._left(until)) for batcher in self._own.values()]
        return all(idle)

    def drain(self, timeout: float | None = None) -> bool:
        """Accept nothing new and wait until all accepted requests are done; see `Batcher.drain`."""
        until = self._until(timeout)
        self._close()
        if not self.wait_idle(timeout):
            return False
        ended = [batcher.drain(self._left(until)) for batcher in self._own.values()]
        return all(ended)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Accept nothing new, finish, and close the stages' own batchers in their order; see `Batcher.close`.

        Without `drain`, requests that wait between stages, or for a batcher that is not the pipeline's, fail, too.
        """
        until = self._until(timeout)
        self._close()
        completing = threading.get_ident() in self._completing
        if drain:
            if completing:
                return False
            self.drain(self._left(until))
        # First all queued requests fail, and then the workers are joined.
        for batcher in self._own.values():
            batcher.close(drain=False, timeout=0.0)
        ended = [
            batcher.close(drain=False, timeout=0.0 if completing else self._left(until))
            for batcher in self._own.values()
        ]
        for run in self._runs.snapshot():
            if run.runs_in_other_models_only:
                run.end(Outcome(error=BatcherClosed("the batcher was closed before the request ran")))
        return all(ended)

    def _close(self) -> None:
        if self._runs.close():
            self._close_queues()

    def _close_queues(self) -> None:
        """Let the stages' workers end, because nothing can come any more."""
        for batcher in self._own.values():
            batcher.drain(0.0)

    # Statistics.

    def statistics(self) -> BatcherStatistics:
        """Return the counts of the whole since the start.

        Each request is counted once, and its time is that from its arrival to its answer. Sizes, failed batches, retries and
        padding are sums over the stages with batchers of their own. All else about batches is that of the last of these.
        Without any, each request counts as a batch.
        """
        stages = list(self.stage_statistics().values())
        return statistics_of(self._counters, self._runs.accepted, self._last_run, stages)

    def stage_statistics(self) -> Mapping[str, BatcherStatistics]:
        """Return the counts of each stage that has a batcher of its own, by its name."""
        return {stage: batcher.statistics() for stage, batcher in self._own.items()}

    def last_batches(self) -> Sequence[BatchRecord]:
        """Return how the last batches formed in the last stage that has a batcher of its own; see `Batcher.last_batches`."""
        return list(self._own.values())[-1].last_batches() if self._own else ()

    def stage_batches(self) -> Mapping[str, Sequence[BatchRecord]]:
        """Return how the last batches formed in each stage that has a batcher of its own, by its name."""
        return {stage: batcher.last_batches() for stage, batcher in self._own.items()}

    def __repr__(self) -> str:
        return f"<Pipeline {self.name}: {len(self._runs.snapshot())} requests in {len(self.graph.stages)} stages>"
