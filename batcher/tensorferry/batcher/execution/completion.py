"""How requests end: counted, and their completions called, exactly once and outside every lock."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import BatcherError, DeadlineExceeded, InstanceFailed, Shed
from tensorferry.batcher.request import BatchAssignment, BatchInfo, Outcome, Request, Times
from tensorferry.batcher.statistics.counters import Ledger
from tensorferry.batcher.statistics.recent_batches import Record

_log = logging.getLogger("tensorferry.batcher")

_new = tuple.__new__

_INTERNAL = "internal error while running the batch"


class Together(Protocol):
    """What a transport does around the answers of a batch of several, which are given on one thread in a row.

    Other threads may answer theirs at the same time. Must not raise.
    """

    def begin(self, count: int) -> None:
        """So many answers follow on this thread."""

    def end(self) -> None:
        """They are given."""


class Completions:
    """Ends requests that the queue has handed out as ended. Thread-safe."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        name: str,
        last_answer: Callable[[], None],
        record: Record,
        together: Together | None = None,
    ) -> None:
        self._together = together
        self._ledger = ledger
        self._record = record
        # Called before the last answer of each batch.
        self._last_answer = last_answer
        self._clock = clock
        self._name = name

    def answer(
        self,
        requests: Sequence[Request],
        positions: Sequence[int],
        outputs: Sequence[Any],
        batch: Sequence[Request],
        work: BatchAssignment,
        times: Times,
        instance: int,
    ) -> None:
        """A batch, the work's or a part of it, has run: those of its requests that are still there,
        their places and their outputs.

        An answer counts only before its deadline.
        """
        now = self._clock.now()
        # Before anybody hears of it: who has an answer finds it counted. What is after this, calling
        # the completions, can thus be in no figure.
        if len(batch) == 1 == len(requests) and requests[0].deadline > now and not requests[0].is_split_part:
            # The usual case of one alone.
            latencies, rows = [now - requests[0].arrival], batch[0].rows
        else:
            latencies = [
                now - request.arrival
                for request in requests
                if request.deadline > now and not request.is_split_part
            ]
            rows = sum([request.rows for request in batch])
        padded_length = None
        if batch[0].padding is not None:
            padded_length = batch[0].padding.padded_length
            self._ledger.padded(batch, padded_length)
        begun, ready, started, ended, _ = times
        input_time, compute_time, output_time = ready - begun, ended - started, now - ended
        reason = work.reason
        left = reason if batch is work.batch else None
        number = self._ledger.ran(rows, input_time, compute_time, output_time, left, latencies, now)
        # As `BatchInfo(...)`, in half the time.
        info = _new(
            BatchInfo,
            (
                number,
                len(batch),
                rows,
                compute_time,
                reason,
                work.predicted,
                padded_length,
                input_time,
                output_time,
                ended,
            ),
        )
        self._record.ran(info, batch, requests, instance, work, times, now)
        together = self._together
        try:
            if together is None or len(requests) < 2:
                self._hand_out(requests, positions, outputs, info, now)
                return
            together.begin(len(requests))
            try:
                self._hand_out(requests, positions, outputs, info, now)
            finally:
                # Whatever happens: what was given so far would else never leave.
                together.end()
        except BaseException:
            for request in requests:
                if request.complete is not completed_twice and request.deadline > now:
                    # They are counted as answered already, and no counter ever falls.
                    self._complete(request, Outcome(error=BatcherError(_INTERNAL)))
            raise

    def _hand_out(
        self,
        requests: Sequence[Request],
        positions: Sequence[int],
        outputs: Sequence[Any],
        info: BatchInfo,
        now: float,
    ) -> None:
        last = requests[-1] if requests else None
        for request, position, output in zip(requests, positions, outputs, strict=True):
            if request is last:
                self._last_answer()
            if request.deadline > now:
                delay = request.started - request.arrival
                # As `Outcome(...)`, in half the time.
                outcome = _new(Outcome, (output, None, info, delay, position, request.priority))
                complete, request.complete = request.complete, completed_twice
                try:
                    complete(outcome)
                except BaseException:
                    self._raised()
            else:
                self.fail(request, DeadlineExceeded("the deadline passed while the request's batch ran"))

    def fail(self, request: Request, error: BaseException) -> None:
        """The request ends with this error. Never raises: others are told after it."""
        try:
            if not request.is_split_part:
                self._ledger.failed(error, request.rows_counted, self._clock.now() - request.arrival)
        except BaseException:
            _log.exception("a request of %s could not be counted; this is a bug", self._name)
        # NaN for one that never left the queue.
        delay = request.started - request.arrival
        self._complete(request, Outcome(error=error, queue_delay=delay if delay > 0 else 0.0))

    def answer_empty(self, request: Request, outcome: Outcome) -> None:
        """A request of no rows is answered at once, from no batch."""
        self._ledger.answered_empty()
        self._complete(request, outcome)

    def count_whole(self, whole: Request, outcome: Outcome) -> None:
        """Counts what became of a request that was split: its parts are none by themselves."""
        total = self._clock.now() - whole.split_parts[0].arrival
        if outcome.error is not None:
            self._ledger.failed(outcome.error, whole.rows_counted, total)
        elif outcome.batch is not None:
            self._ledger.answered_in_parts(total, outcome.batch)

    def expire(self, requests: Sequence[Request]) -> None:
        """The requests timed out, or could not make their deadlines any more, while they were queued."""

        def error(request: Request) -> BatcherError:
            if request.timed_out:
                return DeadlineExceeded(
                    "the request was queued for as long as the model's queue policy allows"
                )
            return DeadlineExceeded("the deadline could not be met: the request was still queued")

        self._fail_all(requests, error)

    def shed(self, requests: Sequence[Request], why: str, retry_after: float) -> None:
        """The requests were dropped from the queue."""
        message = f"dropped under overload, so that {why}; retry in {retry_after:.3f} s"
        self._fail_all(requests, lambda request: Shed(message, retry_after))

    def _fail_all(self, requests: Sequence[Request], error: Callable[[Request], BatcherError]) -> None:
        """Under overload these are many more than the answers: they are sent as one, too."""
        together = self._together if len(requests) > 1 else None
        if together is not None:
            together.begin(len(requests))
        try:
            for request in requests:
                self.fail(request, error(request))
        finally:
            if together is not None:
                together.end()

    def turn_away(self, requests: Iterable[Request], error: InstanceFailed) -> None:
        """Nothing is left that could run the requests, or they had been queued again before, for this reason."""
        now, retry_after = self._clock.now(), error.retry_after
        for request in requests:
            if request.deadline <= now:
                self.fail(
                    request, DeadlineExceeded("the deadline passed: the device failed while the request ran")
                )
            else:
                self.fail(request, InstanceFailed(f"{error}; retry in {retry_after:.3f} s", retry_after))

    def _complete(self, request: Request, outcome: Outcome) -> None:
        complete, request.complete = request.complete, completed_twice
        if math.isnan(request.started):
            # It never ran; what ran is in a worker's hands, which drops the tensors itself.
            request.tensors = ()
        try:
            complete(outcome)
        except BaseException:
            self._raised()

    def _raised(self) -> None:
        # The caller's own code failed; its neighbours still wait for their completions. Even
        # SystemExit must not end the worker.
        _log.exception("the completion of a request of %s raised", self._name)


def completed_twice(outcome: Outcome) -> None:
    """What a request's completion is once it was called."""
    raise AssertionError("a request was completed twice; this is a bug in tensorferry.batcher")
