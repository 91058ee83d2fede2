"""Departure: who rides in the batch of a bucket that closes, whose share that is, and who is shed for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from tensorferry.batcher.learning.arrival_rate import DemandMeter
from tensorferry.batcher.learning.cost_model import Profile
from tensorferry.batcher.learning.memory_limit import RowLimits
from tensorferry.batcher.policy.batch_forming import Demand, Formed, form_batch
from tensorferry.batcher.policy.close_rule import Close
from tensorferry.batcher.policy.priority_sharing import Ranks, Shares
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.devices import Device, Devices
from tensorferry.batcher.queue.fair_backlog import FairBacklog
from tensorferry.batcher.queue.overload import OverloadControl
from tensorferry.batcher.request import Request

# Batches are kept short for the impatient where that costs at most this part of what full ones get done ...
_WORTH = 0.05
# ... and as long as no more than so many times as much seems to arrive as the short ones get done: that is known to
# within a tenth, and the longest queue grows while it is wrong.
_SURELY = 1.25


class BatchSelector:
    """Takes batches out of the backlog. Guarded by the queue's lock.

    `weights` are those of the priority classes, the highest first; with `ranks` above 1, or if `strict`, each
    rides before all lower ones instead.
    """

    __slots__ = ("_backlog", "_devices", "_fair", "_shares", "demand", "row_limits", "standing")

    def __init__(
        self,
        backlog: Backlog,
        devices: Devices,
        weights: Sequence[int],
        ranks: int,
        most: int,
        *,
        strict: bool,
    ) -> None:
        self._backlog = backlog
        # The same, where clients share batches.
        self._fair = backlog if isinstance(backlog, FairBacklog) else None
        self._devices = devices
        self.standing = OverloadControl(
            most, backlog, devices, alike=self._fair is None and ranks * len(weights) == 1
        )
        ranked = strict or ranks > 1
        self._shares: Ranks | Shares = Ranks(ranks * len(weights)) if ranked else Shares(weights, most)
        # What fits into the devices' memory, where a batch did not.
        self.row_limits = RowLimits(most)
        # By class, of all buckets together: they share the device that must keep up with it. They need not
        # be told of arrivals as long as none has a deadline: they are asked when not all can make theirs.
        self.demand = [DemandMeter() for _ in range(ranks * len(weights))]

    def credits(self, now: float) -> Sequence[float]:
        """What each class may still take of the rows, renewed when all that wait have used theirs."""
        if self._fair is not None:
            self._fair.look(now)
        self._shares.renew(self._backlog.class_rows)
        return self._shares.credits

    def take(self, close: Close, device: Device, now: float) -> Formed[Request]:
        """The batch of a bucket that closes, and who is dropped for it; both are queued no more."""
        backlog = self._backlog
        bucket = backlog.buckets[close.key]
        lead, most, limits = close.lead, close.rows, self.row_limits
        if limits.needed:
            index = self._devices.each.index(device)
            most = limits.allowed(index, close.key, most, now)
        if len(backlog.buckets) == 1:
            most = self._short(bucket.profile, most, lead, now)
        allotted = [most]
        class_queues, times = bucket.class_queues, bucket.profile
        if len(class_queues) > 1:
            allotted = self._shares.allot([lane.rows for lane in class_queues], backlog.class_rows, most)
            # Whoever's turn it was for a batch: who has a share in it and ranks highest must not be
            # one who rides along only if its deadline allows.
            lead = next((rank for rank, share in enumerate(allotted) if share), lead)
        demand = partial(self._demanded, lead, now)
        formed = form_batch(class_queues, lead, allotted, device.starts(now), most, times, demand)
        if self._fair is not None:
            formed = self._fair.share(formed, bucket, device.starts(now), times, most)
        batch, shed, riding = formed
        dropped = 0
        if shed:
            gone = list(riding)
            dropped = sum([request.rows_counted for request in shed])
            gone[lead] += dropped
            backlog.remove_all(close.key, shed + batch, gone)
        else:
            backlog.remove_all(close.key, batch, riding)
        self._shares.charge(riding, lead, backlog.class_rows)
        self.standing.left(now, dropped)
        if limits.needed:
            limits.left(index, close.key, sum(riding), now)
        return formed

    def _short(self, profile: Profile, most: int, lead: int, now: float) -> int:
        """The most rows of a batch behind which also the least patient that come while it runs have time to ride.

        A full one where they have that anyway, or where shorter ones could not keep up. Two of the short ones are within
        their patience: one that runs as they come, and theirs.
        """
        meters = self.demand[: lead + 1]
        least = min([meter.least_patience() for meter in meters])
        if least == math.inf:
            return most
        devices = len(self._devices.work)
        if profile.longest / devices + profile.upper(1) <= least:
            return most
        short = profile.fit(least / (1 + 1 / devices))
        if not 1 <= short < most:
            return most
        rate, full = short / profile.mean(short), most / profile.mean(most)
        if rate < (1 - _WORTH) * full:
            return most
        demanded = sum([meter.demand(now, devices).rate for meter in meters])
        return short if demanded <= _SURELY * rate else most

    def _demanded(self, lead: int, now: float) -> Demand:
        """A device's share of what a class and those above it ask for.

        That is what arrives; and after a burst what is left of it, in the time that it has.
        """
        devices = len(self._devices.work)
        demands = [meter.demand(now, devices) for meter in self.demand[: lead + 1]]
        rate, patience = sum([demand.rate for demand in demands]), demands[lead].patience
        if patience:
            rate = max(rate, self._backlog.with_deadline(lead) / devices / patience)
        return Demand(rate, patience, devices)
