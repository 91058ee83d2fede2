"""Running: a batch is joined, run, split and answered; or it fails, and each of its requests gets what it is due.

A batch that failed is run again in halves until the request that is at fault is alone, and one that did not fit into
the device's memory in parts that do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import (
    BatcherError,
    InstanceFailed,
    OutOfMemory,
    RunTimedOut,
)
from tensorferry.batcher.execution.collate import join, split
from tensorferry.batcher.execution.completion import Completions, completed_twice
from tensorferry.batcher.execution.instance import Instance
from tensorferry.batcher.execution.splitting import cut, join_outputs
from tensorferry.batcher.policy.batch_forming import riders
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Request, Times
from tensorferry.batcher.statistics.counters import Ledger
from tensorferry.batcher.statistics.recent_batches import Record

_log = logging.getLogger("tensorferry.batcher")

_new = tuple.__new__

# Why a request failed whose worker fell.
FELL = "what ran the batch ended unexpectedly"


class _NotRun(InstanceFailed):
    """The batch was not run at all: what would have run it was broken already."""


class Running:
    """Runs batches of one instance, on the thread that took them. Thread-safe."""

    def __init__(
        self,
        instance: Instance,
        queue: RequestQueue,
        completions: Completions,
        ledger: Ledger,
        record: Record,
        clock: Clock,
        name: str,
    ) -> None:
        self._instance = instance
        self._queue = queue
        self._completions = completions
        self._ledger = ledger
        self._record = record
        self._clock = clock
        self._name = name

    def run(self, work: BatchAssignment, back: list[Request]) -> Times | None:
        """Runs and completes a batch; None if it did not go as others will.

        Who is queued again is added to `back`: others have these now.
        """
        batch = work.batch
        times = None
        in_hand = self._instance.in_hand
        in_hand.append(batch)
        try:
            times = self._run(batch, work, back)
        except Exception:
            # A bug of ours must not leave callers waiting, nor the queue without its worker.
            _log.exception(
                "%s failed while running a batch; this is a bug in tensorferry.batcher", self._name
            )
            self._fail_all(self._queue.finish(without(batch, back)))
        except BaseException:
            # What ends threads. Those who have no answer are not at fault, and ride once more.
            self._hand_back(without(batch, back), InstanceFailed(FELL), back)
            raise
        finally:
            in_hand.remove(batch)
            # Not earlier: a request that is cancelled while it runs may yet have to be joined.
            for request in without(batch, back) if back else batch:
                request.tensors = ()
        return times

    def _run(self, batch: Sequence[Request], work: BatchAssignment, back: list[Request]) -> Times | None:
        """Runs the work's batch, or a part of it again; None if it did not succeed at once."""
        whole = batch is work.batch
        outputs, error, times = self._execute(batch)
        if self._instance.pipelined and whole:
            self._queue.released(self._instance.index)
        if error is None:
            self._answer(batch, outputs, work, times)
            if not whole and self._queue.lessons.limits_rows:
                self._queue.lessons.fitted(batch, self._instance.index, times.ended - times.started)
            return times
        self._ledger.failed_to_run(work.reason if whole else None)
        self._record.failed(error, batch, self._instance.index, work, times)
        again: Callable[[Sequence[Request], BatchAssignment, list[Request]], None] | None = None
        if isinstance(error, InstanceFailed):
            self._hand_back(batch, error, back)
        elif isinstance(error, MemoryError):
            again = self._run_smaller
        elif len(batch) == 1 or isinstance(error, RunTimedOut):
            if isinstance(error, RunTimedOut):
                self._queue.outages.timed_out()
            self._fail(batch, error)
        else:
            again = self._run_halves
        # Its traceback knows this frame and those below: they would keep its arrays alive.
        del error
        if again is not None:
            again(batch, work, back)
        return None

    def _answer(
        self, batch: Sequence[Request], outputs: Sequence[Any], work: BatchAssignment, times: Times
    ) -> None:
        """Completes those of a batch that ran who are still there."""
        count = len(batch)
        alive = self._queue.finish(batch)
        positions: Sequence[int] = range(count)
        if len(alive) < count:
            still_there = set(map(id, alive))
            positions = [position for position, request in enumerate(batch) if id(request) in still_there]
            outputs = [outputs[position] for position in positions]
        try:
            self._completions.answer(alive, positions, outputs, batch, work, times, self._instance.index)
        except BaseException:
            # They are finished as far as the queue knows: nobody else would tell them.
            self._fail_all([request for request in alive if request.complete is not completed_twice])
            raise

    def _fail_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._completions.fail(request, BatcherError("internal error while running the batch"))

    def _fail(self, batch: Sequence[Request], error: BaseException) -> None:
        """Ends what is left of a batch, or the one request in it, with this error."""
        for request in self._queue.finish(batch):
            self._completions.fail(request, error if len(batch) == 1 else RunTimedOut(str(error)))

    def _hand_back(self, batch: Sequence[Request], error: InstanceFailed, back: list[Request]) -> None:
        """The instance failed: the batch's requests go back into the queue, or end."""
        ran, out = not isinstance(error, _NotRun), error.recover is not None
        queued, ended = self._queue.outages.hand_back(batch, self._instance.index, ran=ran, out=out)
        back += queued
        if ran:
            self._ledger.retried(len(queued))
        self._completions.turn_away(ended, error)

    def _execute(self, batch: Sequence[Request]) -> tuple[Sequence[Any], BaseException | None, Times]:
        """Joins, runs and splits a batch."""
        now, instance = self._clock.now, self._instance
        begun = ready = started = ended = now()
        try:
            staged = instance.staged
            joined = join(batch) if staged is None else staged.load(join(batch, staged.place))
            ready = now()
            with instance.turn:
                if instance.recover is not None or instance.given_up:
                    raise _NotRun("the device failed before the batch ran", recover=instance.recover)
                started = now()
                instance.running = batch
                try:
                    outputs = instance.model_fn(joined)
                except InstanceFailed as error:
                    instance.recover = error.recover
                    raise
                finally:
                    ended = now()
                    instance.running = None
                    if instance.given_up:
                        instance.given_up = False
                        self._queue.outages.returned(instance.index)
            if staged is not None:
                outputs = staged.fetch(outputs)
            answers = split(outputs, batch) if instance.batched else [outputs]
            return answers, None, _new(Times, (begun, ready, started, ended, []))
        except BaseException as error:
            # Whatever the model function raises must not end the worker: others wait for it.
            # Returned, not handled here: an error of the batch's halves would otherwise have
            # this one as its context, and with it, in the traceback, the neighbours' inputs.
            if isinstance(error, InstanceFailed) and not isinstance(error, _NotRun):
                # It may have failed beside its turn, too, as batches are copied.
                instance.recover = instance.recover or error.recover
            return (), error, Times(begun, ready, started, ended, [])

    def _run_halves(self, batch: Sequence[Request], work: BatchAssignment, back: list[Request]) -> None:
        alive = self._queue.still_running(batch)
        middle = (len(alive) + 1) // 2
        for half in (alive[:middle], alive[middle:]):
            if half and self._queue.kept_too_long(self._instance.index, half[0].started):
                self._hand_back(half, _NotRun("the batch took too long for the thread that ran it"), back)
            elif half:
                self._run(half, work, back)

    def _run_smaller(self, batch: Sequence[Request], work: BatchAssignment, back: list[Request]) -> None:
        """Runs a batch that did not fit into memory in parts of as many rows as are known to fit."""
        instance, first = self._instance, batch[0]
        if len(batch) == 1 and (first.rows_counted == 1 or not instance.divisible):
            self._fail(batch, OutOfMemory(_too_large(first, instance)))
            return
        self._queue.lessons.did_not_fit(batch, instance.index)
        pending = batch
        while pending := self._queue.still_running(pending):
            most = self._queue.lessons.rows_that_fit(instance.index, first.key)
            part = riders(pending, most)
            # These alone from now on: others may have got what went back.
            pending = pending[len(part) :]
            if part[0].rows_counted > most:
                self._run_in_parts(part[0], work, back)
            else:
                self._run(part, work, back)

    def _run_in_parts(self, request: Request, work: BatchAssignment, back: list[Request]) -> None:
        """Runs a request of more rows than fit into memory some rows at a time, and answers it as one."""
        index, alone = self._instance.index, (request,)
        outputs: list[Any] = []
        done, first = 0, None
        while done < request.rows:
            if not self._queue.still_running(alone):
                return
            most = self._queue.lessons.rows_that_fit(index, request.key)
            part = (cut(request, done, min(done + most, request.rows), completed_twice),)
            answers, error, times = self._execute(part)
            if error is None:
                self._queue.lessons.fitted(part, index, times.ended - times.started)
                outputs += answers
                done += part[0].rows
                first = first or times
                continue
            self._ledger.failed_to_run(None)
            part[0].arrival, part[0].started = request.arrival, request.started
            self._record.failed(error, part, index, work, times)
            smaller = isinstance(error, MemoryError)
            if isinstance(error, InstanceFailed):
                self._hand_back(alone, error, back)
            elif not smaller:
                self._fail(alone, error)
            # As in `_run`.
            del error
            if not smaller:
                return
            if part[0].rows == 1:
                self._fail(alone, OutOfMemory(_too_large(part[0], self._instance)))
                return
            self._queue.lessons.did_not_fit(part, index)
        try:
            joined = join_outputs(outputs)
        except Exception as error:
            # The parts' outputs do not fit together: other names, shapes, types.
            self._fail(alone, error)
            return
        self._answer(alone, [joined], work, times if first is None else first._replace(ended=times.ended))


def without(batch: Sequence[Request], back: Sequence[Request]) -> Sequence[Request]:
    """Those of a batch that did not go back into the queue."""
    gone = set(map(id, back))
    return [request for request in batch if id(request) not in gone]


def _too_large(request: Request, instance: Instance) -> str:
    if request.rows == 1:
        return "a single row of the request does not fit into the device's memory; send smaller inputs"
    if instance.batched:
        return (
            f"the request's {request.rows} rows, which this model runs together, do not fit into the device's memory; "
            "send fewer at once"
        )
    return "the request alone does not fit into the device's memory; send smaller inputs"
