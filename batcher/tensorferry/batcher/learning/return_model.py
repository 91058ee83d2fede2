"""Callers that come back: how long the next batch may wait for those who were just answered.

Most callers send their next request when the last is answered. A purely work-conserving close
splits them into two groups that take turns, each batch with half of them. A fixed window mends
that and delays everyone else. So it is learned, from what comes in the time after answers, what
share of the answered comes back and when, above the rate at which others arrive anyway; and a
batch waits only where so many callers are answered faster in one large batch after another than
in two that take turns.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

_BINS = 48
# The lowest rate over so many neighbouring bins is that of arrivals that are no returns.
_BACKGROUND_BINS = 12
# What is learned fades with each batch: about the last hundred count.
_DECAY = 0.99
# Bins that fewer batches than that have lasted for say nothing yet.
_LEAST_BATCHES = 20
# Unless so many of the answered come back within the horizon, no batch waits for them.
_LEAST_SHARE = 0.5
# What is learned is worked out anew after so many batches and seconds, or after so many more batches.
_BATCHES_A_LESSON, _LESSON_SECONDS, _MOST_BATCHES_A_LESSON = 8, 5e-3, 512
# A wait that makes callers faster by less than that would only delay others.
_LEAST_GAIN = 1.01
# Who is not back when so many of those that return are is taken for gone.
_MOST_OF = 0.99
# Numbers of requests that are looked at to find the best.
_COUNTS = 32
# The horizon is kept as long as it would now be between 1/1.5 and 1.5 times as long.
_HORIZON_DRIFT = 1.5


def at_once(callers: int) -> float:
    """All are answered at the moment that their batch has run."""
    return 0.0


@dataclass(frozen=True, slots=True)
class ReturnersStatistics:
    """What was learned: the share of the answered that comes back within `horizon` seconds, and the waits."""

    share: float
    horizon: float
    waits: int


class Answers(NamedTuple):
    """What came after answers, by the time since a batch had run, in bins of `width` seconds.

    `arrivals` in each bin; `callers` that were answered and `batches`, in the bin in which the next batch had
    run. `later` arrivals came in the `later_seconds` beyond the last bin.
    """

    width: float
    arrivals: Sequence[float]
    callers: Sequence[float]
    batches: Sequence[float]
    later: float
    later_seconds: float

    def back(self) -> Sequence[float]:
        """The share of the answered that is back by the end of each bin; zeros when too few come back."""
        # A batch that lasted to a bin has been through all before.
        callers = list(accumulate(reversed(self.callers)))[::-1]
        batches = list(accumulate(reversed(self.batches)))[::-1]
        return list(accumulate(self._shares(callers, batches)))

    def _shares(self, callers: list[float], batches: list[float]) -> list[float]:
        """The share of the answered that comes back in each bin."""
        none = [0.0] * _BINS
        seen = sum([count > _LEAST_BATCHES for count in batches[:_BINS]])
        if seen < 2 * _BACKGROUND_BINS:
            return none
        # Of neighbouring bins the sums are differences of running ones.
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
            # Those that come so late are hardly returns.
            background = min(background, self.later / self.later_seconds * self.width)
        shares = [
            max(0.0, arrivals - background * count) / answered
            for arrivals, count, answered in zip(self.arrivals, batches[:seen], callers, strict=False)
        ]
        return shares + none[seen:] if sum(shares) >= _LEAST_SHARE else none


class Returners:
    """Learns who comes back and when. Not thread-safe: its owner's lock guards it.

    The horizon is the time of a batch of one after the largest batch is answered: waiting for longer
    never pays, since what two batches made into one save is about the time of a batch of one.

    From time to time there is a `lesson`: what it says takes longer to work out than all else, so
    who owns this does it without the lock, and then has it believed.
    """

    def __init__(self) -> None:
        self._horizon = 0.0
        self._width = 0.0
        self._answered_at = 0.0
        self._answered = 0
        # Arrivals since then, in the horizon and later. Until `heeds_until` an arrival is `arrived`; after
        # it, whoever owns this may just count it here.
        self._arrived = 0
        self.late = 0
        self.heeds_until = -math.inf
        self._waits = 0
        self.lesson: Answers | None = None
        self._reset(0.0)

    def _reset(self, horizon: float) -> None:
        self._horizon = horizon
        self._width = horizon / _BINS
        # As in `Answers`. The newest weigh most: so nothing older need be touched.
        self._weight = 1.0
        self._arrivals = [0.0] * _BINS
        self._callers = [0.0] * (_BINS + 1)
        self._batches = [0.0] * (_BINS + 1)
        self._later = self._later_seconds = 0.0
        self._since_lesson = 0
        self._lesson_at = -math.inf
        self.lesson = None
        # The share of the answered that is back by the end of each bin; and by the number of
        # callers, how many of them a batch waits for.
        self._back: Sequence[float] = [0.0] * _BINS
        self._counts: dict[int, int] = {}
        # When, after a batch has run, who is not back is not waited for any more.
        self._end = 0.0
        self._answered = 0
        self.heeds_until = -math.inf

    @property
    def expected(self) -> bool:
        """Whether those who are answered come back soon, as far as is known."""
        return self._end > 0.0

    def arrived(self, now: float) -> None:
        """A request was accepted."""
        at = int((now - self._answered_at) / self._width) if now < self.heeds_until else _BINS
        if at < _BINS:
            self._arrived += 1
            self._arrivals[at] += self._weight
        else:
            self.late += 1

    def answered(self, now: float, callers: int) -> None:
        """A batch of so many requests has run, and the first is about to be answered."""
        if self._horizon == 0.0:
            return
        if self._answered:
            elapsed = now - self._answered_at
            weight, lasted = self._weight, _BINS
            if elapsed < self._horizon:
                lasted = int(elapsed / self._width)
            else:
                self._later_seconds += (elapsed - self._horizon) * weight
            self._later += self.late * weight
            self._callers[lasted] += weight * self._answered
            self._batches[lasted] += weight
            self._weight = weight / _DECAY
            self._since_lesson += 1
            if self._since_lesson >= _BATCHES_A_LESSON and (
                now >= self._lesson_at or self._since_lesson >= _MOST_BATCHES_A_LESSON
            ):
                self._lesson_at = now + _LESSON_SECONDS
                self._begin_lesson()
        self._answered_at, self._answered, self._arrived, self.late = now, callers, 0, 0
        self.heeds_until = now + self._horizon

    def _begin_lesson(self) -> None:
        self._since_lesson = 0
        scale = 1 / self._weight
        self._weight = 1.0
        self._later *= scale
        self._later_seconds *= scale
        self._arrivals, self._callers, self._batches = [
            [count * scale for count in counts] for counts in (self._arrivals, self._callers, self._batches)
        ]
        self.lesson = Answers(
            self._width,
            self._arrivals.copy(),
            self._callers.copy(),
            self._batches.copy(),
            self._later,
            self._later_seconds,
        )

    def believe(self, lesson: Answers, back: Sequence[float]) -> None:
        """This is what the lesson says; unless there has been a newer one, or all is different now."""
        if lesson is not self.lesson:
            return
        self.lesson = None
        self._back = back
        self._counts.clear()
        if share := back[-1]:
            self._end = (bisect_left(back, _MOST_OF * share) + 1) * self._width
        else:
            self._end = 0.0

    def wait_until(
        self,
        now: float,
        queued: int,
        batch_time: Callable[[int], float],
        room: int,
        answering: Callable[[int], float] = at_once,
    ) -> float:
        """Until when a batch of `queued` requests, with `room` for more, waits; `now`: not at all.

        `batch_time` gives the seconds that a batch of so many requests takes, 0 when that is
        not known, and `answering` how many of these pass after it has run. To be asked again at
        each arrival, and at the time it gave.
        """
        alone = batch_time(1)
        horizon = alone + answering(queued + room) if alone else 0.0
        if not self._horizon / _HORIZON_DRIFT <= horizon <= self._horizon * _HORIZON_DRIFT or not alone:
            self._reset(horizon)
            return now
        outstanding = self._answered - self._arrived - self.late
        if outstanding <= 0 or room <= 0 or now >= self._answered_at + self._end:
            return now
        callers = queued + outstanding
        count = self._counts.get(callers)
        if count is None:
            count = self._counts[callers] = self._best_count(callers, queued + room, batch_time, answering)
        if queued >= count:
            return now
        self._waits += 1
        return self._answered_at + self._end

    def _best_count(
        self,
        callers: int,
        most: int,
        batch_time: Callable[[int], float],
        answering: Callable[[int], float],
    ) -> int:
        """How many of so many callers a batch waits for to answer the most a second; 0 for none.

        Without a wait the callers make two groups, the one away while the other's batch runs.
        In batches of n, larger than the half, callers - n come while a batch runs, and the other
        2n - callers of the n in the next must be back after it.
        """
        half = min(max(callers // 2, 1), most)
        other = min(callers - half, most)
        best_rate = _LEAST_GAIN * (half + other) / (batch_time(half) + batch_time(other))
        best = 0
        for count in range(min(callers, most), half, -max(1, callers // _COUNTS)):
            # The k-th of n is back when about k / (n + 1/2) of all are.
            at = bisect_left(self._back, (2 * count - callers) / (count + 0.5))
            if at >= _BINS:
                continue
            # They come back while others are still answered.
            answered = answering(count)
            seconds = batch_time(count) - answered + max(answered, (at + 0.5) * self._width)
            if (rate := count / seconds) > best_rate:
                best_rate, best = rate, count
        return best

    def statistics(self) -> ReturnersStatistics:
        """What was learned so far."""
        return ReturnersStatistics(self._back[-1], self._horizon, self._waits)
