"""Entry: the way of a request from the caller into the queue, in parts if it is too large for a batch, and back out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import (
    BatcherError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    RequestTooLarge,
)
from tensorferry.batcher.execution.completion import RequestCompleter, already_completed
from tensorferry.batcher.execution.splitting import split_request
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import Outcome, Request, flatten
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.statistics.counters import Counters


class Entry:
    """Accepts requests, or refuses and counts them; and withdraws them. Thread-safe."""

    def __init__(
        self,
        settings: BatcherSettings,
        queue: RequestQueue,
        completer: RequestCompleter,
        counters: Counters,
        clock: Clock,
        name: str,
    ) -> None:
        self._queue = queue
        self._completer = completer
        self._counters = counters
        self._clock = clock
        self._name = name
        self._classes = len(settings.priority_weights)
        self._default_priority = settings.default_priority
        self._merges = settings.merge
        self._ranks = settings.ranks_per_class
        # What a request may have and ride in one batch.
        self._most_rows = settings.max_batch_size or math.inf

    def accept(self, request: Request, *, quietly: bool) -> bool:
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
        request.rank = (priority - 1) * self._ranks
        complete = request.complete
        queued: Sequence[Request] = (request,)
        if request.rows > self._most_rows:
            queued = self._cut_up(request, int(self._most_rows))
        try:
            displaced, wake = self._queue.put(queued, notify=not quietly)
        except BatcherError as error:
            request.complete, request.split_parts = complete, ()
            self._refused(request, error)
            raise
        if request.split_parts:
            # Its parts hold the tensors and complete it; it must not keep them alive, nor itself.
            request.tensors, request.complete = (), already_completed
        if displaced:
            why = "requests of a higher class find room in the queue"
            if displaced[0].rank == request.rank:
                why = "clients that hold less than their share find room in the queue"
            self._completer.shed(displaced, why, self._queue.drain_time())
        return wake

    def answer_empty(self, request: Request, outputs: Any) -> None:
        """Answers a request of no rows at once; see `Batcher.answer_empty`."""
        if request.rows:
            raise ValueError(
                f"the request has {request.rows} rows; only one of none is answered without a run"
            )
        try:
            self._queue.put_empty(request)
        except BatcherError as error:
            self._refused(request, error)
            raise
        priority = request.priority or self._default_priority
        self._completer.answer_empty(request, Outcome(outputs, priority=priority))

    def foreseen(self, deadline: float) -> QueueFull | None:
        """Why a request that is yet to be read is refused, and counted; see `Batcher.foreseen`."""
        error = self._queue.fast_reject(deadline)
        if error is not None:
            self._counters.refused(error, 1)
        return error

    def _cut_up(self, request: Request, most: int) -> Sequence[Request]:
        """The parts of a request of more rows than a batch has, which complete it together."""
        if not self._merges:
            raise self._refused(
                request,
                RequestTooLarge(
                    f"inference request batch-size must be <= {most} for {self._name!r}: "
                    f"the request has {request.rows} rows; send fewer at once"
                ),
            )
        try:
            # Before it is cut up: rows without bytes are cheap to claim.
            self._queue.check_size(request.rows_counted, request.nbytes)
        except BatcherError as error:
            self._refused(request, error)
            raise
        request.complete = self._end_whole(request)
        request.split_parts = split_request(request, most)
        return request.split_parts

    def _refused(self, request: Request, error: BatcherError) -> BatcherError:
        """Counts a request that is refused for this reason."""
        self._counters.refused(error, request.rows_counted)
        return error

    def _end_whole(self, whole: Request) -> Callable[[Outcome], None]:
        """Completes a request that is split, once: with its parts' outputs, or the first error of one."""
        complete = whole.complete

        def complete_whole(outcome: Outcome) -> None:
            self._completer.count_split(whole, outcome)
            if outcome.error is not None:
                self.cancel(whole)
            complete(outcome)

        return complete_whole

    def cancel(self, request: Request) -> bool:
        """Withdraws a request; see `Batcher.cancel`."""
        ended = [part for part in flatten([request]) if self._queue.cancel(part)]
        for part in ended:
            if part.deadline <= self._clock.now():
                self._completer.fail(
                    part, DeadlineExceeded("the deadline passed before the answer was there")
                )
            else:
                self._completer.fail(part, Cancelled("the caller left before the answer was there"))
        return bool(ended)
