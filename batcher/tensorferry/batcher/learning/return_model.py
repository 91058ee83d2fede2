"""Model of returning clients: how long the next batch may wait for those that were just answered.

Most clients send their next request after the last answer. A purely work-conserving close rule splits them into two
groups that take turns, each batch with half of them. A fixed window avoids that but delays everything else. So this model
learns, from the arrivals after answers, what share of the answered clients returns and when, above the rate of other
arrivals. A batch waits only if one large batch after another answers this many clients faster than two that alternate.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

_BINS = 48
# The lowest rate over this many neighbouring bins is taken for the rate of arrivals that are no returns.
_BACKGROUND_BINS = 12
# Counts fade with each batch: about the last hundred count.
_DECAY = 0.99
# Bins reached by fewer batches are not used.
_LEAST_BATCHES = 20
# If a smaller share of the answered clients returns within the horizon, no batch waits for them.
_LEAST_SHARE = 0.5
# The model is updated after this many batches and seconds, or after `_MOST_BATCHES_AN_UPDATE` batches.
_BATCHES_AN_UPDATE, _UPDATE_SECONDS, _MOST_BATCHES_AN_UPDATE = 8, 20e-3, 512
# More arrivals between two batches are forgotten, the oldest first.
_MOST_ARRIVALS = 1 << 16
# A wait must answer clients faster by at least this factor.
_LEAST_GAIN = 1.01
# A client that is not back when this share of the returning ones is back counts as gone.
_MOST_OF = 0.99
# Numbers of requests that are compared to find the best one.
_COUNTS = 32
# The horizon is kept while the one computed now differs by less than this factor.
_HORIZON_DRIFT = 1.5


def no_host_time(callers: int) -> float:
    """The host's time after the device, if all clients are answered when the device ends: none."""
    return 0.0


@dataclass(frozen=True, slots=True)
class ReturnStatistics:
    """The share of answered clients that return within `horizon` seconds, and how often a batch waited."""

    share: float
    horizon: float
    waits: int


class ReturnHistogram(NamedTuple):
    """Arrivals after answers, by the time since the batch ran, in bins of `width` seconds.

    `arrivals` counts the arrivals in each bin. `callers` counts answered clients, and `batches` batches, in the bin in
    which the next batch had run. `later` arrivals came in the `later_seconds` after the last bin.
    """

    width: float
    arrivals: Sequence[float]
    callers: Sequence[float]
    batches: Sequence[float]
    later: float
    later_seconds: float

    def return_cdf(self) -> Sequence[float]:
        """Return the share of answered clients that is back by the end of each bin; zeros if too few return."""
        # A batch that reached a bin also passed all bins before it.
        callers = list(accumulate(reversed(self.callers)))[::-1]
        batches = list(accumulate(reversed(self.batches)))[::-1]
        return list(accumulate(self._shares(callers, batches)))

    def _shares(self, callers: list[float], batches: list[float]) -> list[float]:
        """Return the share of answered clients that returns in each bin."""
        none = [0.0] * _BINS
        seen = sum([count > _LEAST_BATCHES for count in batches[:_BINS]])
        if seen < 2 * _BACKGROUND_BINS:
            return none
        # Sums over neighbouring bins are differences of running sums.
        arrived, lasted = (list(accumulate(counts, initial=0.0)) for counts in (self.arrivals, batches))
        background = min(
            [
                (arrived_end - arrived_start) / (lasted_end - lasted_start)
                for arrived_start, arrived_end, lasted_start, lasted_end in zip(
                    arrived,
                    arrived[_BACKGROUND_BINS : seen + 1],
                    lasted,
                    lasted[_BACKGROUND_BINS:],
                    strict=False,
                )
            ]
        )
        if self.later_seconds > _LEAST_BATCHES * _BINS * self.width:
            # Arrivals after the horizon are hardly returns.
            background = min(background, self.later / self.later_seconds * self.width)
        shares = [
            max(0.0, arrivals - background * count) / answered
            for arrivals, count, answered in zip(self.arrivals, batches[:seen], callers, strict=False)
        ]
        return shares + none[seen:] if sum(shares) >= _LEAST_SHARE else none


class ReturnModel:
    """Learns what share of the answered clients returns, and when. Guarded by the queue's lock.

    The horizon is the time of a batch of one row, after the largest batch is answered. A longer wait never pays, because
    joining two batches saves about the time of a batch of one row.

    From time to time `snapshot` is set. It takes longer to evaluate than everything else, so the owner does that without
    the lock and then calls `publish`.
    """

    def __init__(self) -> None:
        self._horizon = 0.0
        self._width = 0.0
        self._answered_at = 0.0
        self._answered = 0
        # Times of the requests that arrived since then.
        self._arrivals: deque[float] = deque(maxlen=_MOST_ARRIVALS)
        # Note an accepted request by its time: it may be from a client that was just answered. The deque's own method,
        # because it is called for each request.
        self.arrived = self._arrivals.append
        self._waits = 0
        # How many requests the last wait is for.
        self.wanted = 0
        self.snapshot: ReturnHistogram | None = None
        self._reset(0.0)

    def _reset(self, horizon: float) -> None:
        self._horizon = horizon
        self._width = horizon / _BINS
        # As in `ReturnHistogram`. The weight of new counts grows, so that old counts need not be scaled.
        self._weight = 1.0
        self._returns = [0.0] * _BINS
        self._callers = [0.0] * (_BINS + 1)
        self._batches = [0.0] * (_BINS + 1)
        self._later = self._later_seconds = 0.0
        self._since_update = 0
        self._update_at = -math.inf
        self.snapshot = None
        # The share of answered clients that is back by the end of each bin.
        self._return_cdf: Sequence[float] = [0.0] * _BINS
        # By the number of clients: the requests that a batch waits for.
        self._counts: dict[int, int] = {}
        # How long after a batch the next one waits at most.
        self._end = 0.0
        self._answered = 0
        self._arrivals.clear()

    @property
    def expected(self) -> bool:
        """Whether answered clients return soon, as far as is known."""
        return self._end > 0.0

    def answered(self, now: float, callers: int) -> None:
        """Note a batch of `callers` requests that ran; the first of them is answered next."""
        if self._answered:
            elapsed = now - self._answered_at
            weight, lasted, later = self._weight, _BINS, len(self._arrivals)
            for arrival in self._arrivals:
                at = int((arrival - self._answered_at) / self._width)
                if at >= _BINS:
                    break
                self._returns[at] += weight
                later -= 1
            if elapsed < self._horizon:
                lasted = int(elapsed / self._width)
            else:
                self._later_seconds += (elapsed - self._horizon) * weight
            self._later += later * weight
            self._callers[lasted] += weight * self._answered
            self._batches[lasted] += weight
            self._weight = weight / _DECAY
            self._since_update += 1
            if self._since_update >= _BATCHES_AN_UPDATE and (
                now >= self._update_at or self._since_update >= _MOST_BATCHES_AN_UPDATE
            ):
                self._update_at = now + _UPDATE_SECONDS
                self._take_snapshot()
        self._answered_at, self._answered = now, callers if self._horizon else 0
        self._arrivals.clear()

    def _take_snapshot(self) -> None:
        self._since_update = 0
        scale = 1 / self._weight
        self._weight = 1.0
        self._later *= scale
        self._later_seconds *= scale
        self._returns, self._callers, self._batches = [
            [count * scale for count in counts] for counts in (self._returns, self._callers, self._batches)
        ]
        self.snapshot = ReturnHistogram(
            self._width,
            self._returns.copy(),
            self._callers.copy(),
            self._batches.copy(),
            self._later,
            self._later_seconds,
        )

    def publish(self, snapshot: ReturnHistogram, return_cdf: Sequence[float]) -> None:
        """Use the evaluation of a snapshot, unless the model was reset or a newer snapshot exists."""
        if snapshot is not self.snapshot:
            return
        self.snapshot = None
        self._return_cdf = return_cdf
        self._counts.clear()
        if share := return_cdf[-1]:
            self._end = (bisect_left(return_cdf, _MOST_OF * share) + 1) * self._width
        else:
            self._end = 0.0

    def wait_until(
        self,
        now: float,
        queued: int,
        batch_time: Callable[[int], float],
        room: int,
        answering: Callable[[int], float] = no_host_time,
    ) -> float:
        """Return until when a batch of `queued` requests, with `room` for more, waits; `now` if it does not wait.

        `batch_time` returns the seconds of a batch by its requests, 0 if unknown. `answering` returns the part of them
        after the device. Call it again when `wanted` requests are queued, and at the time that it returned.
        """
        alone = batch_time(1)
        horizon = alone + answering(queued + room) if alone else 0.0
        if not self._horizon / _HORIZON_DRIFT <= horizon <= self._horizon * _HORIZON_DRIFT or not alone:
            self._reset(horizon)
            return now
        outstanding = self._answered - len(self._arrivals)
        if outstanding <= 0 or room <= 0 or now >= self._answered_at + self._end:
            return now
        callers = queued + outstanding
        count = self._counts.get(callers)
        if count is None:
            count = self._counts[callers] = self._best_count(callers, queued + room, batch_time, answering)
        if queued >= count:
            return now
        self._waits += 1
        self.wanted = count
        return self._answered_at + self._end

    def _best_count(
        self,
        callers: int,
        most: int,
        batch_time: Callable[[int], float],
        answering: Callable[[int], float],
    ) -> int:
        """Return the number of requests at which a batch answers the most clients a second; 0 for no wait.

        Without a wait the clients form two groups; one group's batch runs while the other is away. In batches of n, more
        than half of the clients, callers - n arrive while a batch runs. The other 2n - callers of the n requests in the
        next batch must return after it.
        """
        half = min(max(callers // 2, 1), most)
        other = min(callers - half, most)
        best_rate = _LEAST_GAIN * (half + other) / (batch_time(half) + batch_time(other))
        best = 0
        for count in range(min(callers, most), half, -max(1, callers // _COUNTS)):
            # The k-th of n clients is back when about k / (n + 1/2) of all are.
            at = bisect_left(self._return_cdf, (2 * count - callers) / (count + 0.5))
            if at >= _BINS:
                continue
            # They return while others are still being answered.
            answered = answering(count)
            seconds = batch_time(count) - answered + max(answered, (at + 0.5) * self._width)
            if (rate := count / seconds) > best_rate:
                best_rate, best = rate, count
        return best

    def statistics(self) -> ReturnStatistics:
        """Return what was learned so far."""
        return ReturnStatistics(self._return_cdf[-1], self._horizon, self._waits)
