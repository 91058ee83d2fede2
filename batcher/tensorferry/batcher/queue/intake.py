"""Intake: the way of a request from the door into its bucket.

All that a request costs which meets nothing unusual is done in one function: each call would add to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import QueueFull
from tensorferry.batcher.queue.admission import Admission
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.batch_selection import BatchSelector
from tensorferry.batcher.queue.client_quotas import ClientQuotas
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.queue.expiry import Expiry
from tensorferry.batcher.queue.reply_wait import ReplyWait
from tensorferry.batcher.queue.wakeup import WorkerWakeup
from tensorferry.batcher.request import QUEUED, Request

_INF = math.inf


class Intake:
    """Guarded by the queue's lock. `end` ends a queued request."""

    __slots__ = (
        "_admission",
        "_backlog",
        "_company",
        "_demand",
        "_devices",
        "_end",
        "_expiry",
        "_now",
        "_numbers",
        "_standing",
        "_waking",
        "accepted",
    )

    def __init__(
        self,
        clock: Clock,
        admission: Admission,
        backlog: Backlog,
        devices: Devices,
        departure: BatchSelector,
        expiry: Expiry,
        company: ReplyWait,
        waking: WorkerWakeup,
        end: Callable[[Request], None],
    ) -> None:
        self._now = clock.now
        self._admission = admission
        self._backlog = backlog
        self._devices = devices
        self._demand = departure.demand
        self._expiry = expiry
        self._company = company
        self._waking = waking
        self._standing = departure.standing
        self._end = end
        self._numbers = count(1)
        # Since the start; the parts of a request count as one.
        self.accepted = 0

    def put(self, requests: Sequence[Request]) -> tuple[Sequence[Request], bool]:
        """Accepts a request, or the parts of one: who is displaced, and whether a waiting worker must hear of it.

        Raises as `RequestQueue.put` does.
        """
        first = requests[0]
        rows, nbytes, deadline = first.rows_counted, first.nbytes, first.deadline
        if len(requests) > 1:
            rows = sum([request.rows_counted for request in requests])
            nbytes = sum([request.nbytes for request in requests])
        admission, backlog, expiry, waking = self._admission, self._backlog, self._expiry, self._waking
        now = self._now()
        displaced: Sequence[Request] = ()
        if (
            backlog.rows + rows > admission.max_rows
            or admission.held_bytes + nbytes > admission.max_bytes
            or admission.picky
        ):
            displaced = admission.admit(first, rows, nbytes, now)
        bucket = backlog.buckets.get(first.key)
        if bucket is None:
            bucket = backlog.bucket(first.key)
        with_deadline = deadline != _INF
        if with_deadline:
            expiry.needed = True
            devices = self._devices
            # Who has time for the longest batch has time for its own.
            if not deadline > (start := devices.next_start(now)) + bucket.profile.longest:
                admission.check_feasible(requests, bucket.profile, start, now)
            if backlog.rows > self._standing.enough:
                refusal = self._standing.refusal(first, bucket, now)
                if refusal is not None:
                    # It is what must be kept up with all the same.
                    self._demand[first.rank].arrived(now, rows, deadline - now)
                    raise refusal
        self.accepted += 1
        admission.held_bytes += nbytes
        for request in displaced:
            self._end(request)
        # First: whether a batch goes on waiting depends on who is back by now.
        returners = self._company.returners
        if now < returners.heeds_until:
            returners.arrived(now)
        else:
            returners.late += 1
        wake = False
        for request in requests:
            request.arrival = now
            request.state = QUEUED
            if with_deadline:
                request.edf_key = (deadline, next(self._numbers))
            if expiry.needed:
                self._demand[request.rank].arrived(now, request.rows_counted, deadline - now)
            backlog.add(request, bucket)
            # Under load nobody waits who has not been woken, and this is not asked.
            if not waking.asked:
                wake = waking.concerns(bucket, request.rows_counted, deadline, now) or wake
        if expiry.needed:
            expiry.queued(requests)
        return displaced, wake

    def pass_by(self, request: Request) -> None:
        """Counts a request that is answered without being queued. Raises as `RequestQueue.put` does."""
        self._admission.check_empty(request, self._now())
        self.accepted += 1

    def foreseen(self, deadline: float) -> QueueFull | None:
        """Why a request with this deadline would be turned away; None where that is not certain."""
        now = self._now()
        refusal = self._standing.foreseen(deadline, now)
        if refusal is not None:
            self._demand[0].arrived(now, 1, deadline - now)
        return refusal


class BoundedIntake(Intake):
    """One that holds each client to its bounds. Guarded by the queue's lock."""

    __slots__ = ("_quotas",)

    def __init__(self, quotas: ClientQuotas, *others: Any) -> None:
        super().__init__(*others)
        self._quotas = quotas

    def put(self, requests: Sequence[Request]) -> tuple[Sequence[Request], bool]:
        """As `Intake.put`."""
        now, quotas = self._now(), self._quotas
        rows = sum([request.rows_counted for request in requests])
        nbytes = sum([request.nbytes for request in requests])
        admission = self._admission
        if not (admission.closed or admission.broken is not None):
            # Who is refused in any case should hear why.
            quotas.check(requests[0].client, rows, nbytes, now, admission.drain_time)
        answer = super().put(requests)
        quotas.accepted(requests, now)
        return answer
