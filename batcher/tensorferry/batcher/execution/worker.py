"""Worker loop: takes batches for one device, executes them, and restarts after a crash."""

from __future__ import annotations

import logging
import math
import threading

from tensorferry.batcher.errors import BatcherError, InstanceFailed
from tensorferry.batcher.execution.completion import INTERNAL, already_completed
from tensorferry.batcher.execution.executor import BatchExecutor, ExecutionContext
from tensorferry.batcher.request import BatchAssignment, Recover
from tensorferry.batcher.supervision import DoublingPause, supervise

_log = logging.getLogger("tensorferry.batcher")

# The error of a request whose worker crashed.
_WORKER_CRASHED = "what ran the batch ended unexpectedly"

# Pauses before a crashed worker is restarted. After `_HOPELESS_CRASHES` crashes, without a quiet minute between them, the
# health callback says that only restarting the process can help.
_FIRST_SECONDS, _LONGEST_SECONDS = 0.1, 2.0
_HOPELESS_CRASHES = 6


class Worker:
    """The work of one thread; `run` returns when the queue is closed and empty."""

    def __init__(self, executor: BatchExecutor, context: ExecutionContext) -> None:
        self._executor = executor
        self._queue = context.queue
        self._completer = context.completer
        self._counters = context.counters
        self._clock = context.clock
        self._name = context.name
        self._health = context.health
        # Identifiers of other threads that run batches here, see `run_inline`. Each set operation is atomic.
        self._inline_threads: set[int] = set()
        self._crashes = DoublingPause(_FIRST_SECONDS, _LONGEST_SECONDS)

    def run(self) -> None:
        """Take and execute work until the queue ends; after a crash, restart."""
        supervise(self._run_until_closed, self._restart)

    def _run_until_closed(self) -> None:
        while (work := self._queue.take(self._executor.index)) is not None:
            if isinstance(work, Recover):
                self._recover()
            else:
                self._execute(work)
            # An idle worker would keep its last batch alive for hours.
            del work

    def _restart(self, fault: BaseException) -> None:
        """Report a crash; the device takes no batches for a moment."""
        executor, seconds = self._executor, self._crashes.after(self._clock.now())
        hopeless = self._crashes.faults >= _HOPELESS_CRASHES
        reason = f"a worker ended unexpectedly ({type(fault).__name__}) and is restarted"
        if hopeless:
            reason = f"workers end unexpectedly ({type(fault).__name__}), {self._crashes.faults} times by now"
        failed = InstanceFailed(reason, seconds)
        # In this order, because another worker may bring the device back, and report that, as soon as the queue knows.
        self._report_health(reason, hopeless=hopeless)
        executor.crashed()
        ended = self._queue.failures.worker_crashed(executor.index, seconds, failed if hopeless else None)
        _log.error(
            "%s: a worker ended unexpectedly; this is a bug. Another takes its place in %g s",
            self._name,
            seconds,
            exc_info=fault,
        )
        self._completer.fail_handed_out(ended, failed)

    def _report_health(self, reason: str | None, *, hopeless: bool = False) -> None:
        try:
            self._health(self._executor.index, reason, hopeless)
        except BaseException:
            _log.exception("%s: the health callback of an instance raised; it is ignored", self._name)

    def run_inline(self, max_seconds: float) -> float:
        """Execute, on the calling thread, batches that may start now and should take at most `max_seconds`.

        Return the time at which to call again, as `RequestQueue.take_inline` does.
        """
        thread = threading.get_ident()
        # A completion may call this, too.
        nested = thread in self._inline_threads
        try:
            while not isinstance(work := self._queue.take_inline(max_seconds), float):
                self._inline_threads.add(thread)
                if not self._execute(work):
                    return math.inf
            return work
        except BaseException:
            self._inline_run_crashed()
            raise
        finally:
            if not nested:
                self._inline_threads.discard(thread)

    def _inline_run_crashed(self) -> None:
        """Leave what is queued to the workers."""
        ended = self._queue.failures.inline_run_crashed()
        self._completer.fail_handed_out(ended, InstanceFailed(_WORKER_CRASHED))

    @property
    def runs_inline(self) -> bool:
        """Whether the calling thread is inside `run_inline` and executes a batch."""
        return threading.get_ident() in self._inline_threads

    def _execute(self, work: BatchAssignment) -> bool:
        """Complete all requests of an assignment; return whether anything is queued after it."""
        batch, executor, seconds, before, after = work.batch, self._executor, None, 0.0, 0.0
        executor.in_flight.append(work)
        try:
            taken, run = self._clock.now(), None
            if work.expired:
                self._completer.expire(work.expired)
            if work.shed:
                self._completer.shed(
                    work.shed, "others make their deadlines", self._queue.admission.drain_time()
                )
            try:
                if batch:
                    run = executor.run(batch, work)
            except Exception:
                # A bug here must leave no caller waiting and must not end the worker.
                _log.exception(
                    "%s failed while running a batch; this is a bug in tensorferry.batcher", self._name
                )
                ended = self._queue.end_kept((work,))
                with self._completer.handed_out(ended):
                    for request in ended:
                        self._completer.fail(request, BatcherError(INTERNAL))
            now = self._clock.now()
            if run is None:
                before = now - taken
            else:
                run.done.append(now)
                seconds, before, after = run.ended - run.started, run.ready - taken, now - run.ended
                if run.predicted:
                    self._counters.predicted(run.predicted, before + seconds + after)
        except BaseException:
            seconds, before = None, 0.0
            self._requeue_unfinished(work)
            raise
        finally:
            executor.in_flight.remove(work)
            # Only here, because a request that is cancelled while it runs may be joined once more.
            for request in work.kept():
                request.tensors = ()
            queued = self._queue.batch_done(batch, seconds, before, after, device=executor.index)
        return queued

    def _requeue_unfinished(self, work: BatchAssignment) -> None:
        """Queue the unfinished requests of a crashed thread's assignment again, or fail them."""
        queued, ended = self._queue.failures.requeue_after_failure(
            work.kept(), work, self._executor.index, ran=True, out=False
        )
        self._counters.retried(queued)
        unreported = [
            request for request in (*work.expired, *work.shed) if request.complete is not already_completed
        ]
        self._completer.fail_unavailable([*ended, *unreported], InstanceFailed(_WORKER_CRASHED))

    def _recover(self) -> None:
        """Bring the instance back; if that fails, fail the requests that cannot wait for the next try."""
        executor = self._executor
        recover = executor.recover
        try:
            if recover is not None:
                recover()
        except InstanceFailed as error:
            failed = InstanceFailed(str(error), error.retry_after)
        except BaseException:
            _log.exception("%s: the recovery of a device raised; it is tried again", self._name)
            failed = InstanceFailed("the device failed and could not be brought back yet")
        else:
            executor.recovered()
            self._queue.failures.recovered(executor.index)
            # Only now, because a worker that crashes during the recovery begins no outage of its own.
            if executor.had_crashed():
                self._report_health(None)
            return
        queued = self._queue.failures.not_recovered(executor.index, failed)
        self._completer.fail_handed_out(queued, failed)
