"""The batcher: worker threads that close batches, run them, and hand each request its result."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy.typing as npt

from tensorferry.batcher.clock import Clock, MonotonicClock
from tensorferry.batcher.collate import join, request_of, split
from tensorferry.batcher.errors import BatcherClosed, BatcherError, Cancelled, DeadlineExceeded, Shed
from tensorferry.batcher.padding import Padding
from tensorferry.batcher.policy import Limits
from tensorferry.batcher.queue import RequestQueue, Work
from tensorferry.batcher.request import BatchInfo, Outcome, Request, flatten, split_request
from tensorferry.batcher.results import deliver_row, deliver_rows, propagate_cancel
from tensorferry.batcher.statistics import BatcherStatistics, Ledger

_log = logging.getLogger("tensorferry.batcher")

DEFAULT_MAX_QUEUE_SIZE = 4096
DEFAULT_MAX_QUEUE_BYTES = 1 << 30


class Batcher:
    """Collects requests, runs them together, and gives each its own result.

        with Batcher(model_fn, max_batch_size=32) as batcher:
            future = batcher.submit(x)
            y = future.result()

    What it does
        `model_fn` takes one array, or a dict of arrays, with rows on axis 0, and returns an
        array, a list, or a dict of these, with as many rows. Requests whose inputs agree in
        names, dtypes and shapes behind axis 0 share a batch; others never do. With `padding`,
        inputs that differ in length along one axis are padded to a common one, and share too.

    When a batch leaves
        As soon as a worker is free and a request waits; it then takes all that fits
        `max_batch_size` rows: those with a deadline, the earliest first, then the others in
        order of arrival. So a lone request never waits for company, and what arrives while a
        batch runs is the next batch. A batch may wait a moment, for less than the time of a
        batch of one, for callers that were just answered, if experience says that they come
        back and that it pays. With `max_queue_delay` (seconds) a batch that is not full
        leaves only when its oldest request has been here for that long. A request of more than `max_batch_size` rows is cut into several batches and
        answered as one. With `max_batch_size` 0 nothing is batched: each request runs alone,
        and its arrays need not have rows at all.

    When the queue is full
        `max_queue_size` rows wait, or accepted requests hold `max_queue_bytes`: `submit`
        raises QueueFull at once. It never blocks.

    When the model fails
        The batch is run again in halves, until the failing request is alone: it gets the
        exception, its neighbours their results.

    Deadlines and cancels
        A request whose `timeout` passes, or whose future is cancelled, before its batch
        leaves is never run; if its batch is running, its result is dropped. Its neighbours
        notice nothing. Once it is known how long batches take, a request that could not make
        its deadline even alone is refused, or dropped from the queue (DeadlineExceeded); and
        when not all can make theirs, the fewest oldest are dropped (Shed) such that the
        others keep up with the arrivals.

    As long as no request has a deadline, one of a single row starts after at most the batches now
    running and ⌈rows ahead / max_batch_size⌉ further ones (after its window, if there is one).
    Where requests have up to r rows, up to r - 1 places of a batch stay empty: divide by
    max_batch_size - r + 1. Requests that may not share a batch are counted each kind by itself.

    Every method may be called from any thread. `workers` batches run at the same time, each
    on a thread of its own; `model_fn` must then be thread-safe.
    """

    def __init__(
        self,
        model_fn: Callable[[Any], Any],
        max_batch_size: int = 32,
        max_queue_delay: float = 0.0,
        *,
        max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE,
        max_queue_bytes: int = DEFAULT_MAX_QUEUE_BYTES,
        workers: int = 1,
        padding: Padding | None = None,
        name: str = "batcher",
        clock: Clock | None = None,
    ) -> None:
        for option, value, least in (
            ("max_batch_size", max_batch_size, 0),
            ("max_queue_delay", max_queue_delay, 0),
            ("max_queue_size", max_queue_size, 1),
            ("max_queue_bytes", max_queue_bytes, 1),
            ("workers", workers, 1),
        ):
            if not value >= least or math.isinf(value):
                raise ValueError(f"{option} is {value!r}; it must be at least {least} and finite")
        if padding is not None and max_batch_size == 0:
            raise ValueError("max_batch_size is 0, so nothing shares a batch; leave out padding, or batch")
        self._model_fn = model_fn
        self._padding = padding
        self._batched = max_batch_size > 0
        self._limits = Limits(max(1, max_batch_size), max_queue_delay)
        self._clock = clock or MonotonicClock()
        self._queue = RequestQueue(
            self._limits, max_queue_size, max_queue_bytes, self._clock, workers=workers
        )
        self._ledger = Ledger()
        self._name = name
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-worker-{index}", daemon=True)
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def anchor(self, rows: int, seconds: float) -> None:
        """Tells what a warm-up run of so many rows took: predictions then hold from the first request.

        Only where every request of as many rows costs the same, whatever its shape. Thread-safe.
        """
        self._queue.anchor(rows, seconds)

    def submit(
        self, x: npt.ArrayLike | Mapping[str, npt.ArrayLike], *, timeout: float | None = None
    ) -> Future[Any]:
        """Enqueues one example, without the batch axis; the future gets its row of the result.

        `x` is an array, or a dict of arrays, of the shape that one row of the model's input
        has; it is not copied before its batch leaves, so do not change it until the future is
        done. `timeout` is in seconds from now. Raises QueueFull, RequestTooLarge,
        DeadlineExceeded (the timeout is not positive), BatcherClosed or InvalidRequest at
        once; otherwise the future gets the result, the model's exception, DeadlineExceeded,
        or BatcherClosed when the batcher is closed without draining. Cancelling the future
        withdraws the request. Thread-safe; never blocks.
        """
        return self._submit(x, timeout, one_row=self._batched)

    def submit_rows(
        self, x: npt.ArrayLike | Mapping[str, npt.ArrayLike], *, timeout: float | None = None
    ) -> Future[Any]:
        """Enqueues several rows that belong together; the future gets as many rows of the result.

        As `submit`, but that every array has the rows on axis 0.
        """
        return self._submit(x, timeout, one_row=False)

    def _submit(self, x: Any, timeout: float | None, *, one_row: bool) -> Future[Any]:
        future: Future[Any] = Future()
        request = request_of(
            x,
            deliver_row(future) if one_row else deliver_rows(future),
            one_row=one_row,
            batched=self._batched,
            deadline=math.inf if timeout is None else self._clock.now() + timeout,
            padding=self._padding,
        )
        self.enqueue(request)
        # Only now: a refused request and its future would keep each other, and the arrays, alive.
        propagate_cancel(future, lambda: self.cancel(request))
        return future

    def enqueue(self, request: Request) -> None:
        """Accepts a request built by the caller; its `complete` is called exactly once later.

        The form for servers: no future, no thread waits. Raises as `submit` does, and
        `complete` is then never called. Thread-safe; never blocks.
        """
        # Written so that it refuses NaN, which no comparison would ever expire.
        if not request.deadline > self._clock.now():
            self._ledger.refused()
            raise DeadlineExceeded("the deadline had passed before the request was enqueued")
        complete = request.complete
        if self._batched and request.rows > self._limits.max_batch_size:
            # Before it is cut up: rows without bytes are cheap to claim.
            self._check_size(request)
            request.complete = self._withdraw_rest(request)
            request.parts = split_request(request, self._limits.max_batch_size)
        try:
            self._queue.put(tuple(flatten([request])))
        except BatcherError:
            request.complete, request.parts = complete, ()
            self._ledger.refused()
            raise
        if request.parts:
            # Its parts hold the tensors and complete it; it must not keep them alive, nor itself.
            request.tensors, request.complete = (), _completed_twice
        self._ledger.accepted()

    def _check_size(self, request: Request) -> None:
        try:
            self._queue.check_size(request.cost, request.nbytes)
        except BatcherError:
            self._ledger.refused()
            raise

    def _withdraw_rest(self, whole: Request) -> Callable[[Outcome], None]:
        complete = whole.complete

        def complete_whole(outcome: Outcome) -> None:
            if outcome.error is not None:
                self.cancel(whole)
            complete(outcome)

        return complete_whole

    def cancel(self, request: Request) -> bool:
        """Withdraws a request: it completes with Cancelled, or DeadlineExceeded if that has passed.

        True when this call ended it (or a part of it), False when it was done before.
        Thread-safe; `request.complete` runs on the calling thread.
        """
        ended = [part for part in flatten([request]) if self._queue.cancel(part)]
        for part in ended:
            if part.deadline <= self._clock.now():
                self._fail(part, DeadlineExceeded("the deadline passed before the answer was there"))
            else:
                self._fail(part, Cancelled("the caller left before the answer was there"))
        return bool(ended)

    def _work(self) -> None:
        while (work := self._queue.take()) is not None:
            for request in work.expired:
                self._fail(
                    request, DeadlineExceeded("the deadline could not be met: the request was still queued")
                )
            if work.shed:
                self._shed(work.shed)
            seconds = None
            if work.batch:
                self._ledger.closed(work.reason)
                seconds = self._run_guarded(work)
            self._queue.ran(work.batch, seconds)
            # A worker idles for hours with its last batch in hand otherwise.
            del work

    def _shed(self, requests: Sequence[Request]) -> None:
        retry_after = self._queue.drain_time()
        message = f"dropped under overload, so that others make their deadlines; retry in {retry_after:.3f} s"
        for request in requests:
            self._fail(request, Shed(message, retry_after))

    def _run_guarded(self, work: Work) -> float | None:
        """Runs and completes a batch; how long that took, or None if that is not what one takes."""
        batch = work.batch
        started = self._clock.now()
        clean = False
        try:
            clean = self._run(batch, work)
        except Exception:
            # A bug of ours must not leave callers waiting, nor the queue without its worker.
            _log.exception(
                "%s failed while running a batch; this is a bug in tensorferry.batcher", self._name
            )
            for request in self._queue.finish(batch):
                self._fail(request, BatcherError("internal error while running the batch"))
        # Not earlier: a request that is cancelled while it runs may yet have to be joined.
        for request in batch:
            request.tensors = ()
        return self._clock.now() - started if clean else None

    def _run(self, batch: Sequence[Request], work: Work) -> bool:
        """Runs the work's batch, or a part of it again; whether it succeeded at once."""
        started = self._clock.now()
        outputs, error = self._execute(batch)
        compute_time = self._clock.now() - started
        rows = sum(request.rows for request in batch)
        if error is not None:
            self._ledger.ran(len(batch), rows, compute_time, failed=True)
            if len(batch) == 1:
                for request in self._queue.finish(batch):
                    self._fail(request, error)
            # Its traceback knows this frame and those below: they would keep its arrays alive.
            del error
            self._run_halves(batch, work)
            return False
        number = self._ledger.ran(len(batch), rows, compute_time, failed=False)
        plan = batch[0].padding
        padded_length = None if plan is None else plan.padded_length
        info = BatchInfo(number, len(batch), rows, compute_time, work.reason, work.predicted, padded_length)
        if padded_length is not None:
            self._ledger.padded(batch, padded_length)
        alive = {id(request) for request in self._queue.finish(batch)}
        for position, (request, output) in enumerate(zip(batch, outputs, strict=True)):
            if id(request) in alive:
                self._answer(request, output, info, position)
        return True

    def _execute(self, batch: Sequence[Request]) -> tuple[Sequence[Any], BaseException | None]:
        try:
            outputs = self._model_fn(join(batch))
            return (split(outputs, batch) if self._batched else [outputs]), None
        except BaseException as error:
            # Whatever the model function raises must not end the worker: others wait for it.
            # Returned, not handled here: an error of the batch's halves would otherwise have
            # this one as its context, and with it, in the traceback, the neighbours' inputs.
            return (), error

    def _run_halves(self, batch: Sequence[Request], work: Work) -> None:
        alive = self._queue.still_running(batch)
        middle = (len(alive) + 1) // 2
        for half in (alive[:middle], alive[middle:]):
            if half:
                self._run(half, work)

    def _answer(self, request: Request, output: Any, info: BatchInfo, position: int) -> None:
        if request.deadline <= self._clock.now():
            self._fail(request, DeadlineExceeded("the deadline passed while the request's batch ran"))
            return
        queue_delay = request.started - request.arrival
        self._ledger.answered(queue_delay)
        self._complete(request, Outcome(output, None, info, queue_delay, position))

    def _fail(self, request: Request, error: BaseException) -> None:
        self._ledger.failed(error)
        self._complete(request, Outcome(error=error))

    def _complete(self, request: Request, outcome: Outcome) -> None:
        complete, request.complete = request.complete, _completed_twice
        if math.isnan(request.started):
            # It never ran; what ran is in a worker's hands, which drops the tensors itself.
            request.tensors = ()
        try:
            complete(outcome)
        except BaseException:
            # The caller's own code failed; its neighbours still wait for their completions. Even
            # SystemExit must not end the worker.
            _log.exception("the completion of a request of %s raised", self._name)

    def drain(self, timeout: float | None = None) -> bool:
        """Accepts nothing new and waits until all that was accepted is done.

        True when it is, their completions included, and no batch runs; False when `timeout`
        seconds passed before; the work goes on then. A completion on a worker's thread would
        wait for itself: called there, it returns False at once. Thread-safe; may be called again.
        """
        self._queue.close()
        if threading.current_thread() in self._threads:
            return False
        return self._queue.wait_done(math.inf if timeout is None else self._clock.now() + timeout)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Ends the batcher: accepts nothing new, finishes, and joins its workers.

        With `drain`, accepted requests are finished first, for at most `timeout` seconds;
        those still queued then, or at once without `drain`, fail with BatcherClosed. Returns
        whether every worker has ended; one that is inside `model_fn` ends when that returns.
        Called from a completion on a worker's thread it waits for nothing: the workers finish
        what is queued and end. Thread-safe; idempotent.
        """
        on_worker = threading.current_thread() in self._threads
        until = math.inf if timeout is None else self._clock.now() + timeout
        self._queue.close()
        if drain and on_worker:
            return False
        if drain:
            self._queue.wait_done(until)
        for request in self._queue.abandon():
            self._fail(request, BatcherClosed("the batcher was closed before the request ran"))
        for thread in () if on_worker else self._threads:
            thread.join(None if math.isinf(until) else max(0.0, until - self._clock.now()))
        return not any(thread.is_alive() for thread in self._threads)

    def statistics(self) -> BatcherStatistics:
        """Counts since the start and sizes of this moment. Thread-safe."""
        return self._ledger.statistics(self._queue.sizes())

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = self._queue.sizes()
        return f"<Batcher {self._name}: {sizes.running} requests running, {sizes.queued} queued>"


def _completed_twice(outcome: Outcome) -> None:
    raise AssertionError("a request was completed twice; this is a bug in tensorferry.batcher")
