"""Selection of a batch: which requests of the bucket that closes are in it, and which are shed for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from tensorferry.batcher.learning.arrival_rate import ArrivalRates
from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.learning.memory_limit import MemoryRowLimits
from tensorferry.batcher.policy.batch_forming import FormedBatch, form_batch, without_repeats
from tensorferry.batcher.policy.close_rule import Close
from tensorferry.batcher.policy.load_shedding import ArrivalDemand
from tensorferry.batcher.policy.priority_sharing import DeficitRoundRobin, StrictPriority
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.devices import Device, Devices
from tensorferry.batcher.queue.fair_backlog import FairBacklog
from tensorferry.batcher.queue.overload import OverloadControl
from tensorferry.batcher.settings import BatcherSettings

# Batches are kept short for tight deadlines if that costs at most this share of full batches' throughput ...
_MAX_THROUGHPUT_LOSS = 0.05
# ... and if the arrival rate seems to be at most this many times the short batches' throughput. The rate is known to
# within a tenth, and the queue grows while the estimate is too low.
_SAFETY = 1.25


class BatchSelector:
    """Takes batches out of the backlog. Guarded by the queue's lock."""

    def __init__(self, settings: BatcherSettings, backlog: Backlog, devices: Devices) -> None:
        self._backlog = backlog
        # The same backlog, if clients share batches.
        self._fair = backlog if isinstance(backlog, FairBacklog) else None
        self._devices = devices
        ranks, max_rows = settings.ranks, settings.batch_rows
        self.overload = OverloadControl(backlog, devices, alike=self._fair is None and ranks == 1)
        strict = settings.strict_priorities or settings.ranks_per_class > 1
        self._shares: StrictPriority | DeficitRoundRobin = (
            StrictPriority(ranks) if strict else DeficitRoundRobin(settings.priority_weights, max_rows)
        )
        # What fits into the devices' memory, learned from batches that did not.
        self.row_limits = MemoryRowLimits(max_rows)
        self.arrivals = ArrivalRates(ranks)

    def credits(self, now: float) -> Sequence[float]:
        """Return the rows that each rank may still take, replenished if no rank with requests has any left."""
        if self._fair is not None:
            self._fair.compare_clients(now)
        class_rows = self._backlog.class_rows
        if len(class_rows) > 1:
            self._shares.replenish(class_rows)
        return self._shares.credits

    def select(self, close: Close, device: Device, start: float, now: float) -> FormedBatch:
        """Remove and return the batch of the bucket that closes, and the requests that are shed for it.

        The device can start the batch at `start`.
        """
        backlog, limits = self._backlog, self.row_limits
        bucket = backlog.queued_buckets[close.key]
        lead, times = close.leading_class, bucket.cost_model
        slack = bucket.earliest_deadline - now if backlog.deadlines else math.inf
        max_rows = min(close.rows, times.next_rows(bucket.rows, slack, now))
        index = 0
        if limits.needed:
            index = self._devices.each.index(device)
            max_rows = limits.allowed(index, close.key, max_rows, now)
        if now < self.arrivals.counted_until and len(backlog.queued_buckets) == 1:
            max_rows = self._cap_for_tight_deadlines(times, max_rows, lead, now)
        quota = [max_rows]
        queues = bucket.class_queues
        if len(queues) > 1:
            quota = self._shares.allocate([queue.rows for queue in queues], backlog.class_rows, max_rows)
            # The leading class must have a share of this batch. Lower classes only fill it as deadlines allow.
            lead = next((rank for rank, rows in enumerate(quota) if rows), lead)
        demand = partial(self._demand, lead, now)
        formed = form_batch(queues, lead, quota, start, max_rows, times, demand)
        if self._fair is not None:
            formed = self._fair.share(formed, bucket, start, times, max_rows)
        formed = without_repeats(formed)
        if self._fair is not None:
            self._fair.charge(formed.batch)
        batch, shed, rows = formed
        shed_rows = 0
        if shed:
            removed = list(rows)
            shed_rows = sum([request.rows_counted for request in shed])
            removed[lead] += shed_rows
            backlog.remove_all(close.key, shed + batch, removed)
        else:
            backlog.remove_all(close.key, batch, rows)
        if len(queues) > 1:
            self._shares.charge(rows, lead, backlog.class_rows)
        self.overload.batch_dispatched(now, shed_rows, bucket.full_rows)
        if limits.needed:
            limits.dispatched(index, close.key, sum(rows), now)
        return formed

    def _cap_for_tight_deadlines(
        self, cost_model: BatchCostModel, max_rows: int, lead: int, now: float
    ) -> int:
        """Return the most rows of a batch such that requests with tight deadlines that arrive meanwhile are in time.

        That is `max_rows` if they are in time anyway, or if shorter batches could not keep up. Two short batches must
        be over by their deadline: the one that runs when they arrive, and their own.
        """
        tightest = self.arrivals.least_patience(lead)
        if tightest == math.inf:
            return max_rows
        devices = len(self._devices.available)
        if cost_model.upper(max_rows) / devices + cost_model.upper(1) <= tightest:
            return max_rows
        short = cost_model.max_rows_within(tightest / (1 + 1 / devices))
        if not 1 <= short < max_rows:
            return max_rows
        throughput, full_throughput = short / cost_model.mean(short), max_rows / cost_model.mean(max_rows)
        if throughput < (1 - _MAX_THROUGHPUT_LOSS) * full_throughput:
            return max_rows
        demands = [self.arrivals.demand(rank, now, devices) for rank in range(lead + 1)]
        arriving = sum([demand.rows_per_second for demand in demands])
        return short if arriving <= _SAFETY * throughput else max_rows

    def _demand(self, lead: int, now: float) -> ArrivalDemand:
        """Return one device's share of the demand of a rank and those above it.

        That is the arrival rate; after a burst it is at least the rate at which the queued requests must be served.
        """
        devices = len(self._devices.available)
        demands = [self.arrivals.demand(rank, now, devices) for rank in range(lead + 1)]
        rate, deadline = sum([demand.rows_per_second for demand in demands]), demands[lead].typical_deadline
        if deadline:
            rate = max(rate, self._backlog.count_with_deadline(lead) / devices / deadline)
        return ArrivalDemand(rate, deadline, devices)
