"""Worker loop: takes batches for one device, executes them, and restarts after a crash."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence

from tensorferry.batcher.errors import InstanceFailed
from tensorferry.batcher.execution.completion import already_completed
from tensorferry.batcher.execution.context import ExecutionContext
from tensorferry.batcher.execution.executor import WORKER_CRASHED, BatchExecutor, excluding
from tensorferry.batcher.execution.instance import Instance
from tensorferry.batcher.request import BatchAssignment, Recover, Request
from tensorferry.batcher.supervision import supervise

_log = logging.getLogger("tensorferry.batcher")

# Pause before a crashed worker is restarted: it doubles with each crash up to the last value. After this many
# crashes the health callback says that only restarting the process can help. A quiet minute resets the count.
_FIRST_SECONDS = 0.1
_LAST_SECONDS = 2.0
_HOPELESS_CRASHES = 6
_FORGET_SECONDS = 60.0


class Worker:
    """The work of one thread; `run` returns when the queue is closed and empty."""

    def __init__(self, instance: Instance, context: ExecutionContext) -> None:
        self._instance = instance
        self._queue = context.queue
        self._executor = BatchExecutor(instance, context)
        self._completer = context.completer
        self._counters = context.counters
        self._clock = context.clock
        self._name = context.name
        self._health = context.health
        # Identifiers of other threads that run batches here, see `run_inline`. Each set operation is atomic.
        self._inline_threads: set[int] = set()
        # Recent crashes of this worker, and the time of the last one.
        self._crashes = 0
        self._crashed_at = -math.inf

    def run(self) -> None:
        """Take and execute work until the queue ends; after a crash, restart."""
        supervise(self._run_until_closed, self._restart)

    def _run_until_closed(self) -> None:
        while (work := self._queue.take(self._instance.index)) is not None:
            if isinstance(work, Recover):
                self._recover()
            else:
                self._execute(work)
            # An idle worker would keep its last batch alive for hours.
            del work

    def _restart(self, fault: BaseException) -> None:
        """Report a crash; the device takes no batches for a moment."""
        now, instance = self._clock.now(), self._instance
        self._crashes = self._crashes + 1 if now < self._crashed_at + _FORGET_SECONDS else 1
        self._crashed_at = now
        seconds = min(_FIRST_SECONDS * 2 ** (self._crashes - 1), _LAST_SECONDS)
        hopeless = self._crashes >= _HOPELESS_CRASHES
        reason = f"a worker ended unexpectedly ({type(fault).__name__}) and is restarted"
        if hopeless:
            reason = f"workers end unexpectedly ({type(fault).__name__}), {self._crashes} times by now"
        failed = InstanceFailed(reason, seconds)
        # Before the queue knows, because another worker may bring the device back at once.
        instance.crashed()
        ended = self._queue.failures.worker_crashed(instance.index, seconds, failed if hopeless else None)
        self._report_health(reason, hopeless=hopeless)
        _log.error(
            "%s: a worker ended unexpectedly; this is a bug. Another takes its place in %g s",
            self._name,
            seconds,
            exc_info=fault,
        )
        self._completer.fail_unavailable(ended, failed)
        if ended:
            self._queue.expiry_done()

    def _report_health(self, reason: str | None, *, hopeless: bool = False) -> None:
        try:
            self._health(self._instance.index, reason, hopeless)
        except BaseException:
            _log.exception("%s: the health callback of an instance raised; it is ignored", self._name)

    def run_inline(self, max_seconds: float) -> float:
        """Execute, on the calling thread, batches that may start now and should take at most `max_seconds`.

        Return the time at which to call again, as `RequestQueue.take_inline` does.
        """
        try:
            work = self._queue.take_inline(max_seconds)
        except BaseException:
            self._inline_run_crashed()
            raise
        if isinstance(work, float):
            return work
        thread = threading.get_ident()
        # A completion may call this, too.
        nested = thread in self._inline_threads
        self._inline_threads.add(thread)
        try:
            while not isinstance(work, float):
                if not self._execute(work):
                    return math.inf
                work = self._queue.take_inline(max_seconds)
            return work
        except BaseException:
            self._inline_run_crashed()
            raise
        finally:
            if not nested:
                self._inline_threads.discard(thread)

    def _inline_run_crashed(self) -> None:
        """Leave what is queued to the workers."""
        if ended := self._queue.failures.inline_run_crashed():
            self._completer.fail_unavailable(ended, InstanceFailed(WORKER_CRASHED))
            self._queue.expiry_done()

    @property
    def runs_inline(self) -> bool:
        """Whether the calling thread is inside `run_inline` and executes a batch."""
        return threading.get_ident() in self._inline_threads

    def _execute(self, work: BatchAssignment) -> bool:
        """Complete all requests of an assignment; return whether anything is queued after it."""
        batch, device, times = work.batch, self._instance.index, None
        # Requests that went back into the queue: others own them.
        requeued: list[Request] = []
        try:
            taken = self._clock.now()
            if work.expired:
                self._completer.expire(work.expired)
            if work.shed:
                self._completer.shed(work.shed, "others make their deadlines", self._queue.drain_time())
            if batch:
                times = self._executor.run(work, requeued)
            if times is not None:
                _, ready, started, ended, done = times
                now = self._clock.now()
                done.append(now)
                seconds, before, after = ended - started, ready - taken, now - ended
                if work.predicted:
                    self._counters.predicted(work.predicted, before + seconds + after)
        except BaseException:
            self._requeue_unfinished(work, requeued)
            raise
        if times is None:
            return self._queue.batch_done(batch, None, self._clock.now() - taken, device=device)
        return self._queue.batch_done(batch, seconds, before, after, device=device)

    def _requeue_unfinished(self, work: BatchAssignment, requeued: Sequence[Request]) -> None:
        """Queue the unfinished requests of a crashed thread's assignment again, or fail them."""
        left = excluding(work.batch, requeued)
        queued, ended = self._queue.failures.requeue_after_failure(
            left, self._instance.index, ran=True, out=False
        )
        self._counters.retried(len(queued))
        unreported = [
            request for request in (*work.expired, *work.shed) if request.complete is not already_completed
        ]
        self._completer.fail_unavailable([*ended, *unreported], InstanceFailed(WORKER_CRASHED))
        self._queue.batch_done(work.batch, None, device=self._instance.index)

    def _recover(self) -> None:
        """Bring the instance back; if that fails, fail the requests that cannot wait for the next try."""
        instance = self._instance
        recover = instance.recover
        try:
            if recover is not None:
                recover()
        except InstanceFailed as error:
            failed = InstanceFailed(str(error), error.retry_after)
        except BaseException:
            _log.exception("%s: the recovery of a device raised; it is tried again", self._name)
            failed = InstanceFailed("the device failed and could not be brought back yet")
        else:
            had_crashed = instance.recovered()
            self._queue.failures.recovered(instance.index)
            if had_crashed:
                self._report_health(None)
            return
        queued = self._queue.failures.not_recovered(instance.index, failed)
        self._completer.fail_unavailable(queued, failed)
        if queued:
            self._queue.expiry_done()
