"""Company: how long a batch waits for those who are here already, or come back soon.

Two rules, both after answers. Callers that were just answered may send their next request
(`Returners`). And a thread that takes requests in from elsewhere, and puts them quietly, may have more at
hand: callers answer a batch's first responses before its last are sent, and that thread has had little of
the interpreter meanwhile, perhaps none of a core. Were the next batch closed at once, it would
leave without requests that are there already; so it first hears from that thread.
"""

from __future__ import annotations

from tensorferry.batcher.learning.return_model import Returners
from tensorferry.batcher.queue.bucket import Bucket

# To hear takes up to a tenth of a millisecond: only where a batch of one takes so many seconds, and no
# longer than a share of them.
_LEAST_SECONDS = 1e-3
_SHARE = 0.25


class ReplyWait:
    """Guarded by the queue's lock, but for `awaits`, which is read without it, and `last_answer`.

    `hears` says whether there is one device, which runs one batch at a time, and no window.
    """

    __slots__ = ("_answering", "_hears", "awaits", "quiet", "returners", "unheard")

    def __init__(self, returners: Returners, *, hears: bool) -> None:
        self.returners = returners
        self._hears = hears
        # The last request was put quietly. Who puts them aloud has no more at hand.
        self.quiet = False
        # A batch is being answered after which the next is to hear.
        self._answering = False
        # Its last answer is on its way, and since then nobody has said that nothing more is there.
        self.unheard = False
        # Likewise, or a batch waits for just that.
        self.awaits = False

    def heard(self) -> None:
        """Nothing more is there."""
        self.unheard = self.awaits = False

    def ran(self, now: float, callers: int, alone: float, *, by_worker: bool) -> None:
        """A batch of so many requests has run, on a worker's thread or not, and the first is about to be answered.

        `alone` is how long a batch of one takes, in seconds.
        """
        # Not when all are answered: the first are back before the last have their answers.
        self.returners.answered(now, callers)
        self._answering = self._hears and self.quiet and by_worker and alone >= _LEAST_SECONDS

    def last_answer(self) -> None:
        """The batch's last request is about to be completed. Without the lock."""
        if self._answering:
            # Before, since whoever puts quietly looks at it when the answer has left.
            self.unheard = self.awaits = True

    def wait_until(self, bucket: Bucket, now: float, room: int) -> float:
        """Until when a batch of the bucket, with `room` for more rows, waits; `now` when it does not."""
        if self.unheard:
            # Once: its time is over, or it was heard, when this is asked again.
            self.unheard = False
            until = min(now + _SHARE * bucket.profile.mean(1), bucket.latest_start)
            if until > now:
                return until
        return self.returners_until(bucket, now, room)

    def returners_until(self, bucket: Bucket, now: float, room: int) -> float:
        """The same for callers that were answered alone."""
        profile = bucket.profile
        if not profile.known or room <= 0:
            return now
        until = self.returners.wait_until(now, len(bucket), profile.mean, room, profile.answering)
        return until if until <= now else min(until, bucket.latest_start)
