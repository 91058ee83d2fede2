"""A worker: takes batches for its device, joins, runs and splits them, and completes their requests."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.collate import join, split
from tensorferry.batcher.completions import Completions, completed_twice
from tensorferry.batcher.errors import (
    BatcherError,
    DeadlineExceeded,
    InstanceFailed,
    OutOfMemory,
    RunTimedOut,
)
from tensorferry.batcher.instance import Instance
from tensorferry.batcher.lasting import last
from tensorferry.batcher.outages import RECOVER
from tensorferry.batcher.queue import RequestQueue
from tensorferry.batcher.record import Record
from tensorferry.batcher.request import Request, cut, join_outputs
from tensorferry.batcher.riding import riders
from tensorferry.batcher.statistics import Ledger
from tensorferry.batcher.work import Times, Work, in_vain

_log = logging.getLogger("tensorferry.batcher")

_new = tuple.__new__

# A worker that ended unexpectedly is replaced after so many seconds, if that goes on after twice as many, up to
# the last; after so many times it is said that only a restart can help. All is forgotten after a while.
_FIRST_SECONDS = 0.1
_LAST_SECONDS = 2.0
_HOPELESS_FALLS = 6
_FORGET_SECONDS = 60.0

# Told of an instance whose worker has ended unexpectedly, why, and whether nothing but a restart of the process
# can help; with None for the reason when it works again.
Health = Callable[[int, str | None, bool], None]


_FELL = "what ran the batch ended unexpectedly"


class _NotRun(InstanceFailed):
    """The batch was not run at all: what would have run it was broken already."""


class _InVain(DeadlineExceeded):
    """The batch was not run at all: the one before it took so long that nobody would have been answered in time."""


class Worker:
    """One thread's work; `run` returns when the queue is closed and empty."""

    def __init__(
        self,
        instance: Instance,
        queue: RequestQueue,
        completions: Completions,
        ledger: Ledger,
        record: Record,
        clock: Clock,
        name: str,
        health: Health = lambda instance, reason, hopeless: None,
    ) -> None:
        self._instance = instance
        self._queue = queue
        self._completions = completions
        self._ledger = ledger
        self._record = record
        self._clock = clock
        self._name = name
        # Threads that carry out work here, though they are not the worker's.
        self._attending: set[threading.Thread] = set()
        self._health = health
        # How often it has ended unexpectedly of late, and when the last time.
        self._falls = 0
        self._fell_at = -math.inf

    def run(self) -> None:
        """Takes work until there is none. What escapes from that ends nobody's wait: it is begun again."""
        last(self._run_until_closed, self._begin_again)

    def _run_until_closed(self) -> None:
        while (work := self._queue.take(self._instance.index)) is not None:
            if work is RECOVER:
                self._recover()
            else:
                self._carry_out(work)
            # A worker idles for hours with its last batch in hand otherwise.
            del work

    def _begin_again(self, fault: BaseException) -> None:
        """The worker has ended: its device takes no batches for a moment, and whoever watches it is told."""
        now, instance = self._clock.now(), self._instance
        self._falls = self._falls + 1 if now < self._fell_at + _FORGET_SECONDS else 1
        self._fell_at = now
        seconds = min(_FIRST_SECONDS * 2 ** (self._falls - 1), _LAST_SECONDS)
        hopeless = self._falls >= _HOPELESS_FALLS
        reason = f"a worker ended unexpectedly ({type(fault).__name__}) and is started anew"
        if hopeless:
            reason = f"workers end unexpectedly ({type(fault).__name__}), {self._falls} times by now"
        failed = InstanceFailed(reason, seconds)
        # First, so that whoever brings it back finds it so.
        instance.fallen = True
        ended = self._queue.fell(instance.index, seconds, failed if hopeless else None)
        self._tell(reason, hopeless=hopeless)
        _log.error(
            "%s: a worker ended unexpectedly; this is a bug. Another takes its place in %g s",
            self._name,
            seconds,
            exc_info=fault,
        )
        self._completions.turn_away(ended, failed)
        if ended:
            self._queue.expired_completed()

    def _tell(self, reason: str | None, *, hopeless: bool = False) -> None:
        try:
            self._health(self._instance.index, reason, hopeless)
        except BaseException:
            _log.exception("%s: who is told of its health raised", self._name)

    def attend(self, most_seconds: float) -> float:
        """Carries out, on the calling thread, what may leave now and should take at most so long.

        Returns as `RequestQueue.take_short` does: when to attend again.
        """
        try:
            work = self._queue.take_short(most_seconds)
        except BaseException:
            self._dropped()
            raise
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
        except BaseException:
            self._dropped()
            raise
        finally:
            if not nested:
                self._attending.discard(thread)

    def _dropped(self) -> None:
        """The calling thread does no more here: a worker takes what is queued."""
        if ended := self._queue.dropped():
            self._completions.turn_away(ended, InstanceFailed(_FELL))
            self._queue.expired_completed()

    @property
    def attended(self) -> bool:
        """Whether the calling thread is inside `attend` and carries out work."""
        return threading.current_thread() in self._attending

    def _carry_out(self, work: Work) -> bool:
        """Completes what the work holds; whether anything is queued after it."""
        batch, device, times = work.batch, self._instance.index, None
        # Those that went back into the queue: others have them now.
        back: list[Request] = []
        try:
            taken = self._clock.now()
            if work.expired:
                self._completions.expire(work.expired)
            if work.shed:
                self._completions.shed(work.shed, "others make their deadlines", self._queue.drain_time())
            if batch:
                times = self._run_guarded(work, back)
            if times is not None:
                _, ready, started, ended, done = times
                now = self._clock.now()
                done.append(now)
                seconds, before, after = ended - started, ready - taken, now - ended
                if work.predicted:
                    self._ledger.predicted(work.predicted, before + seconds + after)
        except BaseException:
            self._let_fall(work, back)
            raise
        if times is None:
            return self._queue.ran(batch, None, device=device)
        return self._queue.ran(batch, seconds, before, after, device=device)

    def _let_fall(self, work: Work, back: Sequence[Request]) -> None:
        """The calling thread cannot go on with the work: whoever is left in it is queued again, or told."""
        left = _without(work.batch, back)
        queued, ended = self._queue.hand_back(left, self._instance.index, ran=True, out=False)
        self._ledger.retried(len(queued))
        untold = [
            request for request in (*work.expired, *work.shed) if request.complete is not completed_twice
        ]
        self._completions.turn_away([*ended, *untold], InstanceFailed(_FELL))
        self._queue.ran(work.batch, None, device=self._instance.index)

    def _recover(self) -> None:
        """Brings the instance back, or says when to try again; whoever cannot wait for that is told."""
        instance = self._instance
        recover = instance.recover
        try:
            if recover is not None:
                recover()
        except InstanceFailed as error:
            failed = InstanceFailed(str(error), error.retry_after)
        except BaseException:
            _log.exception("%s: what brings its device back raised; it is tried again", self._name)
            failed = InstanceFailed("the device failed and could not be brought back yet")
        else:
            instance.recover = None
            self._queue.recovered(instance.index)
            if instance.fallen:
                instance.fallen = False
                self._tell(None)
            return
        queued = self._queue.not_recovered(instance.index, failed)
        self._completions.turn_away(queued, failed)
        if queued:
            self._queue.expired_completed()

    def _run_guarded(self, work: Work, back: list[Request]) -> Times | None:
        """Runs and completes a batch; None if it did not go as others will."""
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
            self._fail_all(self._queue.finish(_without(batch, back)))
        except BaseException:
            # What ends threads. Those who have no answer are not at fault, and ride once more.
            self._hand_back(_without(batch, back), InstanceFailed(_FELL), back)
            raise
        finally:
            in_hand.remove(batch)
            # Not earlier: a request that is cancelled while it runs may yet have to be joined.
            for request in _without(batch, back) if back else batch:
                request.tensors = ()
        return times

    def _run(self, batch: Sequence[Request], work: Work, back: list[Request]) -> Times | None:
        """Runs the work's batch, or a part of it again; None if it did not succeed at once."""
        whole = batch is work.batch
        outputs, error, times = self._execute(batch, work.predicted if whole else math.inf)
        if self._instance.pipelined and whole:
            self._queue.released(self._instance.index)
        if error is None:
            self._answer(batch, outputs, work, times)
            if not whole and self._queue.limits_rows:
                self._queue.fitted(batch, self._instance.index, times.ended - times.started)
            return times
        if isinstance(error, _InVain):
            self._record.failed(error, batch, self._instance.index, work, times)
            for request in self._queue.finish(batch):
                self._completions.fail(request, DeadlineExceeded(str(error)))
            return None
        self._ledger.failed_to_run(work.reason if whole else None)
        self._record.failed(error, batch, self._instance.index, work, times)
        again: Callable[[Sequence[Request], Work, list[Request]], None] | None = None
        if isinstance(error, InstanceFailed):
            self._hand_back(batch, error, back)
        elif isinstance(error, MemoryError):
            again = self._run_smaller
        elif len(batch) == 1 or isinstance(error, RunTimedOut):
            if isinstance(error, RunTimedOut):
                self._queue.timed_out()
            self._fail(batch, error)
        else:
            again = self._run_halves
        # Its traceback knows this frame and those below: they would keep its arrays alive.
        del error
        if again is not None:
            again(batch, work, back)
        return None

    def _answer(self, batch: Sequence[Request], outputs: Sequence[Any], work: Work, times: Times) -> None:
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
        queued, ended = self._queue.hand_back(batch, self._instance.index, ran=ran, out=out)
        back += queued
        if ran:
            self._ledger.retried(len(queued))
        self._completions.turn_away(ended, error)

    def _execute(
        self, batch: Sequence[Request], predicted: float = math.inf
    ) -> tuple[Sequence[Any], BaseException | None, Times]:
        """Joins, runs and splits a batch; `predicted` is how long that should take, inf: it is run in any case."""
        now, instance = self._clock.now, self._instance
        # Nobody is late for a batch that had not to wait for another's end.
        waits = instance.pipelined and predicted < math.inf
        latest = max([request.deadline for request in batch]) if waits else math.inf
        begun = ready = started = ended = now()
        try:
            staged = instance.staged
            joined = join(batch) if staged is None else staged.load(join(batch, staged.place))
            ready = now()
            with instance.turn:
                if instance.recover is not None or instance.given_up:
                    raise _NotRun("the device failed before the batch ran", recover=instance.recover)
                started = now()
                if latest < math.inf and in_vain(predicted, latest, begun, ready, started):
                    raise _InVain("the deadline could not be met: the batch before took longer than expected")
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
                        self._queue.returned(instance.index)
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

    def _run_halves(self, batch: Sequence[Request], work: Work, back: list[Request]) -> None:
        alive = self._queue.still_running(batch)
        middle = (len(alive) + 1) // 2
        for half in (alive[:middle], alive[middle:]):
            if half:
                self._run(half, work, back)

    def _run_smaller(self, batch: Sequence[Request], work: Work, back: list[Request]) -> None:
        """Runs a batch that did not fit into memory in parts of as many rows as are known to fit."""
        instance, first = self._instance, batch[0]
        if len(batch) == 1 and (first.cost == 1 or not instance.divisible):
            self._fail(batch, OutOfMemory(_too_large(first, instance)))
            return
        self._queue.did_not_fit(batch, instance.index)
        pending = batch
        while pending := self._queue.still_running(pending):
            most = self._queue.rows_that_fit(instance.index, first.key)
            part = riders(pending, most)
            # These alone from now on: others may have got what went back.
            pending = pending[len(part) :]
            if part[0].cost > most:
                self._run_in_parts(part[0], work, back)
            else:
                self._run(part, work, back)

    def _run_in_parts(self, request: Request, work: Work, back: list[Request]) -> None:
        """Runs a request of more rows than fit into memory some rows at a time, and answers it as one."""
        index, alone = self._instance.index, (request,)
        outputs: list[Any] = []
        done, first = 0, None
        while done < request.rows:
            if not self._queue.still_running(alone):
                return
            most = self._queue.rows_that_fit(index, request.key)
            part = (cut(request, done, min(done + most, request.rows), completed_twice),)
            answers, error, times = self._execute(part)
            if error is None:
                self._queue.fitted(part, index, times.ended - times.started)
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
            self._queue.did_not_fit(part, index)
        try:
            joined = join_outputs(outputs)
        except Exception as error:
            # The parts' outputs do not fit together: other names, shapes, types.
            self._fail(alone, error)
            return
        self._answer(alone, [joined], work, times if first is None else first._replace(ended=times.ended))


def _without(batch: Sequence[Request], back: Sequence[Request]) -> Sequence[Request]:
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
