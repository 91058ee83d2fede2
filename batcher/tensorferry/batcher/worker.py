"""A worker: takes batches for its device, joins, runs and splits them, and completes their requests."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.collate import join, split
from tensorferry.batcher.completions import Completions, completed_twice
from tensorferry.batcher.errors import BatcherError
from tensorferry.batcher.queue import RequestQueue
from tensorferry.batcher.request import Request
from tensorferry.batcher.staged import StagedModel
from tensorferry.batcher.statistics import Ledger
from tensorferry.batcher.work import Times, Work

_log = logging.getLogger("tensorferry.batcher")

_new = tuple.__new__


class Instance:
    """A model function on its device, run by one worker, or by two in turn when `pipelined`."""

    def __init__(self, index: int, model_fn: Callable[[Any], Any], *, batched: bool, pipelined: bool) -> None:
        self.index = index
        self.model_fn = model_fn
        self.staged = model_fn if isinstance(model_fn, StagedModel) else None
        self.batched = batched
        self.pipelined = pipelined
        # Held by the worker whose batch the device runs, where there are two. Nothing but the model
        # function is called while it is held.
        self.turn: AbstractContextManager[object] = threading.Lock() if pipelined else nullcontext()


class Worker:
    """One thread's work; `run` returns when the queue is closed and empty."""

    def __init__(
        self,
        instance: Instance,
        queue: RequestQueue,
        completions: Completions,
        ledger: Ledger,
        clock: Clock,
        name: str,
    ) -> None:
        self._instance = instance
        self._queue = queue
        self._completions = completions
        self._ledger = ledger
        self._clock = clock
        self._name = name
        # Threads that carry out work here, though they are not the worker's.
        self._attending: set[threading.Thread] = set()

    def run(self) -> None:
        """Takes work until there is none."""
        while (work := self._queue.take(self._instance.index)) is not None:
            self._carry_out(work)
            # A worker idles for hours with its last batch in hand otherwise.
            del work

    def attend(self, most_seconds: float) -> float:
        """Carries out, on the calling thread, what may leave now and should take at most so long.

        Returns as `RequestQueue.take_short` does: when to attend again.
        """
        work = self._queue.take_short(most_seconds)
        if isinstance(work, float):
            return work
        thread = threading.current_thread()
        # A completion, too, may call this.
        nested = thread in self._attending
        self._attending.add(thread)
        try:
            while not isinstance(work, float):
                if not self._carry_out(work):
                    return math.inf
                work = self._queue.take_short(most_seconds)
            return work
        finally:
            if not nested:
                self._attending.discard(thread)

    @property
    def attended(self) -> bool:
        """Whether the calling thread is inside `attend` and carries out work."""
        return threading.current_thread() in self._attending

    def _carry_out(self, work: Work) -> bool:
        """Completes what the work holds; whether anything is queued after it."""
        batch, device, taken = work.batch, self._instance.index, self._clock.now()
        if work.expired:
            self._completions.expire(work.expired)
        if work.shed:
            self._completions.shed(work.shed, "others make their deadlines", self._queue.drain_time())
        times = None
        if batch:
            times = self._run_guarded(work)
        if times is None:
            return self._queue.ran(batch, None, device=device)
        _, ready, started, ended = times
        seconds, before, after = ended - started, ready - taken, self._clock.now() - ended
        if work.predicted:
            self._ledger.predicted(work.predicted, before + seconds + after)
        return self._queue.ran(batch, seconds, before, after, device=device)

    def _run_guarded(self, work: Work) -> Times | None:
        """Runs and completes a batch; None if it did not go as others will."""
        batch = work.batch
        times = None
        try:
            times = self._run(batch, work)
        except Exception:
            # A bug of ours must not leave callers waiting, nor the queue without its worker.
            _log.exception(
                "%s failed while running a batch; this is a bug in tensorferry.batcher", self._name
            )
            self._fail_all(self._queue.finish(batch))
        # Not earlier: a request that is cancelled while it runs may yet have to be joined.
        for request in batch:
            request.tensors = ()
        return times

    def _run(self, batch: Sequence[Request], work: Work) -> Times | None:
        """Runs the work's batch, or a part of it again; None if it did not succeed at once."""
        outputs, error, times = self._execute(batch)
        if self._instance.pipelined and batch is work.batch:
            self._queue.released(self._instance.index)
        count = len(batch)
        if error is not None:
            self._ledger.failed_to_run(work.reason if batch is work.batch else None)
            if count == 1:
                for request in self._queue.finish(batch):
                    self._completions.fail(request, error)
            # Its traceback knows this frame and those below: they would keep its arrays alive.
            del error
            self._run_halves(batch, work)
            return None
        alive = self._queue.finish(batch)
        positions: Sequence[int] = range(count)
        if len(alive) < count:
            still_there = set(map(id, alive))
            positions = [position for position, request in enumerate(batch) if id(request) in still_there]
            outputs = [outputs[position] for position in positions]
        try:
            self._completions.answer(alive, positions, outputs, batch, work, times)
        except Exception:
            # They are finished as far as the queue knows: nobody else would tell them.
            self._fail_all([request for request in alive if request.complete is not completed_twice])
            raise
        return times

    def _fail_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._completions.fail(request, BatcherError("internal error while running the batch"))

    def _execute(self, batch: Sequence[Request]) -> tuple[Sequence[Any], BaseException | None, Times]:
        now, instance = self._clock.now, self._instance
        begun = ready = started = ended = now()
        try:
            staged = instance.staged
            joined = join(batch) if staged is None else staged.load(join(batch, staged.place))
            ready = now()
            with instance.turn:
                started = now()
                try:
                    outputs = instance.model_fn(joined)
                finally:
                    ended = now()
            if staged is not None:
                outputs = staged.fetch(outputs)
            answers = split(outputs, batch) if instance.batched else [outputs]
            return answers, None, _new(Times, (begun, ready, started, ended))
        except BaseException as error:
            # Whatever the model function raises must not end the worker: others wait for it.
            # Returned, not handled here: an error of the batch's halves would otherwise have
            # this one as its context, and with it, in the traceback, the neighbours' inputs.
            return (), error, Times(begun, ready, started, ended)

    def _run_halves(self, batch: Sequence[Request], work: Work) -> None:
        alive = self._queue.still_running(batch)
        middle = (len(alive) + 1) // 2
        for half in (alive[:middle], alive[middle:]):
            if half:
                self._run(half, work)
