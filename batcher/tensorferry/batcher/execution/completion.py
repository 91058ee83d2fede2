"""Completion of requests: each is counted, and its callback called, exactly once and outside every lock."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import BatcherError, Cancelled, DeadlineExceeded, InstanceFailed, Shed
from tensorferry.batcher.execution.deferred_wakeups import deferred_wakeups
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import NO_BATCH, BatchInfo, BatchRun, Outcome, Request, padded_length
from tensorferry.batcher.statistics.counters import Counters
from tensorferry.batcher.statistics.recent_batches import RecentBatches

_log = logging.getLogger("tensorferry.batcher")

_new = tuple.__new__

# The error of a request after a bug in the batcher.
INTERNAL = "internal error while running the batch"

# The error of a request that expired after its batch was dispatched.
TOO_LATE = "the deadline passed while the request's batch ran"


class ResponseBurstHook(Protocol):
    """Hook of a transport around the completions of a batch, which follow each other on one thread.

    Other threads may complete other batches at the same time. Must not raise.
    """

    def begin(self, count: int) -> None:
        """Note that `count` completions follow on this thread."""

    def end(self) -> None:
        """Note that they are done."""


class RequestCompleter:
    """Completes requests: those of batches that ran, and those that the queue has handed out as ended. Thread-safe."""

    def __init__(
        self,
        queue: RequestQueue,
        counters: Counters,
        recent: RecentBatches,
        clock: Clock,
        name: str,
        burst_hook: ResponseBurstHook | None = None,
    ) -> None:
        self._queue = queue
        self._counters = counters
        self._recent = recent
        self._clock = clock
        self._name = name
        self._burst_hook = burst_hook
        # The numbers of the batches that ran.
        self._numbers = count(1)
        # Identifiers of threads that complete requests that they were handed out. Each set operation is atomic.
        self._completing: set[int] = set()

    @contextmanager
    def handed_out(self, requests: Sequence[Request]) -> Iterator[None]:
        """Complete, within the block, the requests that the queue handed out to this thread at once."""
        if not requests:
            yield
            return
        thread = threading.get_ident()
        # A completion may end other requests.
        nested = thread in self._completing
        self._completing.add(thread)
        try:
            yield
        finally:
            if not nested:
                self._completing.discard(thread)
            self._queue.handed_out_completed()

    @property
    def owns_current_thread(self) -> bool:
        """Whether the calling thread completes requests that it was handed out."""
        return threading.get_ident() in self._completing

    def answer(self, batch: Sequence[Request], outputs: Sequence[Any], run: BatchRun) -> None:
        """End the requests of a batch that ran, and answer them, except those cancelled meanwhile.

        `outputs` has the rows of each. A request whose deadline has passed fails with DeadlineExceeded instead.
        """
        alive = self._queue.finish(batch)
        positions: Sequence[int] = range(len(batch))
        if len(alive) < len(batch):
            remaining = set(map(id, alive))
            positions = [position for position, request in enumerate(batch) if id(request) in remaining]
            outputs = [outputs[position] for position in positions]
        counted, hook, now, several = False, None, math.inf, len(alive) > 1
        if several:
            deferred_wakeups.begin()
        try:
            now = self._clock.now()
            # Everything is counted before the first callback, so that a caller with an answer finds it counted. What
            # the callbacks take can thus be in no figure.
            latencies = [
                now - request.arrival
                for request in alive
                if request.deadline > now and not request.part_number
            ]
            rows, length = 0, padded_length(batch)
            for request in batch:
                rows += request.rows
            if length is not None:
                self._counters.padded(batch, length)
            _, again, reason, predicted, full_rows, _, join_start, ready, started, ended, _, step_ends = run
            # `BatchInfo(...)` takes twice as long.
            info = _new(
                BatchInfo,
                (
                    next(self._numbers),
                    len(batch),
                    rows,
                    ended - started,
                    reason,
                    predicted,
                    full_rows,
                    length,
                    ready - join_start,
                    now - ended,
                    ended,
                    step_ends,
                ),
            )
            self._counters.ran(info, latencies, now, again=again)
            counted = True
            self._recent.ran(info, run, batch, alive, now)
            if several and self._burst_hook is not None:
                hook = self._burst_hook
                hook.begin(len(alive))
            for request, position, output in zip(alive, positions, outputs, strict=True):
                if request.deadline > now:
                    delay = request.started - request.arrival
                    # `Outcome(...)` takes twice as long.
                    outcome = _new(Outcome, (output, None, info, delay, position, request.priority, ()))
                    complete, request.complete = request.complete, already_completed
                    try:
                        complete(outcome)
                    except BaseException:
                        self._callback_failed()
                else:
                    self.fail(request, DeadlineExceeded(TOO_LATE))
        except BaseException:
            # The queue counts them as finished, so nothing else would complete them.
            for request in alive:
                if request.complete is already_completed:
                    continue
                if counted and request.deadline > now:
                    # It is counted as answered already, and a counter never decreases.
                    self._complete(request, Outcome(error=BatcherError(INTERNAL)))
                else:
                    self.fail(request, BatcherError(INTERNAL))
            raise
        finally:
            if hook is not None:
                # After an error, too: otherwise the transport would never send the first answers.
                hook.end()
            if several:
                deferred_wakeups.end()

    def fail(self, request: Request, error: BaseException) -> None:
        """Complete a request with an error. Never raises, because other requests are completed after it."""
        try:
            if not request.part_number:
                self._counters.failed(error, request.rows_counted, self._clock.now() - request.arrival)
        except BaseException:
            _log.exception("a request of %s could not be counted; this is a bug", self._name)
        # NaN for a request that never left the queue.
        delay = request.started - request.arrival
        self._complete(request, Outcome(error=error, queue_delay=delay if delay > 0 else 0.0))

    def answer_without_run(self, request: Request, outcome: Outcome) -> None:
        """Answer a request without a batch."""
        total = self._clock.now() - request.arrival
        # NaN for a request that was never queued.
        self._counters.answered_in_parts(total if total > 0 else 0.0, NO_BATCH)
        self._complete(request, outcome)

    def count_split(self, whole: Request, outcome: Outcome) -> None:
        """Count the outcome of a request that was split, because its parts are not counted."""
        total = self._clock.now() - whole.split_parts[0].arrival
        if outcome.error is not None:
            self._counters.failed(outcome.error, whole.rows_counted, total)
        elif outcome.batch is not None:
            self._counters.answered_in_parts(total, outcome.batch)

    def expire(self, requests: Sequence[Request]) -> None:
        """Fail queued requests that timed out or can no longer make their deadlines."""

        def error(request: Request) -> BatcherError:
            if request.timed_out:
                return DeadlineExceeded(
                    "the request was queued for as long as the model's queue policy allows"
                )
            return DeadlineExceeded("the deadline could not be met: the request was still queued")

        self._fail_all(requests, error)

    def shed(self, requests: Sequence[Request], why: str, retry_after: float) -> None:
        """Fail requests that were dropped from the queue."""
        message = f"dropped under overload, so that {why}; retry in {retry_after:.3f} s"
        self._fail_all(requests, lambda request: Shed(message, retry_after))

    def _fail_all(self, requests: Sequence[Request], error: Callable[[Request], BatcherError]) -> None:
        # Under overload there are many more errors than answers: they, too, are sent as one burst.
        hook = self._burst_hook if len(requests) > 1 else None
        if hook is not None:
            hook.begin(len(requests))
        try:
            for request in requests:
                self.fail(request, error(request))
        finally:
            if hook is not None:
                hook.end()

    def fail_unavailable(self, requests: Iterable[Request], error: InstanceFailed) -> None:
        """Fail requests that no instance can run, or that had been queued again before, with this error."""
        now, retry_after = self._clock.now(), error.retry_after
        for request in requests:
            if request.deadline <= now:
                self.fail(
                    request, DeadlineExceeded("the deadline passed: the device failed while the request ran")
                )
            else:
                self.fail(request, InstanceFailed(f"{error}; retry in {retry_after:.3f} s", retry_after))

    def fail_handed_out(self, requests: Sequence[Request], error: InstanceFailed) -> None:
        """Fail requests that the queue has handed out to this thread as `fail_unavailable` does."""
        with self.handed_out(requests):
            self.fail_unavailable(requests, error)

    def _complete(self, request: Request, outcome: Outcome) -> None:
        complete, request.complete = request.complete, already_completed
        if math.isnan(request.started):
            # It never ran. The tensors of a request that ran are released by its worker.
            request.tensors = ()
        self.call(complete, outcome)

    def call(self, complete: Callable[[Outcome], None], outcome: Outcome) -> None:
        """Call a completion, whose exception is logged."""
        try:
            complete(outcome)
        except BaseException:
            self._callback_failed()

    def _callback_failed(self) -> None:
        # The callback is the caller's code. Even SystemExit must not end the worker, because others still wait.
        _log.exception("the completion of a request of %s raised", self._name)


def withdrawn(request: Request, now: float) -> BatcherError:
    """Return the error of a request that its caller withdrew, or whose deadline has passed."""
    if request.deadline <= now:
        return DeadlineExceeded("the deadline passed before the request was answered")
    return Cancelled("the caller cancelled before the request was answered")


def already_completed(outcome: Outcome) -> None:
    """Callback of a request that was completed; calling it is a bug."""
    raise AssertionError("a request was completed twice; this is a bug in tensorferry.batcher")
