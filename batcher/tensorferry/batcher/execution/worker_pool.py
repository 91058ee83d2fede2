"""The crew: the threads that run a batcher's batches and look after its deadlines, and what is done when one hangs."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import InstanceFailed, RunTimedOut
from tensorferry.batcher.execution.completion import Completions
from tensorferry.batcher.execution.executor import Running
from tensorferry.batcher.execution.instance import Instance
from tensorferry.batcher.execution.worker import Health, Worker
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.statistics.counters import Ledger
from tensorferry.batcher.statistics.recent_batches import Record
from tensorferry.batcher.supervision import last

_log = logging.getLogger("tensorferry.batcher")

# After so many seconds deadlines are looked after again, should that have failed.
_EXPIRY_SECONDS = 0.1


class Crew:
    """A worker for each instance, two where it is pipelined, and one thread for the deadlines. Thread-safe.

    They begin at once, and end when the queue is closed and empty.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        queue: RequestQueue,
        completions: Completions,
        ledger: Ledger,
        record: Record,
        clock: Clock,
        name: str,
        health: Health,
    ) -> None:
        self._instances = instances
        self._queue = queue
        self._completions = completions
        self._clock = clock
        self._name = name

        def worker(instance: Instance) -> Worker:
            running = Running(instance, queue, completions, ledger, record, clock, name)
            return Worker(instance, queue, running, completions, ledger, clock, name, health)

        # Whose work is done on threads that are no worker's.
        self.attendant = worker(instances[0])
        posts = list(instances) * (2 if instances[0].pipelined else 1)
        runs: list[tuple[str, Callable[[], None]]] = [
            (f"{name}-worker-{number}", worker(instance).run) for number, instance in enumerate(posts)
        ]
        runs.append((f"{name}-expiry", self._expire))
        self._threads = [threading.Thread(target=run, name=title, daemon=True) for title, run in runs]
        for thread in self._threads:
            thread.start()

    @property
    def on_duty(self) -> bool:
        """Whether the calling thread is one that runs batches, so that to wait for these is to wait for itself."""
        return threading.current_thread() in self._threads or self.attendant.attended

    def join(self, until: float) -> None:
        """Waits for the end of each thread, at most to `until`."""
        for thread in self._threads:
            thread.join(None if math.isinf(until) else max(0.0, until - self._clock.now()))

    @property
    def ended(self) -> bool:
        """Whether no thread is left."""
        return not any(thread.is_alive() for thread in self._threads)

    def give_up(self, instance: int, error: RunTimedOut) -> None:
        """Ends what an instance runs now and does not return from; see `Batcher.give_up`."""
        one = self._instances[instance]
        one.given_up = True
        failed = InstanceFailed(str(error))
        queued = self._queue.outages.give_up(instance, failed)
        running, in_hand = one.running, tuple(one.in_hand)
        if running is None or not one.given_up:
            # It was over already.
            one.given_up = False
            self._queue.outages.returned(instance)
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
