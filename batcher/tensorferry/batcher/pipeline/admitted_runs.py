"""The requests that are in a pipeline."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tensorferry.batcher.clock import Clock, wait_for
from tensorferry.batcher.errors import BatcherClosed
from tensorferry.batcher.pipeline.run import PipelineRun
from tensorferry.batcher.queue.client_quotas import ClientQuotas
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import ClientPolicy


class AdmittedRuns:
    """The requests from their entry to the return of their completion, and the quotas of their clients. Thread-safe."""

    def __init__(self, clock: Clock, clients: ClientPolicy | None) -> None:
        self._clock = clock
        # Guards the fields below, and `accepted` of every run. Nothing but waiting is done while it is held.
        self._lock = threading.Lock()
        self._quotas = ClientQuotas(clients) if clients is not None and clients.bounds else None
        self._runs: set[PipelineRun] = set()
        # Requests accepted since the start.
        self._accepted = 0
        # Nothing may enter any more.
        self._closing = False
        # `_runs` became empty.
        self._empty = threading.Condition(self._lock)

    @property
    def bounds_clients(self) -> bool:
        """Return whether there are quotas."""
        return self._quotas is not None

    @property
    def accepted(self) -> int:
        """Return how many requests were accepted since the start."""
        with self._lock:
            return self._accepted

    def enter(self, run: PipelineRun, drain_time: float, *, skip_admission: bool) -> float:
        """Let a request in and return the time; raise if the pipeline is closed, or its client has too many.

        With `skip_admission` only the former is checked. `drain_time` is how long the queued requests take, in seconds.
        """
        request = run.request
        with self._lock:
            now = self._clock.now()
            self._check_open_locked()
            if self._quotas is not None:
                if not skip_admission:
                    self._quotas.check(
                        request.client, request.rows_counted, request.nbytes, now, lambda: drain_time
                    )
                self._quotas.accepted((request,), now)
            self._runs.add(run)
        return now

    def check_open(self) -> None:
        """Raise BatcherClosed if nothing may enter any more."""
        with self._lock:
            self._check_open_locked()

    def _check_open_locked(self) -> None:
        if self._closing:
            raise BatcherClosed("the batcher is draining or closed and accepts no new requests")

    def accept(self, run: PipelineRun) -> None:
        """Count a request as accepted, unless it is already. Called before it is counted as ended."""
        with self._lock:
            if not run.accepted:
                run.accepted = True
                self._accepted += 1

    def accept_empty(self) -> None:
        """Count a request that is answered without a run."""
        with self._lock:
            self._accepted += 1

    def reject(self, request: Request) -> None:
        """Take back what `enter` counted for its client, because a stage has rejected the request."""
        if self._quotas is not None:
            with self._lock:
                self._quotas.rejected(request, self._clock.now())

    def release(self, request: Request) -> None:
        """Free the quota of a request that has ended."""
        if self._quotas is not None:
            with self._lock:
                self._quotas.done(request)

    def leave(self, run: PipelineRun) -> bool:
        """Forget a request; return whether it was the last one of a closed pipeline."""
        with self._lock:
            self._runs.discard(run)
            if self._runs:
                return False
            self._empty.notify_all()
            return self._closing

    def close(self) -> bool:
        """Let nothing in from now on; return whether there are no requests."""
        with self._lock:
            self._closing = True
            return not self._runs

    def wait_empty(self, until: float) -> bool:
        """Wait until there are no requests, at most until `until`; return whether that is so."""
        with self._lock:
            return wait_for(self._clock, self._empty, lambda: not self._runs, until)

    def snapshot(self) -> Sequence[PipelineRun]:
        """Return the requests that have not left."""
        with self._lock:
            return list(self._runs)
