"""The standing queue: who is turned away at the door since those ahead leave no time.

Where more arrives than can be run, somebody is dropped. To drop those who have waited longest costs the most: their
call has been decoded, queued and looked at for each batch, and its caller waits in vain until its deadline. So
who would be too late behind those that wait is told at once, and comes back, or goes elsewhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tensorferry.batcher.errors import QueueFull
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.bucket import Bucket
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.request import Request

# Who is less patient than so many full batches take is always let in: with so little time it is best not to ride in turn
# but fresh, and the rate rule drops the others.
_PATIENT = 2
# After so many times the patience a queue has stood for long. Before, it may have been a burst, which is to be taken up.
_LONG = 4
# However long it has stood, it is not kept shorter than so many full batches for each device, lest one idles.
_BATCHES = 2
# Calls may be left for so large a part of a full batch's time before they are taken in, or of the least patience that was
# seen, since they lose as much of theirs; and for at most so many seconds.
_REST_OF_BATCH = 1 / 4
_REST_OF_PATIENCE = 1 / 16
_REST_SECONDS = 0.05
# For so many rests others are told the same without being looked at.
_NOTICE = 4


class FastReject(NamedTuple):
    """Why one was turned away whose answer would have come when it `ends`, and by when others must have theirs to be told the same.

    `behind` says whether enough waited for the queue to be kept short; a row that waits before takes the time of a `row`. It
    holds `until` then. Times are the queue's.
    """

    refusal: QueueFull
    deadline: float
    ends: float
    behind: bool
    row: float
    until: float


class OverloadControl:
    """Guarded by the queue's lock. Requests are `alike` where there is one class, whose clients do not share.

    A queue that stood for longer than a request is patient takes up no burst any more, it only makes all wait (as
    in "Controlling Queue Delay", Nichols and Jacobson, 2012). So the longer it has stood, the shorter it is kept.
    """

    __slots__ = (
        "_alike",
        "_backlog",
        "_devices",
        "_least",
        "_least_before",
        "_most",
        "enough",
        "notice",
        "since",
    )

    def __init__(self, most: int, backlog: Backlog, devices: Devices, *, alike: bool) -> None:
        self._most = most
        self._backlog = backlog
        self._devices = devices
        # With so many rows queued or fewer nobody need be asked about: they all ride next.
        self.enough = most * len(devices.each)
        # Since when each batch left as many behind as another takes; inf when the last did not.
        self.since = math.inf
        self._alike = alike
        # The least patience of those asked about since a batch left, and of those before, in seconds.
        self._least = self._least_before = math.inf
        # For others like the last that was turned away; None where nobody was.
        self.notice: FastReject | None = None

    def left(self, now: float, shed: float) -> None:
        """A batch left, and so many rows with it that do not ride."""
        if (notice := self.notice) is not None:
            # When one ends that is yet to come is as it was but for those.
            waiting = self._backlog.rows > self.enough
            self.notice = notice._replace(ends=notice.ends - shed * notice.row) if waiting else None
        self._least_before, self._least = self._least, math.inf
        if self._backlog.rows < self._most:
            self.since = math.inf
        elif self.since == math.inf:
            self.since = now

    def refusal(self, request: Request, bucket: Bucket, now: float) -> QueueFull | None:
        """Why a request with a deadline is not to wait; None when it may. To be asked when more than `enough` rows are queued."""
        profile, backlog, devices = bucket.profile, self._backlog, self._devices
        most, patience = self._most, request.deadline - now
        self._least = min(self._least, patience)
        if len(backlog.buckets) > 1 or not profile.fresh(now):
            # Where there are several buckets a long queue is of use: it makes the batches of the rare ones larger.
            return None
        # Of its class, as if the devices were theirs alone: it is turned away only if even that is too little.
        ahead = bucket.class_queues[request.rank].ahead(request)
        full = profile.mean(most)
        if ahead <= self.enough or patience < _PATIENT * full:
            return None
        last = profile.mean(min(most, int(ahead) % most + 1))
        row = full / most / len(devices.work)
        wait = devices.next_start(now) - now + ahead * row + last
        behind = ahead > _BATCHES * self.enough
        allowed = self._allowed(patience, behind, now)
        if wait <= allowed:
            if (notice := self.notice) is not None:
                # The next one waits for this one, too.
                ends = max(notice.ends, now + wait + request.rows_counted * row)
                self.notice = notice._replace(ends=ends, until=now + _NOTICE * notice.refusal.rest)
            return None
        # Two digits: those who are told the same cost less.
        retry_after = max(0.001, float(f"{wait - allowed:.2g}"))
        rest = min(
            _REST_SECONDS, full * _REST_OF_BATCH, min(self._least, self._least_before) * _REST_OF_PATIENCE
        )
        refusal = QueueFull(
            f"overload: the answer would take about {wait:.2g} s behind those that ride before, and the deadline is "
            f"{patience:.2g} s away; retry in {retry_after:g} s",
            retry_after,
            rest,
        )
        if self._alike and backlog.one_kind:
            until = now + _NOTICE * rest
            self.notice = FastReject(refusal, request.deadline, now + wait, behind, row, until)
        return refusal

    def _allowed(self, patience: float, behind: bool, now: float) -> float:
        """How long one may wait, of the time that it has; `behind` enough others, not all of that if they have stood for long."""
        long = _LONG * patience
        if behind and now - self.since > long:
            return patience * long / (now - self.since)
        return patience

    def foreseen(self, deadline: float, now: float) -> QueueFull | None:
        """Why a request with this deadline would be turned away, like another a moment ago; None where that is not certain."""
        notice = self.notice
        if notice is None or deadline < notice.deadline:
            return None
        if now >= notice.until:
            # To look at one will do, for as long as it takes to read it.
            self.notice = notice._replace(until=now + notice.refusal.rest)
            return None
        if notice.ends - now <= self._allowed(deadline - now, notice.behind, now):
            # It is read now, and many others may arrive before it is queued.
            self.notice = notice._replace(ends=notice.ends + notice.row)
            return None
        return notice.refusal
