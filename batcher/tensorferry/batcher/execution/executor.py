"""Execution of one batch: join, run, split, complete; and what follows a failure.

A failed batch runs again in halves until the request at fault is alone. A batch that did not fit into the
device's memory runs again in parts that fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tensorferry.batcher.errors import BatcherError, InstanceFailed, OutOfMemory, RunTimedOut
from tensorferry.batcher.execution.collate import join, split
from tensorferry.batcher.execution.completion import already_completed
from tensorferry.batcher.execution.context import ExecutionContext
from tensorferry.batcher.execution.instance import Instance, NotRun
from tensorferry.batcher.execution.splitting import cut, join_outputs
from tensorferry.batcher.policy.prefixes import take_prefix
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, BatchRun, BatchTimestamps, Request

_log = logging.getLogger("tensorferry.batcher")

_new = tuple.__new__

# The error of a request whose worker crashed.
WORKER_CRASHED = "what ran the batch ended unexpectedly"


class BatchExecutor:
    """Runs batches of one instance on the thread that took them. Thread-safe."""

    def __init__(self, instance: Instance, context: ExecutionContext) -> None:
        self._instance = instance
        self._queue: RequestQueue = context.queue
        self._completer = context.completer
        self._counters = context.counters
        self._recent = context.recent
        self._now = context.clock.now
        self._name = context.name

    def run(self, work: BatchAssignment, requeued: list[Request]) -> BatchTimestamps | None:
        """Run and complete a batch; return its times, or None if it did not succeed at once.

        Requests that go back into the queue are appended to `requeued`: this batch no longer owns them.
        """
        batch = work.batch
        times = None
        in_flight = self._instance.in_flight
        in_flight.append(batch)
        try:
            times = self._run(batch, work, requeued)
        except Exception:
            # A bug here must leave no caller waiting and must not end the worker.
            _log.exception(
                "%s failed while running a batch; this is a bug in tensorferry.batcher", self._name
            )
            self._fail_all(self._queue.finish(excluding(batch, requeued)))
        except BaseException:
            # What ends threads (SystemExit): the requests without an answer are not at fault and run once more.
            self._hand_back(excluding(batch, requeued), InstanceFailed(WORKER_CRASHED), requeued)
            raise
        finally:
            in_flight.remove(batch)
            # Only here, because a request that is cancelled while it runs may be joined once more.
            for request in excluding(batch, requeued) if requeued else batch:
                request.tensors = ()
        return times

    def _run(
        self, batch: Sequence[Request], work: BatchAssignment, requeued: list[Request]
    ) -> BatchTimestamps | None:
        """Run the whole batch of an assignment, or a part of it again; None if it did not succeed at once."""
        whole = batch is work.batch
        index = self._instance.index
        outputs, error, times = self._execute(batch)
        if self._instance.pipelined and whole:
            self._queue.run_done(index)
        run = _new(BatchRun, (batch, work, times, index))
        if error is None:
            self._answer(run, outputs)
            if not whole and self._queue.learning.memory_limited:
                self._queue.learning.record_success(batch, index, times.ended - times.started)
            return times
        self._counters.failed_to_run(work.reason if whole else None)
        self._recent.failed(error, run)
        again: Callable[[Sequence[Request], BatchAssignment, list[Request]], None] | None = None
        if isinstance(error, InstanceFailed):
            self._hand_back(batch, error, requeued)
        elif isinstance(error, MemoryError):
            again = self._run_smaller
        elif len(batch) == 1 or isinstance(error, RunTimedOut):
            if isinstance(error, RunTimedOut):
                self._queue.failures.run_timed_out()
            self._fail(batch, error)
        else:
            again = self._run_halves
        # Its traceback refers to this frame and those below, which would keep their arrays alive.
        del error
        if again is not None:
            again(batch, work, requeued)
        return None

    def _answer(self, run: BatchRun, outputs: Sequence[Any]) -> None:
        """Complete the requests of a batch that ran, except those cancelled meanwhile."""
        batch = run.batch
        alive = self._queue.finish(batch)
        positions: Sequence[int] = range(len(batch))
        if len(alive) < len(batch):
            remaining = set(map(id, alive))
            positions = [position for position, request in enumerate(batch) if id(request) in remaining]
            outputs = [outputs[position] for position in positions]
        try:
            self._completer.answer(alive, positions, outputs, run)
        except BaseException:
            # The queue counts them as finished, so nothing else would complete them.
            self._fail_all([request for request in alive if request.complete is not already_completed])
            raise

    def _fail_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._completer.fail(request, BatcherError("internal error while running the batch"))

    def _fail(self, batch: Sequence[Request], error: BaseException) -> None:
        """Fail the remaining requests of a batch, or its only one, with this error."""
        for request in self._queue.finish(batch):
            self._completer.fail(request, error if len(batch) == 1 else RunTimedOut(str(error)))

    def _hand_back(self, batch: Sequence[Request], error: InstanceFailed, requeued: list[Request]) -> None:
        """Queue the requests of a failed instance again, or fail them."""
        ran, out = not isinstance(error, NotRun), error.recover is not None
        queued, ended = self._queue.failures.requeue_after_failure(
            batch, self._instance.index, ran=ran, out=out
        )
        requeued += queued
        if ran:
            self._counters.retried(len(queued))
        self._completer.fail_unavailable(ended, error)

    def _execute(
        self, batch: Sequence[Request]
    ) -> tuple[Sequence[Any], BaseException | None, BatchTimestamps]:
        """Join, run and split a batch; return each request's outputs, or the error."""
        now, instance = self._now, self._instance
        join_start = ready = started = ended = now()
        try:
            staged = instance.staged
            joined = join(batch) if staged is None else staged.load(join(batch, staged.place))
            ready = now()
            with instance.device_lock:
                instance.begin_run(batch)
                started = now()
                try:
                    outputs = instance.model_fn(joined)
                except InstanceFailed as error:
                    instance.failed(error)
                    raise
                finally:
                    ended = now()
                    if instance.end_run():
                        self._queue.failures.hung_run_returned(instance.index)
            if staged is not None:
                outputs = staged.fetch(outputs)
            answers = split(outputs, batch) if instance.batched else [outputs]
            return answers, None, _new(BatchTimestamps, (join_start, ready, started, ended, []))
        except BaseException as error:
            # Whatever the model function raises must not end the worker, because others wait for it.
            # The error is returned, not handled here: otherwise errors of the batch's halves would have it as their
            # context, and its traceback would show them the neighbours' inputs.
            if isinstance(error, InstanceFailed) and not isinstance(error, NotRun):
                # A copy to or from the device may also have failed, outside of `device_lock`.
                instance.failed(error)
            return (), error, BatchTimestamps(join_start, ready, started, ended, [])

    def _run_halves(self, batch: Sequence[Request], work: BatchAssignment, requeued: list[Request]) -> None:
        alive = self._queue.still_running(batch)
        middle = (len(alive) + 1) // 2
        for half in (alive[:middle], alive[middle:]):
            if half and self._queue.inline_run_too_long(self._instance.index, half[0].started):
                self._hand_back(half, NotRun("the batch took too long for the thread that ran it"), requeued)
            elif half:
                self._run(half, work, requeued)

    def _run_smaller(self, batch: Sequence[Request], work: BatchAssignment, requeued: list[Request]) -> None:
        """Run a batch that did not fit into memory in parts of as many rows as are known to fit."""
        instance, first = self._instance, batch[0]
        if len(batch) == 1 and (first.rows_counted == 1 or not instance.divisible):
            self._fail(batch, OutOfMemory(_too_large(first, instance)))
            return
        self._queue.learning.record_oom(batch, instance.index)
        pending = batch
        while pending := self._queue.still_running(pending):
            most = self._queue.learning.rows_that_fit(instance.index, first.key)
            part = take_prefix(pending, most)
            # The part is not checked again: if it goes back into the queue, another worker may own it by then.
            pending = pending[len(part) :]
            if part[0].rows_counted > most:
                self._run_in_parts(part[0], work, requeued)
            else:
                self._run(part, work, requeued)

    def _run_in_parts(self, request: Request, work: BatchAssignment, requeued: list[Request]) -> None:
        """Run a request with more rows than fit into memory some rows at a time; answer it as one."""
        index, alone = self._instance.index, (request,)
        outputs: list[Any] = []
        done, first = 0, None
        while done < request.rows:
            if not self._queue.still_running(alone):
                return
            most = self._queue.learning.rows_that_fit(index, request.key)
            part = (cut(request, done, min(done + most, request.rows), already_completed),)
            answers, error, times = self._execute(part)
            if error is None:
                self._queue.learning.record_success(part, index, times.ended - times.started)
                outputs += answers
                done += part[0].rows
                first = first or times
                continue
            self._counters.failed_to_run(None)
            part[0].arrival, part[0].started = request.arrival, request.started
            self._recent.failed(error, BatchRun(part, work, times, index))
            smaller = isinstance(error, MemoryError)
            if isinstance(error, InstanceFailed):
                self._hand_back(alone, error, requeued)
            elif not smaller:
                self._fail(alone, error)
            # As in `_run`.
            del error
            if not smaller:
                return
            if part[0].rows == 1:
                self._fail(alone, OutOfMemory(_too_large(part[0], self._instance)))
                return
            self._queue.learning.record_oom(part, index)
        try:
            joined = join_outputs(outputs)
        except Exception as error:
            # The parts' outputs do not fit together: other names, shapes, types.
            self._fail(alone, error)
            return
        times = times if first is None else first._replace(ended=times.ended)
        self._answer(BatchRun(alone, work, times, index), [joined])


def excluding(batch: Sequence[Request], requeued: Sequence[Request]) -> Sequence[Request]:
    """Those of a batch that did not go back into the queue."""
    gone = set(map(id, requeued))
    return [request for request in batch if id(request) not in gone]


def _too_large(request: Request, instance: Instance) -> str:
    if request.rows == 1:
        return "a single row of the request does not fit into the device's memory; send smaller inputs"
    if instance.batched:
        return (
            f"the request's {request.rows} rows, which this model runs together, do not fit into the device's memory; "
            "send fewer at once"
        )
    return "the request alone does not fit into the device's memory; send smaller inputs"
