"""Dispatch: what a worker is given when it asks for work for its device, or for how long it has none."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.policy.close_rule import Close, Wait, decide
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.batch_selection import BatchSelector
from tensorferry.batcher.queue.devices import Device, Devices
from tensorferry.batcher.queue.endings import Ends
from tensorferry.batcher.queue.expiry import Expiry
from tensorferry.batcher.queue.reply_wait import ReplyWait
from tensorferry.batcher.queue.wakeup import WorkerWakeup
from tensorferry.batcher.request import QUEUED, RUNNING, BatchAssignment, CloseReason, Request
from tensorferry.batcher.settings import Limits

_INF = math.inf

# For what is done for each batch: to look a member up costs more.
_IDLE = CloseReason.IDLE

_new = tuple.__new__


class Dispatch:
    """Guarded by the queue's lock."""

    __slots__ = (
        "_backlog",
        "_clock",
        "_company",
        "_departure",
        "_devices",
        "_dying",
        "_ends",
        "_expiry",
        "_limits",
        "_orphans",
        "_pipelined",
        "_waking",
    )

    def __init__(
        self,
        clock: Clock,
        limits: Limits,
        backlog: Backlog,
        devices: Devices,
        departure: BatchSelector,
        expiry: Expiry,
        company: ReplyWait,
        waking: WorkerWakeup,
        ends: Ends,
        *,
        pipelined: bool,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._backlog = backlog
        self._devices = devices
        self._departure = departure
        self._expiry = expiry
        self._company = company
        self._waking = waking
        self._ends = ends
        self._pipelined = pipelined
        # Ended by a thread that takes work, which has yet to hand them out.
        self._dying: Sequence[Request] = ()
        # The same, once it fell before it could.
        self._orphans: list[Request] = []

    def poll(self, device: Device) -> BatchAssignment | Wait | None:
        """What a device's worker has to do now, or until when nothing; None when the queue is closed and empty."""
        now, backlog = self._clock.now(), self._backlog
        start = now
        # What left for it is unanswered at least as long as it is in flight.
        if device.unanswered:
            turn = self._waking.turn(device, now)
            if turn > now:
                if backlog.rows and not device.idle:
                    # It may have been woken instead of one that can start at once.
                    self._devices.wake_idle()
                return Wait(turn if backlog.rows else _INF)
            start = device.starts(now)
        dead = self._dying = self._expiry.take(start, now) if self._expiry.needed else ()
        credits, closing = self._departure.credits(now), self._ends.closing
        decision = decide(backlog.buckets, now, self._limits, closing, credits)
        if isinstance(decision, Close):
            if decision.reason is _IDLE and not closing and len(backlog.buckets) == 1:
                bucket = backlog.buckets[decision.key]
                most = self._limits.max_batch_size
                if self._departure.row_limits.needed:
                    most = self._departure.row_limits.rows(self._devices.each.index(device), decision.key)
                until = self._company.wait_until(bucket, now, most - bucket.rows)
                if until > now and not dead:
                    return self._waking.wait_for_company(device, until)
            return self._close(device, decision, now, dead)
        if dead:
            return self._hand_out(BatchAssignment((), None, tuple(dead)), now)
        if closing and not backlog.rows:
            return None
        return decision

    def _close(self, device: Device, close: Close, now: float, dead: Sequence[Request]) -> BatchAssignment:
        profile, ends = self._backlog.buckets[close.key].profile, self._ends
        batch, shed, riding = self._departure.take(close, device, now)
        before = device.unanswered, ends.running, ends.busy
        try:
            for request in batch:
                request.state = RUNNING
                request.started = now
            ends.running += len(batch)
            rows = sum(riding)
            keeps = whole = profile.whole(rows)
            if self._pipelined:
                device.preparation, keeps = profile.preparation(rows), profile.mean(rows)
            self._devices.left(device, now, keeps)
            # As `Work(...)`, in half the time.
            work = _new(BatchAssignment, (tuple(batch), close.reason, tuple(dead), tuple(shed), whole))
            handed = self._hand_out(work, now)
        except BaseException:
            unanswered, ends.running, ends.busy = before
            if device.unanswered > unanswered:
                device.unsay()
            self._back_in_line([*batch, *shed])
            raise
        for request in shed:
            ends.end(request)
        return handed

    def _hand_out(self, work: BatchAssignment, now: float) -> BatchAssignment:
        self._ends.busy += 1
        # Another must now wait for what this one leaves behind, be it only for a window's end.
        if self._backlog.rows:
            self.tell_of_queued(now)
        self._dying = ()
        return work

    def tell_of_queued(self, now: float) -> None:
        """Something is queued of which others may not know."""
        self._waking.wake(now)
        if self._expiry.needed:
            self._expiry.watch(self._expiry.next(now))

    def _back_in_line(self, requests: Sequence[Request]) -> None:
        """They were taken out of the queue in vain."""
        for request in requests:
            request.state = QUEUED
            request.started = math.nan
        self._backlog.put_back(requests)

    def fell(self) -> None:
        """Who asked for work fell: those that it had ended are told by whoever puts that right, see `orphaned`."""
        self._orphans += self._dying
        self._dying = ()

    def orphaned(self) -> list[Request]:
        """Those that were ended and never handed out: the caller does."""
        orphans, self._orphans = self._orphans, []
        return orphans
