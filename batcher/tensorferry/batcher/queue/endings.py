"""How requests leave the queue for good, and how the queue itself ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.queue.admission import Admission
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.client_quotas import ClientQuotas
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.request import DONE, RUNNING, Request


class Ends:
    """Guarded by the queue's lock, on which `all_done` is built, and `expiry_due`, the condition of `Expiry`."""

    __slots__ = (
        "_admission",
        "_backlog",
        "_devices",
        "_drainers",
        "_expiry_due",
        "_quotas",
        "abandoned",
        "all_done",
        "busy",
        "closing",
        "running",
    )

    def __init__(
        self,
        backlog: Backlog,
        admission: Admission,
        devices: Devices,
        quotas: ClientQuotas | None,
        expiry_due: threading.Condition,
        all_done: threading.Condition,
    ) -> None:
        self._backlog = backlog
        self._admission = admission
        self._devices = devices
        self._quotas = quotas
        self._expiry_due = expiry_due
        # Nothing is queued and nobody is busy. Waited for by drain; notified by whoever ends it.
        self.all_done = all_done
        # Threads that wait for it.
        self._drainers = 0
        # Requests whose batch has left.
        self.running = 0
        # Threads that took work, or the expired, and have not yet run and completed all of it.
        self.busy = 0
        # Nothing is accepted any more.
        self.closing = False
        # Nothing goes back into the queue any more: nobody may be left to run it.
        self.abandoned = False

    def finish(self, requests: Sequence[Request], nbytes: int) -> list[Request]:
        """Ends running requests, of so many bytes together; returns those that were still alive."""
        alive = list(requests)
        lost = []
        for request in alive:
            if request.state is RUNNING:
                request.state = DONE
            else:
                lost.append(request)
        if lost:
            gone = set(lost)
            alive = [request for request in alive if request not in gone]
            nbytes = sum([request.nbytes for request in alive])
        self._admission.held_bytes -= nbytes
        self.running -= len(alive)
        if self._quotas is not None:
            for request in alive:
                self._quotas.done(request)
        return alive

    def end_queued(self, request: Request) -> None:
        """Ends a request that is queued."""
        self._backlog.remove(request)
        self.end(request)

    def end(self, request: Request) -> None:
        """Ends a request that is in no bucket, and runs no more."""
        self.release(request)
        self.tell_if_done()

    def release(self, request: Request) -> None:
        """Ends it likewise, but where the caller goes on with others of its batch."""
        request.state = DONE
        self._admission.held_bytes -= request.nbytes
        if self._quotas is not None:
            self._quotas.done(request)

    def end_all_queued(self) -> list[Request]:
        """Ends all that is queued, and returns it."""
        queued = [request for bucket in self._backlog.buckets.values() for request in bucket]
        for request in queued:
            self.end_queued(request)
        return queued

    def rest(self) -> bool:
        """A thread is busy no more; whether anything is queued."""
        self.busy -= 1
        if self._backlog.rows:
            return True
        if self._drainers or self.closing:
            self.tell_if_done()
        return False

    def tell_if_done(self) -> None:
        """Wakes those who wait for the end, if nothing is queued."""
        if self._backlog.rows:
            return
        if self._drainers and not self.busy:
            self.all_done.notify_all()
        if self.closing:
            self._expiry_due.notify()
            self._devices.back_or_done.notify_all()

    def close(self) -> None:
        """Nothing is accepted from now on."""
        self.closing = True
        self._admission.close()
        self._devices.notify_all()
        self._expiry_due.notify()

    def abandon(self) -> list[Request]:
        """Ends all that is queued, and lets nothing back in; the caller completes them. After `close`.

        Workers need no other notice: `close` woke them all, and the end of the last request wakes those that
        have waited since.
        """
        self.abandoned = True
        return self.end_all_queued()

    def wait_done(self, clock: Clock, until: float) -> bool:
        """Waits until nothing is queued and nobody busy, at most to `until`; whether that came about."""
        while self._backlog.rows or self.busy:
            if clock.now() >= until:
                return False
            self._drainers += 1
            try:
                clock.wait(self.all_done, until)
            finally:
                self._drainers -= 1
        return True
