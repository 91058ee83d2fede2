"""A worker: takes work for its device and carries it out, and goes on whatever escapes from that."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import InstanceFailed
from tensorferry.batcher.execution.completion import Completions, completed_twice
from tensorferry.batcher.execution.executor import FELL, Running, without
from tensorferry.batcher.execution.instance import Instance
from tensorferry.batcher.queue.device_failures import RECOVER
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Request
from tensorferry.batcher.statistics.counters import Ledger
from tensorferry.batcher.supervision import last

_log = logging.getLogger("tensorferry.batcher")

# A worker that ended unexpectedly is replaced after so many seconds, if that goes on after twice as many, up to
# the last; after so many times it is said that only a restart can help. All is forgotten after a while.
_FIRST_SECONDS = 0.1
_LAST_SECONDS = 2.0
_HOPELESS_FALLS = 6
_FORGET_SECONDS = 60.0

# Told of an instance whose worker has ended unexpectedly, why, and whether nothing but a restart of the process
# can help; with None for the reason when it works again.
Health = Callable[[int, str | None, bool], None]


class Worker:
    """One thread's work; `run` returns when the queue is closed and empty."""

    def __init__(
        self,
        instance: Instance,
        queue: RequestQueue,
        running: Running,
        completions: Completions,
        ledger: Ledger,
        clock: Clock,
        name: str,
        health: Health = lambda instance, reason, hopeless: None,
    ) -> None:
        self._instance = instance
        self._queue = queue
        self._running = running
        self._completions = completions
        self._ledger = ledger
        self._clock = clock
        self._name = name
        # Threads that carry out work here, though they are not the worker's, by number.
        self._attending: set[int] = set()
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
        ended = self._queue.outages.fell(instance.index, seconds, failed if hopeless else None)
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
        thread = threading.get_ident()
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
        if ended := self._queue.outages.dropped():
            self._completions.turn_away(ended, InstanceFailed(FELL))
            self._queue.expired_completed()

    @property
    def attended(self) -> bool:
        """Whether the calling thread is inside `attend` and carries out work."""
        return threading.get_ident() in self._attending

    def _carry_out(self, work: BatchAssignment) -> bool:
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
                times = self._running.run(work, back)
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
            return self._queue.ran(batch, None, self._clock.now() - taken, device=device)
        return self._queue.ran(batch, seconds, before, after, device=device)

    def _let_fall(self, work: BatchAssignment, back: Sequence[Request]) -> None:
        """The calling thread cannot go on with the work: whoever is left in it is queued again, or told."""
        left = without(work.batch, back)
        queued, ended = self._queue.outages.hand_back(left, self._instance.index, ran=True, out=False)
        self._ledger.retried(len(queued))
        untold = [
            request for request in (*work.expired, *work.shed) if request.complete is not completed_twice
        ]
        self._completions.turn_away([*ended, *untold], InstanceFailed(FELL))
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
            self._queue.outages.recovered(instance.index)
            if instance.fallen:
                instance.fallen = False
                self._tell(None)
            return
        queued = self._queue.outages.not_recovered(instance.index, failed)
        self._completions.turn_away(queued, failed)
        if queued:
            self._queue.expired_completed()
