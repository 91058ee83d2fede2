"""Overload control: rejects on arrival what would miss its deadline behind the requests queued before it.

In overload some requests must be dropped. Dropping the oldest costs the most: they were decoded, queued, and looked at
for each batch, and their clients have waited for nothing. A request that is rejected on arrival can be retried elsewhere at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tensorferry.batcher.errors import QueueFull
from tensorferry.batcher.queue.backlog import Backlog, Bucket
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.request import Request

# Requests whose deadline is shorter than this many full batches are never rejected here: they are served best when
# the rate rule drops older ones.
_MIN_DEADLINE_BATCHES = 2
# A queue that has been long for this many times a request's time to its deadline is kept shorter. Before, it may have
# been a burst, which a queue must absorb.
_INTERVAL_FACTOR = 4
# A queue of this many full batches for each device or less is not kept shorter, so that no device becomes idle.
_MIN_QUEUED_BATCHES = 2
# A transport may leave new calls unread for this share of a full batch's time, or of the shortest time to a deadline
# seen, since they lose that much of theirs; and for this many seconds at most.
_PAUSE_OF_BATCH = 1 / 4
_PAUSE_OF_DEADLINE = 1 / 16
_MAX_PAUSE_SECONDS = 0.05
# A rejection is repeated for other requests, without a new estimate, for this many pauses.
_VALID_PAUSES = 4


class FastReject(NamedTuple):
    """The last rejection, which is repeated for requests whose deadline is not earlier. Times are on the queue's clock.

    A new request would be answered at `end`; each row before it takes `row` seconds. `long_queue` says whether enough
    requests are queued that they may be kept shorter. The estimate is valid until `until`.
    """

    error: QueueFull
    deadline: float
    end: float
    long_queue: bool
    row: float
    until: float


class OverloadControl:
    """Decides which new requests are rejected because the queue is too long. Guarded by the queue's lock.

    A queue that has been long for longer than the requests' deadlines absorbs no burst any more, it only delays all
    requests (see "Controlling Queue Delay", Nichols and Jacobson, 2012). So the longer it has been, the shorter it is
    kept. `alike` says that requests differ by deadline alone: there is one class, and clients do not share it.
    """

    def __init__(self, backlog: Backlog, devices: Devices, *, alike: bool) -> None:
        self._backlog = backlog
        self._devices = devices
        # Since when each batch has left a full one behind it; inf if the last did not.
        self._long_since = math.inf
        self._alike = alike
        # The shortest time to a deadline, in seconds, of the requests checked since the last batch was dispatched,
        # and of those before.
        self._shortest = self._shortest_before = math.inf
        # None when the last request that was checked was not rejected.
        self.last_rejection: FastReject | None = None

    def batch_dispatched(self, now: float, shed_rows: float, full_rows: int) -> None:
        """Note a batch, the rows that were shed with it, and the rows of a full one."""
        if (last := self.last_rejection) is not None:
            # The end estimated for a new request changes only by the rows that were shed.
            waiting = self._backlog.rows > full_rows * len(self._devices.each)
            self.last_rejection = last._replace(end=last.end - shed_rows * last.row) if waiting else None
        self._shortest_before, self._shortest = self._shortest, math.inf
        if self._backlog.rows < full_rows:
            self._long_since = math.inf
        elif self._long_since == math.inf:
            self._long_since = now

    def rejection(self, request: Request, bucket: Bucket, start: float, now: float) -> QueueFull | None:
        """Return why a request with a deadline is rejected; None if it may wait. A device can start a batch at `start`.

        Must be called if more rows are queued than a full batch for each device has: others are in the next batches.
        """
        cost_model, backlog, devices = bucket.cost_model, self._backlog, self._devices
        max_rows, time_left = bucket.full_rows, request.deadline - now
        next_batches = max_rows * len(devices.each)
        if time_left < self._shortest:
            self._shortest = time_left
        full = cost_model.mean(max_rows)
        row = full / max_rows / len(devices.available)
        if (
            start - now + backlog.rows * row + full <= time_left
            and now - self._long_since <= _INTERVAL_FACTOR * time_left
            and self.last_rejection is None
        ):
            # It is in time even after all others.
            return None
        if len(backlog.queued_buckets) > 1 or not cost_model.is_recent(now) or cost_model.grows:
            # With several buckets a long queue is useful: it makes the batches of rare ones larger.
            return None
        # Only requests of its own class are counted, as if the devices were theirs alone: a lower bound.
        ahead = bucket.class_queues[request.rank].rows_ahead(request)
        if ahead <= next_batches or time_left < _MIN_DEADLINE_BATCHES * full:
            return None
        last_batch = cost_model.mean(min(max_rows, int(ahead) % max_rows + 1))
        wait = start - now + ahead * row + last_batch
        long_queue = ahead > _MIN_QUEUED_BATCHES * next_batches
        allowed = self._allowed(time_left, now, long_queue=long_queue)
        if wait <= allowed:
            if (last := self.last_rejection) is not None:
                # The next request waits for this one, too.
                end = max(last.end, now + wait + request.rows_counted * row)
                until = now + _VALID_PAUSES * last.error.pause_seconds
                self.last_rejection = last._replace(end=end, until=until)
            return None
        # Rounded, because equal messages are cheaper for the transport.
        retry_after = max(0.001, float(f"{wait - allowed:.2g}"))
        pause = min(
            _MAX_PAUSE_SECONDS,
            full * _PAUSE_OF_BATCH,
            min(self._shortest, self._shortest_before) * _PAUSE_OF_DEADLINE,
        )
        error = QueueFull(
            f"overload: the answer would take about {wait:.2g} s behind the requests queued before it, and the deadline is "
            f"{time_left:.2g} s away; retry in {retry_after:g} s",
            retry_after,
            pause,
        )
        if self._alike and backlog.single_bucket:
            until = now + _VALID_PAUSES * pause
            self.last_rejection = FastReject(error, request.deadline, now + wait, long_queue, row, until)
        return error

    def _allowed(self, time_left: float, now: float, *, long_queue: bool) -> float:
        """Return how long a request may wait, of the time to its deadline: less if the queue has long been long."""
        interval = _INTERVAL_FACTOR * time_left
        if long_queue and now - self._long_since > interval:
            return time_left * interval / (now - self._long_since)
        return time_left

    def fast_reject(self, deadline: float, now: float) -> QueueFull | None:
        """Return why a request with this deadline would be rejected, like the last one; None if that is uncertain."""
        last = self.last_rejection
        if last is None or deadline < last.deadline:
            return None
        if now >= last.until:
            # One request is checked again. Reading it takes a while, for which the old estimate stays valid.
            self.last_rejection = last._replace(until=now + last.error.pause_seconds)
            return None
        if last.end - now <= self._allowed(deadline - now, now, long_queue=last.long_queue):
            # This request will be read, and many others may arrive before it is queued.
            self.last_rejection = last._replace(end=last.end + last.row)
            return None
        return last.error
