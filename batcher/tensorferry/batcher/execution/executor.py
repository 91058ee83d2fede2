"""Execution of one batch: join, run, split, complete; and what follows a failure.

A failed batch runs again in halves until the request at fault is alone. A batch that did not fit into the
device's memory runs again in parts that fit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import BatchFailed, DeadlineExceeded, InstanceFailed, OutOfMemory, RunTimedOut
from tensorferry.batcher.execution.collate import join, own, split
from tensorferry.batcher.execution.completion import TOO_LATE, RequestCompleter, already_completed
from tensorferry.batcher.execution.model_functions import BatchAware, ModelFunction, StagedModel
from tensorferry.batcher.execution.splitting import cut, join_outputs
from tensorferry.batcher.policy.class_queue import take_prefix
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, BatchRun, Request
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.statistics.counters import Counters
from tensorferry.batcher.statistics.recent_batches import RecentBatches

_new = tuple.__new__


class NotRun(InstanceFailed):
    """Error of a batch that was not run at all, because its instance had failed before."""


# Called with an instance's index when a worker of it crashed: with the reason, and whether only a restart of the process
# can help; and with None as the reason when it works again.
InstanceHealthCallback = Callable[[int, str | None, bool], None]

# Called with the requests of a batch, or of a part that runs again, before they are joined and run. Must not raise or block.
BatchStartCallback = Callable[[Sequence[Request]], Callable[[], None] | None]


@dataclass(frozen=True, slots=True)
class ExecutionContext:
    """Objects shared by the workers of one batcher. `name` is the batcher's, for log lines and thread names."""

    settings: BatcherSettings
    queue: RequestQueue
    completer: RequestCompleter
    counters: Counters
    recent: RecentBatches
    clock: Clock
    name: str
    health: InstanceHealthCallback
    batch_started: BatchStartCallback | None


class BatchExecutor:
    """Runs the batches of one instance, a model function on its device, on the threads that took them. Thread-safe.

    One worker uses it, or two in turn if it is `pipelined`.
    """

    def __init__(
        self,
        index: int,
        model_fn: ModelFunction,
        context: ExecutionContext,
    ) -> None:
        settings = context.settings
        self.index = index
        self.pipelined = settings.pipelined
        self._model_fn: Any = model_fn
        self._run_batch = model_fn.run_batch if isinstance(model_fn, BatchAware) else None
        self._step_ends = getattr(model_fn, "step_ends", None)
        self._staged = model_fn if isinstance(model_fn, StagedModel) else None
        self._batched = settings.max_batch_size > 0
        # A request of several rows may be run in parts.
        self._divisible = self._batched and settings.merge
        self._queue: RequestQueue = context.queue
        self._completer = context.completer
        self._counters = context.counters
        self._recent = context.recent
        self._now = context.clock.now
        self._batch_started = context.batch_started
        # Held while the device runs a batch. Only the model function is called while it is held.
        self._device_lock = threading.Lock()
        # What threads have taken for this instance and not completed. Each list operation is atomic.
        self.in_flight: list[BatchAssignment] = []
        # Brings the function back after a failure; it is not called until then. None while it works.
        self.recover: Callable[[], None] | None = None
        # The requests that the model function runs now. Written with `_device_lock` held.
        self._running: Sequence[Request] | None = None
        # The current run was aborted and has not returned. `abort` writes it before it reads `_running`, a worker
        # reads it after it has written `_running`: so at least one of them sees that the run is over. In the same way,
        # at least one of them sees that a batch in `in_flight` waits for the run.
        self._aborted = False
        # A worker crashed, and the health callback was not told that the instance works again.
        self._crashed = False

    def run(self, batch: Sequence[Request], work: BatchAssignment) -> BatchRun | None:
        """Run and answer the batch of an assignment, or a part of it again; return None if it did not succeed at once."""
        outputs, error, run = self._execute(batch, work)
        if self.pipelined and not run.again:
            self._queue.run_done(self.index)
        if error is None:
            self._completer.answer(batch, outputs, run)
            if run.again and self._queue.learning.memory_limited:
                self._queue.learning.record_success(batch, self.index, run.ended - run.started)
            return run
        again = self._failed(batch, error, run, work)
        # Its traceback refers to this frame and those below, which would keep their arrays alive.
        del error
        if again is not None:
            again(batch, work)
        return None

    def _execute(
        self, batch: Sequence[Request], work: BatchAssignment, whole: Sequence[Request] | None = None
    ) -> tuple[Sequence[Any], BaseException | None, BatchRun]:
        """Join, run and split a batch; return each request's outputs, or the error.

        If the batch is cut from a request, `whole` is that.
        """
        now, staged = self._now, self._staged
        batch_ended = None if self._batch_started is None else self._batch_started(batch)
        error: BaseException | None = None
        answers: Sequence[Any] = ()
        step_ends: Sequence[tuple[str, float]] = ()
        join_start = ready = started = ended = now()
        try:
            if self._aborted:
                # No `NotRun`, because each request may come back once only while the run hangs.
                raise InstanceFailed("the device hangs")
            joined = join(batch) if staged is None else staged.load(join(batch, staged.place))
            ready = now()
            with self._device_lock:
                if self.recover is not None or self._aborted:
                    raise NotRun("the device failed before the batch ran", recover=self.recover)
                self._running = whole or batch
                started = now()
                try:
                    if self._run_batch is None:
                        outputs = self._model_fn(joined)
                    else:
                        outputs = self._run_batch(joined, batch)
                        if self._step_ends is not None:
                            step_ends = self._step_ends()
                except InstanceFailed as failure:
                    # With the lock held, so that no other batch runs after it.
                    self.recover = self.recover or failure.recover
                    raise
                finally:
                    ended = now()
                    self._running = None
                    if self._aborted:
                        self._aborted = False
                        self._queue.failures.hung_run_returned(self.index)
            if staged is not None:
                outputs = staged.fetch(outputs)
            answers = split(outputs, batch) if self._batched else [outputs]
        except BaseException as failure:
            # Whatever the model function raises must not end the worker, because others wait for it.
            # The error is returned, not handled here: otherwise errors of the batch's halves would have it as their
            # context, and its traceback would show them the neighbours' inputs.
            error = failure
            if isinstance(error, InstanceFailed) and not isinstance(error, NotRun):
                # A copy to or from the device may also have failed, outside of `_device_lock`.
                self.recover = self.recover or error.recover
        if batch_ended is not None:
            batch_ended()
        # `BatchRun(...)` takes twice as long.
        run = _new(
            BatchRun,
            (
                self.index,
                batch is not work.batch,
                work.reason,
                work.predicted,
                work.full_rows,
                batch[0].started,
                join_start,
                ready,
                started,
                ended,
                [],
                step_ends,
            ),
        )
        try:
            return answers, error, run
        finally:
            # Its traceback refers to this frame, which would keep the batch's arrays alive.
            del error

    # What follows a failure.

    def _failed(
        self, batch: Sequence[Request], error: BaseException, run: BatchRun, work: BatchAssignment
    ) -> Callable[[Sequence[Request], BatchAssignment], None] | None:
        """Fail the requests of a failed batch, or queue them again, or return what runs them again."""
        self._counters.failed_to_run(None if run.again else run.reason)
        self._recent.failed(error, run, batch)
        if isinstance(error, InstanceFailed):
            self._hand_back(batch, error, work)
        elif isinstance(error, MemoryError):
            return self._run_smaller
        elif len(batch) == 1 or isinstance(error, (RunTimedOut, BatchFailed)):
            if isinstance(error, RunTimedOut):
                self._queue.failures.run_timed_out()
            self._fail(batch, error)
        else:
            return self._run_halves
        return None

    def _fail(self, batch: Sequence[Request], error: BaseException) -> None:
        """Fail the remaining requests of a batch, or its only one, with this error."""
        for request in self._queue.finish(batch):
            if isinstance(error, BatchFailed):
                self._completer.fail(request, error.error)
            else:
                self._completer.fail(request, error if len(batch) == 1 else RunTimedOut(str(error)))

    def _hand_back(self, batch: Sequence[Request], error: InstanceFailed, work: BatchAssignment) -> None:
        """Queue the requests of a failed instance again, or fail them."""
        ran, out = not isinstance(error, NotRun), error.recover is not None
        queued, ended = self._queue.failures.requeue_after_failure(batch, work, self.index, ran=ran, out=out)
        if ran:
            self._counters.retried(queued)
        self._completer.fail_unavailable(ended, error)

    def _run_halves(self, batch: Sequence[Request], work: BatchAssignment) -> None:
        now = self._now()
        if late := [request for request in batch if request.deadline <= now]:
            for request in self._queue.finish(late):
                self._completer.fail(request, DeadlineExceeded(TOO_LATE))
        alive = self._queue.still_running(batch)
        middle = (len(alive) + 1) // 2
        for part in (alive[:middle], alive[middle:]):
            # Again, because those of the second half may have been cancelled while the first one ran.
            half = self._queue.still_running(part)
            if half and self._queue.failures.inline_run_too_long(self.index, half[0].started):
                self._hand_back(half, NotRun("the batch took too long for the thread that ran it"), work)
            elif half:
                self.run(half, work)

    def _run_smaller(self, batch: Sequence[Request], work: BatchAssignment) -> None:
        """Run a batch that did not fit into memory in parts of as many rows as are known to fit."""
        first = batch[0]
        if len(batch) == 1 and (first.rows_counted == 1 or not self._divisible):
            self._fail(batch, OutOfMemory(self._too_large(first)))
            return
        self._queue.learning.record_oom(batch, self.index)
        pending = batch
        while pending := self._queue.still_running(pending):
            most = self._queue.learning.rows_that_fit(self.index, first.key)
            part = take_prefix(pending, most)
            # The part is not checked again: if it goes back into the queue, another worker may own it by then.
            pending = pending[len(part) :]
            if part[0].rows_counted > most:
                self._run_in_parts(part[0], work)
            else:
                self.run(part, work)

    def _run_in_parts(self, request: Request, work: BatchAssignment) -> None:
        """Run a request with more rows than fit into memory some rows at a time; answer it as one."""
        alone, learning = (request,), self._queue.learning
        outputs: list[Any] = []
        done, first = 0, None
        while done < request.rows:
            if not self._queue.still_running(alone):
                return
            most = learning.rows_that_fit(self.index, request.key)
            part = (cut(request, done, min(done + most, request.rows), already_completed),)
            part[0].arrival, part[0].started = request.arrival, request.started
            answers, error, run = self._execute(part, work, alone)
            if error is None:
                learning.record_success(part, self.index, run.ended - run.started)
                outputs += map(own, answers)
                done += part[0].rows
                first = first or run
                continue
            self._counters.failed_to_run(None)
            self._recent.failed(error, run, part)
            smaller = isinstance(error, MemoryError)
            if isinstance(error, InstanceFailed):
                self._hand_back(alone, error, work)
            elif not smaller:
                self._fail(alone, error)
            # As in `run`.
            del error
            if not smaller:
                return
            if part[0].rows == 1:
                self._fail(alone, OutOfMemory(self._too_large(part[0])))
                return
            learning.record_oom(part, self.index)
        try:
            joined = join_outputs(outputs)
        except Exception as error:
            # The parts' outputs do not fit together: other names, shapes, types.
            self._fail(alone, error)
            return
        self._completer.answer(alone, [joined], (first or run)._replace(ended=run.ended))

    def _too_large(self, request: Request) -> str:
        if request.rows == 1:
            return "a single row of the request does not fit into the device's memory; send smaller inputs"
        if self._batched:
            return (
                f"the request's {request.rows} rows, which this model runs together, do not fit into the device's "
                "memory; send fewer at once"
            )
        return "the request alone does not fit into the device's memory; send smaller inputs"

    # The state of the instance.

    def crashed(self) -> None:
        """Note that a worker crashed."""
        self._crashed = True

    def recovered(self) -> None:
        """Note that the function works."""
        self.recover = None

    def had_crashed(self) -> bool:
        """Return whether a worker has crashed since the last call."""
        crashed, self._crashed = self._crashed, False
        return crashed

    def abort(self) -> None:
        """Let no other batch run until the current run returns."""
        self._aborted = True

    def aborted_batch(self) -> Sequence[Request] | None:
        """The requests whose run was aborted; None, and the instance works again, if that run has already returned."""
        running = self._running
        if running is None or not self._aborted:
            self._aborted = False
            return None
        return running
