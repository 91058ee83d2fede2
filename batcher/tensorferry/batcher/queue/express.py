"""Express: what a thread that attends is given when one request is queued and nothing is unusual.

Then most of what `Dispatch.poll` looks at cannot be, and calls would cost more than all that is left to do: it is done in
one function. What it does not answer for, `Dispatch` does, and says the same.
"""

from __future__ import annotations

from tensorferry.batcher.learning.memory_limit import RowLimits
from tensorferry.batcher.learning.return_model import Returners
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.devices import Device, Devices
from tensorferry.batcher.queue.endings import Ends
from tensorferry.batcher.queue.wakeup import WorkerWakeup
from tensorferry.batcher.request import RUNNING, BatchAssignment, CloseReason

_FULL, _IDLE = CloseReason.FULL, CloseReason.IDLE

_new = tuple.__new__


class Express:
    """Guarded by the queue's lock.

    `possible` says that there is one device, which runs one batch at a time, that requests merge into batches of at most
    `most` rows, and that these leave by no other rule: no window, no preferred sizes, one class without a queue policy, no
    clients' shares.
    """

    __slots__ = (
        "_backlog",
        "_devices",
        "_ends",
        "_most",
        "_possible",
        "_returners",
        "_row_limits",
        "_waking",
    )

    def __init__(
        self,
        backlog: Backlog,
        devices: Devices,
        row_limits: RowLimits,
        returners: Returners,
        waking: WorkerWakeup,
        ends: Ends,
        *,
        most: int,
        possible: bool,
    ) -> None:
        self._backlog = backlog
        self._devices = devices
        self._row_limits = row_limits
        self._returners = returners
        self._waking = waking
        self._ends = ends
        self._most = most
        self._possible = possible

    def take(self, most_seconds: float, device: Device, now: float) -> BatchAssignment | Wait | None:
        """The one request, for the idle device, or until when it waits for returners.

        None where `Dispatch` is to be asked: it is not one alone, it should keep the device for more than
        `most_seconds`, nobody knows for how long, or something is as it seldom is.
        """
        backlog, ends = self._backlog, self._ends
        buckets = backlog.buckets
        if (
            not self._possible
            or len(buckets) != 1
            or self._row_limits.needed
            or ends.closing
            or device.unanswered
        ):
            return None
        ((key, bucket),) = buckets.items()
        lane = bucket.class_queues[0]
        with_deadline, without_deadline, rows, most, profile = (
            lane.with_deadline,
            lane.without_deadline,
            bucket.rows,
            self._most,
            bucket.profile,
        )
        if len(with_deadline) + len(without_deadline) != 1 or not profile.device.sizes:
            return None
        (request,) = with_deadline or without_deadline
        # Who has time for the longest batch cannot be late for its own.
        if with_deadline and not request.deadline > now + profile.longest:
            return None
        if profile.device.mean(rows) > most_seconds:
            return None
        reason = _FULL
        if rows < most:
            reason = _IDLE
            until = self._returners.wait_until(now, 1, profile.mean, most - rows, profile.answering)
            if until > now and with_deadline:
                until = min(until, bucket.latest_start)
            if until > now:
                return self._waking.wait_for_company(device, until)
        whole = profile.whole(rows)
        # As `Work(...)`, in half the time.
        work = _new(BatchAssignment, ((request,), reason, (), (), whole))
        # Whatever could fail is done by now: from here on it has left.
        self._devices.left(device, now, whole)
        if with_deadline:
            with_deadline.clear()
        else:
            without_deadline.remove_all([request])
        lane.rows = bucket.rows = 0
        del buckets[key]
        backlog.rows -= rows
        backlog.class_rows[0] -= rows
        request.state = RUNNING
        request.started = now
        ends.running += 1
        ends.busy += 1
        return work
