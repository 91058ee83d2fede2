"""The threads of a batcher: its workers, and one that fails requests whose deadline passed."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial

from tensorferry.batcher.errors import InstanceFailed, RunTimedOut
from tensorferry.batcher.execution.executor import BatchExecutor, ExecutionContext
from tensorferry.batcher.execution.model_functions import ModelFunction
from tensorferry.batcher.execution.worker import Worker
from tensorferry.batcher.supervision import supervise

_log = logging.getLogger("tensorferry.batcher")

# Pause before a crashed expiry thread is restarted.
_EXPIRY_SECONDS = 0.1


class WorkerPool:
    """One worker thread for each instance, two if it is pipelined, and one expiry thread. Thread-safe.

    The threads start at once, and end when the queue is closed and empty.
    """

    def __init__(self, functions: Sequence[ModelFunction], context: ExecutionContext) -> None:
        executors = [BatchExecutor(index, function, context) for index, function in enumerate(functions)]
        self._executors = executors
        self._queue = context.queue
        self._completer = context.completer
        self._clock = context.clock
        name = self._name = context.name
        # Runs batches on threads that are no worker's.
        self.inline_worker = Worker(executors[0], context)
        slots = executors * (2 if executors[0].pipelined else 1)
        runs: list[tuple[str, Callable[[], None]]] = [
            (f"{name}-worker-{number}", Worker(executor, context).run)
            for number, executor in enumerate(slots)
        ]
        runs.append((f"{name}-expiry", partial(supervise, self._expire_until_closed, self._restart_expiry)))
        self._threads = [threading.Thread(target=run, name=title, daemon=True) for title, run in runs]
        for thread in self._threads:
            thread.start()

    @property
    def owns_current_thread(self) -> bool:
        """Whether the calling thread completes requests, so that waiting for their end would be waiting for itself."""
        return (
            threading.current_thread() in self._threads
            or self.inline_worker.runs_inline
            or self._completer.owns_current_thread
        )

    def join(self, until: float) -> None:
        """Wait for the end of each thread, at most to `until`."""
        for thread in self._threads:
            thread.join(None if math.isinf(until) else max(0.0, until - self._clock.now()))

    @property
    def ended(self) -> bool:
        """Whether no thread is left."""
        return not any(thread.is_alive() for thread in self._threads)

    def abort_hung_run(self, index: int, error: RunTimedOut) -> None:
        """Fail the batch that an instance runs and does not return from; see `Batcher.abort_hung_run`."""
        executor = self._executors[index]
        executor.abort()
        failed = InstanceFailed(str(error))
        queued = self._queue.failures.abort_hung_run(index, failed)
        # In this order, because the instance takes other batches as soon as the run returns.
        taken, running = tuple(executor.in_flight), executor.aborted_batch()
        if running is None:
            self._queue.failures.hung_run_returned(index)
        else:
            ended, hung = self._queue.end_kept(taken), set(map(id, running))
            with self._completer.handed_out(ended):
                # First, because the first error of a split request's parts is the request's.
                for request in [request for request in ended if id(request) in hung]:
                    self._completer.fail(request, RunTimedOut(str(error)))
                waited = [request for request in ended if id(request) not in hung]
                self._completer.fail_unavailable(waited, failed)
        self._completer.fail_handed_out(queued, failed)

    def _expire_until_closed(self) -> None:
        while (expired := self._queue.take_expired()) is not None:
            with self._completer.handed_out(expired):
                self._completer.expire(expired)
            # The thread may wait for hours with these alive.
            del expired

    def _restart_expiry(self, fault: BaseException) -> None:
        _log.error(
            "%s: the expiry thread crashed; this is a bug. It is restarted in %g s",
            self._name,
            _EXPIRY_SECONDS,
            exc_info=fault,
        )
        self._queue.backoff(_EXPIRY_SECONDS)
