"""The batcher: collects requests, runs them in batches, and completes each with its own result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tensorferry.batcher.clock import Clock, MonotonicClock
from tensorferry.batcher.errors import (
    BatcherClosed,
    BatcherError,
    QueueFull,
    RequestTooLarge,
    RunTimedOut,
)
from tensorferry.batcher.execution.completion import (
    RequestCompleter,
    ResponseBurstHook,
    already_completed,
    withdrawn,
)
from tensorferry.batcher.execution.executor import (
    BatchStartCallback,
    ExecutionContext,
    InstanceHealthCallback,
)
from tensorferry.batcher.execution.model_functions import ModelFunction
from tensorferry.batcher.execution.splitting import split_request
from tensorferry.batcher.execution.worker_pool import WorkerPool
from tensorferry.batcher.padding import Padding
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import Outcome, Request
from tensorferry.batcher.settings import BatcherSettings, ClientPolicy, QueuePolicy, check_number
from tensorferry.batcher.statistics.counters import BatcherStatistics, Counters
from tensorferry.batcher.statistics.recent_batches import BatchRecord, RecentBatches
from tensorferry.batcher.submitter import Submitter

_log = logging.getLogger("tensorferry.batcher")


class Batcher(Submitter):
    """Collects requests, runs them in batches, and gives each its own result. Every method is thread-safe.

        with Batcher(model_fn, max_batch_size=32) as batcher:
            future = batcher.submit(x)
            y = future.result()

    Model function
        `model_fn` takes one array, or a dict of arrays, with rows on axis 0, and returns an array, a list, or a dict of
        these, with as many rows. Its inputs are read-only. One with a method `run_batch` also gets the batch's requests
        (see `BatchAware`). Requests share a batch only if their inputs agree in names, dtypes, and shapes behind axis 0.
        With `padding`, inputs that differ in length along one axis are padded to a common length.

    When a batch starts
        A batch starts as soon as a worker is free and a request waits. It takes all requests that fit into a full batch:
        those with a deadline first, the earliest deadline before the others, then the rest in order of arrival. So
        a lone request does not wait, and what arrives while a batch runs is the next batch. A batch may wait for less
        than the time of a batch of one for clients that were just answered, if they usually send the next request at
        once and waiting pays. With `max_queue_delay` (seconds) a batch that is not full starts only when its oldest
        request has waited that long. `preferred_batch_sizes` end that window early, as in Triton.

        A full batch has `max_batch_size` rows. If batches are `adaptive`, it has the rows that pay, as far as is known:
        the smallest power of two whose time per row is within 3 % of the best, if the largest size that ran takes over 5 %
        more. Other sizes are tried at times. With a window or preferred sizes it has `max_batch_size` rows. `learn_times` false
        is for a function that waits for its callers: then no request is refused because of how long others took.

        A request of more than `max_batch_size` rows is split into several batches and answered as one. With `merge` false
        each request is a batch of its own, and larger ones are rejected (RequestTooLarge). With `max_batch_size` 0 each
        request runs alone, and its arrays need not have rows.

    When the queue is full
        `submit` raises QueueFull when `max_queue_size` rows wait, or accepted requests hold `max_queue_bytes`. It never
        blocks. `clients` bounds the requests of each client, see `ClientPolicy`.

    When the model fails
        The batch runs again in halves until the failing request is alone. That request gets the exception, the others
        their results. After a MemoryError (also OutOfMemory) the batch runs again in parts that fit, and later batches are
        smaller for a while. After InstanceFailed the requests run once more, on another device or on this one when it
        has recovered. See `errors` and `abort_hung_run`.

    Deadlines and cancellation
        A request whose `timeout` passes, or whose future is cancelled, before its batch starts is never run. If its
        batch is running, its result is dropped. Once batch times are known, a request that could not meet its deadline
        even alone is rejected, or dropped from the queue (DeadlineExceeded). If not all requests can meet theirs, the
        fewest oldest are dropped (Shed) so that the others keep up with the arrivals.

    Latency bound
        If no request has a deadline, a request of one row starts after at most the batches now running and ⌈rows ahead /
        rows of a full batch⌉ further ones, after its window if there is one. Batches that try a smaller size take at most a
        fifth of the time, in addition. If requests have up to r rows, up to r - 1 places of a batch stay empty: divide by the
        rows of a full batch - r + 1. This holds for each kind of request that may share a batch.

    Priority classes
        `priority_weights` gives the classes, the highest first. If all have requests queued, they share the rows by
        weight (deficit round robin); what a class leaves is filled from lower ones. When the queue is full, a request
        drops the last requests of lower classes (Shed). `default_priority` is the class of requests that name none; 0
        means the lowest. With `strict_priorities` each class is served before all lower ones, which may starve.
        `policies` gives each class a `QueuePolicy`: how long its requests may be queued, and how many.

    Several devices
        `model_fn` may be a list of functions, one for each device: each takes batches from the one queue as soon as it is
        free. With `workers`, that many batches of one function run at the same time; it must then be thread-safe. With
        `pipelined`, each device has two batches in flight: the next is joined just in time while the device runs the
        last, and requests are completed while it runs the next. A function is still called by one thread at a time.

    Inline runs
        If `steady`, a batch's time depends on its inputs' shapes alone. Only then `run_inline` runs short batches on the
        calling thread.

    Callbacks
        `response_hook` is called around the answers of a batch of several, so that a transport can send them as one.
        `health` is called by a worker whose code crashed, and when its device works again: with the function's number
        from 0, the reason (None when it works again), and whether only a restart of the process can help. The crashed
        worker's batch is queued once more, and its device takes none for a tenth of a second, longer if this repeats.
        `batch_started` is called with a batch's requests before it runs, and may return what is called when the run has ended:
        for callers that must know what runs.
    """

    def __init__(
        self,
        model_fn: ModelFunction | Sequence[ModelFunction],
        max_batch_size: int = 32,
        max_queue_delay: float = 0.0,
        *,
        preferred_batch_sizes: Sequence[int] = (),
        priority_weights: Sequence[int] = (1,),
        default_priority: int = 0,
        strict_priorities: bool = False,
        policies: Sequence[QueuePolicy] = (),
        merge: bool = True,
        adaptive: bool = True,
        learn_times: bool = True,
        max_queue_size: int = 4096,
        max_queue_bytes: int = 1 << 30,
        workers: int = 1,
        pipelined: bool = False,
        steady: bool = True,
        padding: Padding | None = None,
        response_hook: ResponseBurstHook | None = None,
        clients: ClientPolicy | None = None,
        name: str = "batcher",
        clock: Clock | None = None,
        health: InstanceHealthCallback = lambda instance, reason, hopeless: None,
        batch_started: BatchStartCallback | None = None,
    ) -> None:
        if padding is not None and max_batch_size == 0:
            raise ValueError("max_batch_size is 0, so nothing shares a batch; leave out padding, or batch")
        functions = _functions_of(model_fn, workers)
        settings = BatcherSettings(
            max_batch_size=max_batch_size,
            max_queue_delay=max_queue_delay,
            preferred_batch_sizes=tuple(preferred_batch_sizes),
            merge=merge,
            adaptive=adaptive,
            learn_times=learn_times,
            priority_weights=tuple(priority_weights),
            strict_priorities=strict_priorities,
            default_priority=default_priority,
            policies=tuple(policies),
            max_queue_size=max_queue_size,
            max_queue_bytes=max_queue_bytes,
            devices=len(functions),
            pipelined=pipelined,
            steady=steady,
            clients=clients,
        )
        clock = clock or MonotonicClock()
        super().__init__(settings, clock, padding)
        self._ranks_per_class = settings.ranks_per_class
        self._name = name
        self._warnings = tuple(settings.warnings())
        for warning in self._warnings:
            _log.warning("%s: %s", name, warning)
        self._queue = queue = RequestQueue(settings, clock)
        self._counters, self._recent = counters, recent = Counters(), RecentBatches(clock)
        self._completer = completer = RequestCompleter(queue, counters, recent, clock, name, response_hook)
        context = ExecutionContext(
            settings, queue, completer, counters, recent, clock, name, health, batch_started
        )
        self._workers = WorkerPool(functions, context)

    def add_warmup_sample(self, rows: int, seconds: float, key: Hashable = None) -> None:
        """Record what a warm-up run of `rows` rows took, so that predictions hold from the first request.

        `key` is that of the requests for which it holds; None if all requests of as many rows take the same time.
        """
        self._queue.learning.add_warmup_sample(rows, seconds, key)

    def enqueue(self, request: Request, *, notify: bool = True, skip_admission: bool = False) -> bool:
        """Accept a request built by the caller. Its `complete` is called exactly once later, for servers without futures.

        Without `notify` no worker is woken. The return value then says whether the caller must call `run_inline` soon;
        with `notify` it is false. So a thread that receives requests can first enqueue all that have arrived, and then
        run short batches itself, which is cheaper than waking a worker.

        With `skip_admission` a request of any size is queued, whatever else is: the caller bounds what it admits. It can only be
        too late even alone.

        Raises as `submit` does; `complete` is then never called. Never blocks.
        """
        priority = request.priority
        if not priority:
            priority = request.priority = self._settings.default_priority
        elif not 0 < priority <= self.priorities:
            raise self._rejected(request, self._unknown_class(priority))
        request.rank = (priority - 1) * self._ranks_per_class
        if self._batched and (request.rows > self._settings.max_batch_size or request.groups):
            return self._enqueue_split(request, notify=notify, skip_admission=skip_admission)
        try:
            displaced, run_inline = self._queue.put((request,), notify=notify, skip_admission=skip_admission)
        except BatcherError as error:
            self._rejected(request, error)
            raise
        if displaced:
            self._shed_displaced(displaced, request)
        return run_inline

    def _enqueue_split(self, request: Request, *, notify: bool, skip_admission: bool) -> bool:
        """Enqueue a request of more rows than a batch has, or of groups, in parts that complete it together."""
        max_rows, complete = self._settings.max_batch_size, request.complete
        try:
            if not self._settings.merge and request.rows > max_rows:
                raise RequestTooLarge(
                    f"inference request batch-size must be <= {max_rows} for {self._name!r}: "
                    f"the request has {request.rows} rows; send fewer at once"
                )
            # Before the split, because a client can claim many rows without sending many bytes.
            if not skip_admission:
                self._queue.admission.check_size(request.rows_counted, request.nbytes)
            request.complete = self._complete_split(request)
            request.split_parts = split_request(request, self._queue.learning.full_rows)
            displaced, run_inline = self._queue.put(
                request.split_parts, notify=notify, skip_admission=skip_admission
            )
        except BatcherError as error:
            request.complete, request.split_parts = complete, ()
            self._rejected(request, error)
            raise
        # The parts hold the tensors and complete the request. It must keep neither the tensors nor itself alive.
        request.tensors, request.groups, request.complete = (), (), already_completed
        if displaced:
            self._shed_displaced(displaced, request)
        return run_inline

    def _complete_split(self, whole: Request) -> Callable[[Outcome], None]:
        """Return a callback that completes a split request, with its parts' joined outputs or the first error."""
        complete = whole.complete

        def complete_whole(outcome: Outcome) -> None:
            self._completer.count_split(whole, outcome)
            if outcome.error is not None:
                self.cancel(whole)
            complete(outcome)

        return complete_whole

    def _rejected(self, request: Request, error: BatcherError) -> BatcherError:
        """Count a rejected request, and return its error."""
        self._counters.refused(error, request.rows_counted)
        return error

    def _shed_displaced(self, displaced: Sequence[Request], request: Request) -> None:
        """Fail the requests that were dropped from the queue to make room for a request."""
        why = "requests of a higher class find room in the queue"
        if displaced[0].rank == request.rank:
            why = "clients that hold less than their share find room in the queue"
        with self._completer.handed_out(displaced):
            self._completer.shed(displaced, why, self._queue.admission.drain_time())

    def check_answered(self, request: Request) -> None:
        """Raise as `answer_without_run` does; the request is not counted."""
        self._queue.check_answered(request)

    def answer_without_run(self, request: Request, outputs: Any) -> None:
        """Answer a request with these outputs, without running the model: one of no rows, or whose answer is known.

        It is counted as any other.
        `request.complete` is called before this returns. Raises BatcherClosed, InstanceFailed or DeadlineExceeded as
        `enqueue` does; `complete` is then never called. Never blocks.
        """
        try:
            self._queue.put_answered(request)
        except BatcherError as error:
            self._rejected(request, error)
            raise
        priority = request.priority or self._settings.default_priority
        with self._completer.handed_out((request,)):
            self._completer.answer_without_run(request, Outcome(outputs, priority=priority))

    def answer_queued(self, request: Request, outputs: Any) -> bool:
        """Answer an accepted request with these outputs, if it is still queued; return whether it was.

        It fails with DeadlineExceeded if its deadline has passed. `request.complete` runs on the calling thread.
        """
        ended = self._queue.end_queued(request)
        with self._completer.handed_out(ended):
            for queued in ended:
                if queued.deadline > self._clock.now():
                    self._completer.answer_without_run(queued, Outcome(outputs, priority=queued.priority))
                else:
                    self._completer.fail(queued, withdrawn(queued, self._clock.now()))
        return bool(ended)

    def run_inline(self, max_seconds: float) -> float:
        """Start the batches of requests that were enqueued without `notify`.

        If `steady`, a batch that should take at most `max_seconds` runs on the calling thread, which also completes its
        requests. For others a worker is woken. Returns when to call this again, on the batcher's clock: a batch waits
        until then for returning clients; inf if none does.
        """
        return self._workers.inline_worker.run_inline(max_seconds)

    def wake(self) -> None:
        """Wake a worker for requests that were enqueued without `notify`, if any are queued."""
        self._queue.wake()

    def queue_full(self) -> QueueFull | None:
        """Return why no request is accepted now: as many rows or bytes wait as may; None if there is room."""
        return self._queue.admission.queue_full()

    @property
    def idle(self) -> bool:
        """Return whether nothing is queued or running. May be late."""
        return self._queue.idle

    def drain_time(self) -> float:
        """Estimate how long the queued requests take to run, in seconds; at least a millisecond."""
        return self._queue.admission.drain_time()

    def least_time(self, rows: int) -> float:
        """Return the least seconds that a request of `rows` rows takes, in a batch alone; 0 if that is not known.

        It is known for a second after batches ran. Of requests that cannot share a batch, the fastest count.
        """
        return self._queue.learning.least_time(rows)

    def fast_reject(self, deadline: float) -> QueueFull | None:
        """Return why a request with this deadline would be rejected, before it is read; None if that is uncertain.

        In an overload the last rejection is repeated for some milliseconds, as the same object, and counted. Always None
        if there are priority classes or clients share, because the outcome then depends on the request.
        """
        # Without the lock, because there is nearly never a last rejection. A late look at it only costs a normal check.
        if self._queue.overload.last_rejection is None:
            return None
        error = self._queue.admission.fast_reject(deadline)
        if error is not None:
            self._counters.refused(error, 1)
        return error

    def abort_hung_run(self, instance: int, error: RunTimedOut) -> None:
        """Abort what a function, by its number from 0, runs now and does not return from.

        Its requests get the error at once. Requests that wait for the same function get InstanceFailed, and all queued
        ones if no other function works. The function takes no more batches until it returns, or the recovery that it is
        in succeeds. Completions run on the calling thread.
        """
        self._workers.abort_hung_run(instance, error)

    def cancel(self, request: Request) -> bool:
        """Withdraw a request: it completes with Cancelled, or DeadlineExceeded if its deadline has passed.

        Returns whether this call ended it, or a part of it. `request.complete` runs on the calling thread.
        """
        ended = self._queue.cancel(request.split_parts or (request,))
        with self._completer.handed_out(ended):
            for part in ended:
                self._completer.fail(part, withdrawn(part, self._clock.now()))
        return bool(ended)

    def flush(self) -> None:
        """Let no batch wait for more requests from now on, in its window or for returning clients."""
        self._queue.flush()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until all accepted requests are done, as `drain` does, but accept new ones."""
        if self._workers.owns_current_thread:
            return False
        return self._queue.wait_drained(self._until(timeout))

    def drain(self, timeout: float | None = None) -> bool:
        """Accept nothing new and wait until all accepted requests are done and their completions have returned.

        Returns false if `timeout` seconds passed before; the work goes on then. Called from a completion, it returns
        false at once, because it would wait for itself. May be called again.
        """
        self._queue.close()
        return self.wait_idle(timeout)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Accept nothing new, finish, and join the workers; return whether every worker has ended.

        With `drain`, accepted requests are finished first, for at most `timeout` seconds. Requests still queued then, or
        at once without `drain`, fail with BatcherClosed. A worker inside `model_fn` ends when that returns. Called from a
        completion, it waits for nothing: the workers finish what is queued and end. Idempotent.
        """
        own_thread = self._workers.owns_current_thread
        until = self._until(timeout)
        self._queue.close()
        if drain and own_thread:
            return False
        if drain:
            self._queue.wait_drained(until)
        queued = self._queue.fail_all()
        with self._completer.handed_out(queued):
            for request in queued:
                self._completer.fail(request, BatcherClosed("the batcher was closed before the request ran"))
        if not own_thread:
            self._workers.join(until)
        return self._workers.ended

    def statistics(self) -> BatcherStatistics:
        """Return counts since the start, and the current sizes."""
        buckets, returns = self._queue.learning.statistics()
        return self._counters.statistics(
            self._queue.accepted, self._queue.sizes(), buckets, returns, self._warnings
        )

    def last_batches(self) -> Sequence[BatchRecord]:
        """Return how the last batches formed, at most 64, the oldest first. A request's batch is there when it completes.

        Their requests are recorded only for the 10 s after a call of this, so the first call returns none.
        """
        return self._recent.snapshot()

    def __repr__(self) -> str:
        sizes = self._queue.sizes()
        return f"<Batcher {self._name}: {sizes.running} requests running, {sizes.queued} queued>"


def _functions_of(model_fn: ModelFunction | Sequence[ModelFunction], workers: int) -> Sequence[ModelFunction]:
    """Return a function for each batch that may run at the same time: those given, or the one `workers` times."""
    check_number("workers", workers, 1)
    functions = list(model_fn) if isinstance(model_fn, Sequence) else [model_fn] * workers
    if not functions or (isinstance(model_fn, Sequence) and workers != 1):
        raise ValueError(
            f"model_fn has {len(functions)} functions and workers is {workers}; give one of both"
        )
    return functions
