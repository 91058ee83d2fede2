"""The batcher: worker threads that close batches, run them, and hand each request its result."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy.typing as npt

from tensorferry.batcher.clients import ClientPolicy
from tensorferry.batcher.clock import Clock, MonotonicClock
from tensorferry.batcher.collate import request_of
from tensorferry.batcher.completions import Completions, Together, completed_twice
from tensorferry.batcher.errors import (
    BatcherClosed,
    BatcherError,
    Cancelled,
    DeadlineExceeded,
    InstanceFailed,
    InvalidRequest,
    RequestTooLarge,
    RunTimedOut,
)
from tensorferry.batcher.instance import Instance
from tensorferry.batcher.lasting import last
from tensorferry.batcher.options import (
    BatcherSettings,
    check_batching,
    check_classes,
    check_sizes,
    functions_of,
)
from tensorferry.batcher.padding import Padding
from tensorferry.batcher.policy import Limits, unreachable
from tensorferry.batcher.queue import RequestQueue
from tensorferry.batcher.record import BatchRecord, Record
from tensorferry.batcher.request import Outcome, Request, flatten, split_request
from tensorferry.batcher.results import deliver_row, deliver_rows, propagate_cancel
from tensorferry.batcher.statistics import BatcherStatistics, Ledger
from tensorferry.batcher.timeouts import QueuePolicy
from tensorferry.batcher.worker import Health, Worker

_log = logging.getLogger("tensorferry.batcher")

DEFAULT_MAX_QUEUE_SIZE = 4096
DEFAULT_MAX_QUEUE_BYTES = 1 << 30

# After so many seconds deadlines are looked after again, should that have failed.
_EXPIRY_SECONDS = 0.1


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
        together: Together | None = None,
        clients: ClientPolicy | None = None,
        name: str = "batcher",
        clock: Clock | None = None,
        health: Health = lambda instance, reason, hopeless: None,
    ) -> None:
        check_sizes(max_batch_size, max_queue_delay, max_queue_size, max_queue_bytes, preferred_batch_sizes)
        check_classes(priority_weights, default_priority, policies, strict=strict_priorities)
        check_batching(max_batch_size, max_queue_delay, preferred_batch_sizes, padding, merge=merge)
        functions = functions_of(model_fn, workers)
        self._padding = padding
        self._batched = max_batch_size > 0
        preferred = tuple(sorted(set(preferred_batch_sizes)))
        self._limits = Limits(max(1, max_batch_size), max_queue_delay, preferred, merge)
        self._policies = tuple(policies)
        self._classes = len(priority_weights)
        self._default_priority = default_priority or self._classes
        self._settings = BatcherSettings(
            max_batch_size,
            max_queue_delay,
            preferred,
            merge,
            tuple(priority_weights),
            strict_priorities,
            self._default_priority,
            self._policies,
            max_queue_size,
            max_queue_bytes,
            len(functions),
            pipelined,
            steady,
        )
        self._clock = clock or MonotonicClock()
        self._queue = RequestQueue(
            self._limits,
            max_queue_size,
            max_queue_bytes,
            self._clock,
            devices=len(functions),
            pipelined=pipelined,
            weights=priority_weights,
            strict=strict_priorities,
            policies=policies,
            steady=steady,
            clients=clients,
        )
        self._ranks = self._queue.ranks
        # What a request may have and ride in one batch.
        self._most_rows = self._limits.max_batch_size if self._batched else math.inf
        self._ledger = Ledger()
        self._record = Record(self._clock)
        self._name = name
        self._completions = Completions(
            self._ledger, self._clock, name, self._queue.company.last_answer, self._record, together
        )
        self._warnings = tuple(unreachable(self._limits, max_queue_size))
        for warning in self._warnings:
            _log.warning("%s: %s", name, warning)
        instances = self._instances = [
            Instance(
                index,
                function,
                batched=self._batched,
                pipelined=pipelined,
                divisible=self._batched and merge,
            )
            for index, function in enumerate(functions)
        ]
        self._health = health
        self._attendant = self._worker(instances[0])
        runs: list[tuple[str, Callable[[], None]]] = [
            (f"{name}-worker-{number}", self._worker(instance).run)
            for number, instance in enumerate(instances * (2 if pipelined else 1))
        ]
        runs.append((f"{name}-expiry", self._expire))
        self._threads = [threading.Thread(target=run, name=title, daemon=True) for title, run in runs]
        for thread in self._threads:
            thread.start()

    def _worker(self, instance: Instance) -> Worker:
        return Worker(
            instance,
            self._queue,
            self._completions,
            self._ledger,
            self._record,
            self._clock,
            self._name,
            self._health,
        )

    @property
    def settings(self) -> BatcherSettings:
        """What it was told, by which it batches."""
        return self._settings

    @property
    def priorities(self) -> int:
        """How many priority classes there are."""
        return self._classes

    @property
    def policies(self) -> Sequence[QueuePolicy]:
        """How each class waits; empty where requests may wait for ever."""
        return self._policies

    def anchor(self, rows: int, seconds: float, key: Hashable = None) -> None:
        """Tells what a warm-up run of so many rows took: predictions then hold from the first request.

        `key` is that of the requests it holds for; None where every request of as many rows costs
        the same, whatever its shape. Thread-safe.
        """
        self._queue.anchor(rows, seconds, key)

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
            deliver_row(future) if one_row else deliver_rows(future),
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
        self._accept(request, quietly=False)

    def enqueue_quietly(self, request: Request) -> bool:
        """As `enqueue`, but wakes no worker: when true is returned, the caller must call `attend` soon.

        For a thread that takes requests in from elsewhere: it hands all that are there to the
        batcher first, and then runs what is short itself, rather than wake a worker for it.
        """
        return self._accept(request, quietly=True)

    def attend(self, most_seconds: float) -> float:
        """Sees to it that batches leave whose requests were enqueued quietly.

        Those that should keep the device for at most `most_seconds` run on the calling thread, and
        complete their requests there, where batches are `steady`; for others a worker is woken. Returns when to call again, on
        the batcher's clock: inf, or until when to wait for callers that come back. Thread-safe.
        """
        return self._attendant.attend(most_seconds)

    @property
    def awaits_attendance(self) -> bool:
        """Whether a batch is only waiting for `attend`, by which who enqueues quietly says that nothing more is there.

        It does not wait for long, nor in vain: after answers, whose recipients may be back.
        """
        return self._queue.company.awaits

    def _accept(self, request: Request, *, quietly: bool) -> bool:
        """Accepts a request; whether `attend` must be called, when it is accepted quietly."""
        priority = request.priority
        if not priority:
            priority = request.priority = self._default_priority
        elif not 0 < priority <= self._classes:
            raise self._refused(
                request,
                InvalidRequest(
                    f"priority is {priority}; it must be from 1, the highest, to {self._classes}, or 0 for the default"
                ),
            )
        request.level = (priority - 1) * self._ranks
        complete = request.complete
        queued: Sequence[Request] = (request,)
        if request.rows > self._most_rows:
            queued = self._cut_up(request)
        displaced: Sequence[Request]
        wake = False
        try:
            if quietly:
                displaced, wake = self._queue.put_quietly(queued)
            else:
                displaced = self._queue.put(queued)
        except BatcherError as error:
            request.complete, request.parts = complete, ()
            self._refused(request, error)
            raise
        if request.parts:
            # Its parts hold the tensors and complete it; it must not keep them alive, nor itself.
            request.tensors, request.complete = (), completed_twice
        if displaced:
            why = "requests of a higher class find room in the queue"
            if displaced[0].level == request.level:
                why = "clients that hold less than their share find room in the queue"
            self._completions.shed(displaced, why, self._queue.drain_time())
        return wake

    def give_up(self, instance: int, error: RunTimedOut) -> None:
        """Ends what a function, by its number from 0, runs now and does not return from.

        Its requests get the error at once; those that wait for the same function, and where no other function works all
        that is queued, get InstanceFailed. It takes no more batches until it returns, or the recovery that it is in
        succeeds. Thread-safe; completions run on the calling thread.
        """
        one = self._instances[instance]
        one.given_up = True
        failed = InstanceFailed(str(error))
        queued = self._queue.give_up(instance, failed)
        running, in_hand = one.running, tuple(one.in_hand)
        if running is None or not one.given_up:
            # It was over already.
            one.given_up = False
            self._queue.returned(instance)
        else:
            stuck = set(map(id, running))
            for request in [request for batch in in_hand for request in self._queue.finish(batch)]:
                if id(request) in stuck:
                    self._completions.fail(request, RunTimedOut(str(error)))
                else:
                    self._completions.turn_away([request], failed)
        self._completions.turn_away(queued, failed)
        if queued:
            self._queue.expired_completed()

    def _cut_up(self, request: Request) -> Sequence[Request]:
        """The parts of a request of more rows than a batch has, which complete it together."""
        if not self._limits.merges:
            raise self._refused(
                request,
                RequestTooLarge(
                    f"inference request batch-size must be <= {self._limits.max_batch_size} for {self._name!r}: "
                    f"the request has {request.rows} rows; send fewer at once"
                ),
            )
        try:
            # Before it is cut up: rows without bytes are cheap to claim.
            self._queue.check_size(request.cost, request.nbytes)
        except BatcherError as error:
            self._refused(request, error)
            raise
        request.complete = self._end_whole(request)
        request.parts = split_request(request, self._limits.max_batch_size)
        return request.parts

    def _refused(self, request: Request, error: BatcherError) -> BatcherError:
        """Counts a request that is refused for this reason."""
        self._ledger.refused(error, request.cost)
        return error

    def _end_whole(self, whole: Request) -> Callable[[Outcome], None]:
        """Completes a request that is split, once: with its parts' outputs, or the first error of one."""
        complete = whole.complete

        def complete_whole(outcome: Outcome) -> None:
            self._completions.count_whole(whole, outcome)
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
                self._completions.fail(
                    part, DeadlineExceeded("the deadline passed before the answer was there")
                )
            else:
                self._completions.fail(part, Cancelled("the caller left before the answer was there"))
        return bool(ended)

    def _expire(self) -> None:
        last(self._expire_until_closed, self._expire_again)

    def _expire_until_closed(self) -> None:
        while (expired := self._queue.take_expired()) is not None:
            try:
                self._completions.expire(expired)
            finally:
                self._queue.expired_completed()
            # As a worker does: the thread may wait for hours.
            del expired

    def _expire_again(self, fault: BaseException) -> None:
        _log.error(
            "%s: who looks after deadlines ended unexpectedly; this is a bug. It is begun again in %g s",
            self._name,
            _EXPIRY_SECONDS,
            exc_info=fault,
        )
        self._queue.stand_off(_EXPIRY_SECONDS)

    def drain(self, timeout: float | None = None) -> bool:
        """Accepts nothing new and waits until all that was accepted is done.

        True when it is, their completions included, and no batch runs; False when `timeout`
        seconds passed before; the work goes on then. A completion on a worker's thread, or on one
        that attends, would wait for itself: called there, it returns False at once. Thread-safe;
        may be called again.
        """
        self._queue.close()
        if self._on_worker():
            return False
        return self._queue.wait_done(math.inf if timeout is None else self._clock.now() + timeout)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Ends the batcher: accepts nothing new, finishes, and joins its workers.

        With `drain`, accepted requests are finished first, for at most `timeout` seconds;
        those still queued then, or at once without `drain`, fail with BatcherClosed. Returns
        whether every worker has ended; one that is inside `model_fn` ends when that returns.
        Called from a completion on a worker's thread, or on one that attends, it waits for
        nothing: the workers finish what is queued and end. Thread-safe; idempotent.
        """
        on_worker = self._on_worker()
        until = math.inf if timeout is None else self._clock.now() + timeout
        self._queue.close()
        if drain and on_worker:
            return False
        if drain:
            self._queue.wait_done(until)
        for request in self._queue.abandon():
            self._completions.fail(request, BatcherClosed("the batcher was closed before the request ran"))
        for thread in () if on_worker else self._threads:
            thread.join(None if math.isinf(until) else max(0.0, until - self._clock.now()))
        return not any(thread.is_alive() for thread in self._threads)

    def _on_worker(self) -> bool:
        """Whether the calling thread is one that runs batches, so that to wait for these is to wait for itself."""
        return threading.current_thread() in self._threads or self._attendant.attended

    def statistics(self) -> BatcherStatistics:
        """Counts since the start and sizes of this moment. Thread-safe."""
        buckets, returners = self._queue.learned()
        return self._ledger.statistics(
            self._queue.accepted, self._queue.sizes(), buckets, returners, self._warnings
        )

    def last_batches(self) -> Sequence[BatchRecord]:
        """How the last batches formed, at most 64, the oldest first; who has an answer finds its batch there.

        Who rode in them is noted only for those that run within 10 s after somebody asked: the first time nobody
        is. Thread-safe.
        """
        return self._record.look()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = self._queue.sizes()
        return f"<Batcher {self._name}: {sizes.running} requests running, {sizes.queued} queued>"
