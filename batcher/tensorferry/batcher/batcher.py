"""The batcher: what a caller sees of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy.typing as npt

from tensorferry.batcher.clock import Clock, MonotonicClock
from tensorferry.batcher.errors import BatcherClosed, QueueFull, RunTimedOut
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.execution.completion import ResponseBurstHook
from tensorferry.batcher.execution.context import InstanceHealthCallback
from tensorferry.batcher.execution.futures import completion_of, propagate_cancel
from tensorferry.batcher.padding import Padding
from tensorferry.batcher.parts import put_together
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import BatcherSettings, ClientPolicy, QueuePolicy, check_number
from tensorferry.batcher.statistics.counters import BatcherStatistics
from tensorferry.batcher.statistics.recent_batches import BatchRecord

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
        leaves only when its oldest request has been here for that long. A request of more than
        `max_batch_size` rows is cut into several batches and answered as one. With
        `max_batch_size` 0 nothing is batched: each request runs alone, and its arrays need not
        have rows at all.

    When the queue is full
        `max_queue_size` rows wait, or accepted requests hold `max_queue_bytes`: `submit`
        raises QueueFull at once. It never blocks.

    When the model fails
        The batch is run again in halves, until the failing request is alone: it gets the
        exception, its neighbours their results. A MemoryError (OutOfMemory is one) has the batch run
        again in parts that fit, a large request's rows too, and for a while batches are smaller.
        With InstanceFailed nobody is at fault: the requests are run once more, by another function
        or by this one when it is brought back. See `errors` and `give_up`.

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

    Priority classes
        `priority_weights` gives classes, the highest first: when all have requests queued, rows
        are shared in proportion to the weights (deficit round robin), and room that a batch has
        left is filled from lower classes. When the queue is full, a request drops those of lower
        classes that would ride last (Shed). `default_priority` is the class of requests that name
        none; it is the lowest if not given. With `strict_priorities` each class rides before all
        lower ones, whatever the weights, and these may starve.

    Queue policies
        `policies` gives each class, the highest first, a `QueuePolicy`: how long its requests may
        be queued, whether they then fail or ride behind the others, and how many may be queued.

    Requests that share no batch
        With `merge` false each request is a batch of its own, of all its rows; one of more than
        `max_batch_size` is refused (RequestTooLarge), not cut up.

    Clients
        `clients` bounds what each client may have in here, and how fast it may send (QueueFull beyond it), and
        says whether they share the queue and the batches by weight: see `ClientPolicy`. Whose a request is
        says `client`.

    Preferred sizes
        `preferred_batch_sizes` has the meaning that it has in Triton: a batch leaves before the end
        of its window when it has one of these sizes, and has the largest of them that it can.
        Rarely of use: a batch's time is seldom better at some sizes than at those between.

    Several devices
        `model_fn` may be a list of functions, one for each device: all take batches from the one
        queue, each as soon as it is free. With `workers`, so many batches of one function run at
        the same time; it must then be thread-safe. With `pipelined`, each device has two batches
        in flight: the next is closed just in time to be joined while the device runs the last, and
        requests are completed while it runs the next. A function is still called by one thread at
        a time. Unless `steady`, by which a batch's time depends on its inputs' shapes alone, batches
        run on worker threads only (see `attend`).

    Answers
        `together`, where it is given, is told when the answers of a batch of several begin and end:
        a transport may then send them as one.

    When a worker ends
        What escapes from a worker's own code, be it SystemExit, ends no thread: the worker's batch is
        queued once more, its device takes none for a tenth of a second (longer if that goes on), and
        `health` is told, on the worker's thread: the function's number from 0, why it is out (None
        when it is back), and whether it fell so often that only a restart of the process can help.

    Every method may be called from any thread.
    """

    def __init__(
        self,
        model_fn: Callable[[Any], Any] | Sequence[Callable[[Any], Any]],
        max_batch_size: int = 32,
        max_queue_delay: float = 0.0,
        *,
        preferred_batch_sizes: Sequence[int] = (),
        priority_weights: Sequence[int] = (1,),
        default_priority: int = 0,
        strict_priorities: bool = False,
        policies: Sequence[QueuePolicy] = (),
        merge: bool = True,
        max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE,
        max_queue_bytes: int = DEFAULT_MAX_QUEUE_BYTES,
        workers: int = 1,
        pipelined: bool = False,
        steady: bool = True,
        padding: Padding | None = None,
        together: ResponseBurstHook | None = None,
        clients: ClientPolicy | None = None,
        name: str = "batcher",
        clock: Clock | None = None,
        health: InstanceHealthCallback = lambda instance, reason, hopeless: None,
    ) -> None:
        functions = functions_of(model_fn, workers)
        self._padding = padding
        self._batched = max_batch_size > 0
        if padding is not None and not self._batched:
            raise ValueError("max_batch_size is 0, so nothing shares a batch; leave out padding, or batch")
        self._settings = BatcherSettings(
            max_batch_size,
            max_queue_delay,
            tuple(preferred_batch_sizes),
            merge,
            tuple(priority_weights),
            strict_priorities,
            default_priority,
            tuple(policies),
            max_queue_size,
            max_queue_bytes,
            len(functions),
            pipelined,
            steady,
            clients,
        )
        self._clock = clock or MonotonicClock()
        parts = put_together(self._settings, functions, self._clock, name, together=together, health=health)
        self._queue, self._entry, self._completer = parts.queue, parts.entry, parts.completer
        self._workers, self._counters, self._recent = parts.workers, parts.counters, parts.recent
        self._warnings, self._name = parts.warnings, name

    @property
    def settings(self) -> BatcherSettings:
        """What it was told, by which it batches."""
        return self._settings

    @property
    def priorities(self) -> int:
        """How many priority classes there are."""
        return len(self._settings.priority_weights)

    @property
    def policies(self) -> Sequence[QueuePolicy]:
        """How each class waits; empty where requests may wait for ever."""
        return self._settings.policies

    def anchor(self, rows: int, seconds: float, key: Hashable = None) -> None:
        """Tells what a warm-up run of so many rows took: predictions then hold from the first request.

        `key` is that of the requests it holds for; None where every request of as many rows costs
        the same, whatever its shape. Thread-safe.
        """
        self._queue.add_warmup_sample(rows, seconds, key)

    def submit(
        self,
        x: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        *,
        timeout: float | None = None,
        priority: int = 0,
        tag: object = None,
        client: str = "",
    ) -> Future[Any]:
        """Enqueues one example, without the batch axis; the future gets its row of the result.

        `x` is an array, or a dict of arrays, of the shape that one row of the model's input
        has; it is not copied before its batch leaves, so do not change it until the future is
        done. `timeout` is in seconds from now, `priority` the class, 1 the highest, 0 the default;
        `client` is whose it is, `tag` what `last_batches` calls the request.
        Raises QueueFull, RequestTooLarge, DeadlineExceeded (the timeout is not positive, or too
        short), BatcherClosed, InstanceFailed (no device works) or InvalidRequest at once; otherwise the
        future gets the result, the model's exception, OutOfMemory, InstanceFailed, RunTimedOut,
        DeadlineExceeded, Shed, or BatcherClosed when the batcher is closed without draining. Cancelling
        the future withdraws the request. Thread-safe; never blocks.
        """
        return self._submit(x, timeout, priority, tag, client, one_row=self._batched)

    def submit_rows(
        self,
        x: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        *,
        timeout: float | None = None,
        priority: int = 0,
        tag: object = None,
        client: str = "",
    ) -> Future[Any]:
        """Enqueues several rows that belong together; the future gets as many rows of the result.

        As `submit`, but that every array has the rows on axis 0.
        """
        return self._submit(x, timeout, priority, tag, client, one_row=False)

    def _submit(
        self, x: Any, timeout: float | None, priority: int, tag: object, client: str, *, one_row: bool
    ) -> Future[Any]:
        future: Future[Any] = Future()
        request = request_of(
            x,
            completion_of(future, one_row=one_row),
            one_row=one_row,
            batched=self._batched,
            deadline=math.inf if timeout is None else self._clock.now() + timeout,
            padding=self._padding,
        )
        request.priority, request.tag, request.client = priority, tag, client
        self.enqueue(request)
        # Only now: a refused request and its future would keep each other, and the arrays, alive.
        propagate_cancel(future, lambda: self.cancel(request))
        return future

    def enqueue(self, request: Request) -> None:
        """Accepts a request built by the caller; its `complete` is called exactly once later.

        The form for servers: no future, no thread waits. Raises as `submit` does, and
        `complete` is then never called. Thread-safe; never blocks.
        """
        self._entry.accept(request, quietly=False)

    def enqueue_quietly(self, request: Request) -> bool:
        """As `enqueue`, but wakes no worker: when true is returned, the caller must call `attend` soon.

        For a thread that takes requests in from elsewhere: it hands all that are there to the
        batcher first, and then runs what is short itself, rather than wake a worker for it.
        """
        return self._entry.accept(request, quietly=True)

    def answer_empty(self, request: Request, outputs: Any) -> None:
        """Answers a request of no rows with these outputs, without running the model; it counts as any other.

        `request.complete` is called before this returns. Raises BatcherClosed, InstanceFailed or
        DeadlineExceeded as `enqueue` does, and `complete` is then never called. Thread-safe; never blocks.
        """
        self._entry.answer_empty(request, outputs)

    def attend(self, most_seconds: float) -> float:
        """Sees to it that batches leave whose requests were enqueued quietly.

        Those that should keep the device for at most `most_seconds` run on the calling thread, and
        complete their requests there, where batches are `steady`; for others a worker is woken. Returns when to call again, on
        the batcher's clock: inf, or until when to wait for callers that come back. Thread-safe.
        """
        return self._workers.inline_worker.attend(most_seconds)

    def foreseen(self, deadline: float) -> QueueFull | None:
        """Why a request with this deadline that is yet to be read would be turned away; None where that is not certain.

        In an overload, for some milliseconds after another was: it is told the same, by the same object, and is counted as refused. Where there
        are priority classes, or clients share, it depends on the request. Thread-safe.
        """
        return self._entry.foreseen(deadline)

    @property
    def awaits_attendance(self) -> bool:
        """Whether a batch is only waiting for `attend`, by which who enqueues quietly says that nothing more is there.

        It does not wait for long, nor in vain: after answers, whose recipients may be back.
        """
        return self._queue.waiting_for_input

    def give_up(self, instance: int, error: RunTimedOut) -> None:
        """Ends what a function, by its number from 0, runs now and does not return from.

        Its requests get the error at once; those that wait for the same function, and where no other function works all
        that is queued, get InstanceFailed. It takes no more batches until it returns, or the recovery that it is in
        succeeds. Thread-safe; completions run on the calling thread.
        """
        self._workers.give_up(instance, error)

    def cancel(self, request: Request) -> bool:
        """Withdraws a request: it completes with Cancelled, or DeadlineExceeded if that has passed.

        True when this call ended it (or a part of it), False when it was done before.
        Thread-safe; `request.complete` runs on the calling thread.
        """
        return self._entry.cancel(request)

    def drain(self, timeout: float | None = None) -> bool:
        """Accepts nothing new and waits until all that was accepted is done.

        True when it is, their completions included, and no batch runs; False when `timeout`
        seconds passed before; the work goes on then. A completion on a worker's thread, or on one
        that attends, would wait for itself: called there, it returns False at once. Thread-safe;
        may be called again.
        """
        self._queue.close()
        if self._workers.owns_current_thread:
            return False
        return self._queue.wait_drained(math.inf if timeout is None else self._clock.now() + timeout)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Ends the batcher: accepts nothing new, finishes, and joins its workers.

        With `drain`, accepted requests are finished first, for at most `timeout` seconds;
        those still queued then, or at once without `drain`, fail with BatcherClosed. Returns
        whether every worker has ended; one that is inside `model_fn` ends when that returns.
        Called from a completion on a worker's thread, or on one that attends, it waits for
        nothing: the workers finish what is queued and end. Thread-safe; idempotent.
        """
        on_duty = self._workers.owns_current_thread
        until = math.inf if timeout is None else self._clock.now() + timeout
        self._queue.close()
        if drain and on_duty:
            return False
        if drain:
            self._queue.wait_drained(until)
        for request in self._queue.fail_all():
            self._completer.fail(request, BatcherClosed("the batcher was closed before the request ran"))
        if not on_duty:
            self._workers.join(until)
        return self._workers.ended

    def statistics(self) -> BatcherStatistics:
        """Counts since the start and sizes of this moment. Thread-safe."""
        buckets, returners = self._queue.learning.statistics()
        return self._counters.statistics(
            self._queue.accepted, self._queue.sizes(), buckets, returners, self._warnings
        )

    def last_batches(self) -> Sequence[BatchRecord]:
        """How the last batches formed, at most 64, the oldest first; who has an answer finds its batch there.

        Who rode in them is noted only for those that run within 10 s after somebody asked: the first time nobody
        is. Thread-safe.
        """
        return self._recent.snapshot()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = self._queue.sizes()
        return f"<Batcher {self._name}: {sizes.running} requests running, {sizes.queued} queued>"


def functions_of(
    model_fn: Callable[[Any], Any] | Sequence[Callable[[Any], Any]], workers: int
) -> Sequence[Callable[[Any], Any]]:
    """Return a function for each device: those given, or the one as often as batches of it may run at the same time."""
    check_number("workers", workers, 1)
    functions = list(model_fn) if isinstance(model_fn, Sequence) else [model_fn] * workers
    if not functions or (isinstance(model_fn, Sequence) and workers != 1):
        raise ValueError(
            f"model_fn has {len(functions)} functions and workers is {workers}; give one of both"
        )
    return functions
