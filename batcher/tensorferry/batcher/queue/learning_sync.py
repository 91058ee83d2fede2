"""What batches teach: how long they take, what fits into memory, and who comes back when answered."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.learning.cost_model import BucketStatistics, Lesson, Profile
from tensorferry.batcher.learning.memory_limit import RowLimits
from tensorferry.batcher.learning.return_model import Answers, Returners, ReturnersStatistics
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.request import Request


class Due(NamedTuple):
    """What is to be learned, once a batch of so many rows ran: of how long it took, and from the answers before it.

    Either may be None. `seconds` the device had it, `before` and `after` these the host.
    """

    profile: Profile | None
    rows: int
    seconds: float
    before: float
    after: float
    answers: Answers | None
    now: float


class Learned(NamedTuple):
    """What came of it."""

    lesson: Lesson | None
    back: Sequence[float]


class LearningSync:
    """Every method without `_locked` is thread-safe; `lock` is the queue's, which guards what is learned.

    It takes longer to learn than all else that is done for a batch. So it is done with `learning` held alone,
    and what came of it is believed with the lock: `due_locked`, `learn`, `believe_locked`.
    """

    def __init__(
        self,
        lock: threading.Lock,
        clock: Clock,
        backlog: Backlog,
        row_limits: RowLimits,
        returners: Returners,
    ) -> None:
        self._lock = lock
        # Held by who works out what batches teach. Taken before the other, never while that is held.
        self.learning = threading.Lock()
        self._clock = clock
        self._backlog = backlog
        self._row_limits = row_limits
        self._returners = returners

    def anchor(self, rows: int, seconds: float, key: Hashable = None) -> None:
        """A warm-up run of so many rows: what the latency model of the key's bucket starts from.

        Without a key that of every bucket, where they all cost the same.
        """
        with self.learning, self._lock:
            self._backlog.anchor(rows, seconds, key)

    def due_locked(
        self,
        batch: Sequence[Request],
        rows: int,
        seconds: float | None,
        before: float,
        after: float,
        device: int,
        now: float,
    ) -> Due | None:
        """What there is to be learned when a batch has run; mostly nothing. `seconds` as in `RequestQueue.ran`."""
        taught: Profile | None = None
        if seconds is not None:
            if self._row_limits.needed:
                self._row_limits.fitted(device, batch[0].key, rows)
            profile = self._backlog.profile(batch[0].key)
            if profile.teaches(now, rows, seconds + before + after):
                taught = profile
        answers = self._returners.lesson
        if taught is None and answers is None:
            return None
        return Due(taught, rows, seconds or 0.0, before, after, answers, now)

    def learn(self, due: Due) -> Learned:
        """Works it out. With `learning` held, and without the lock."""
        lesson = None
        if due.profile is not None:
            lesson = due.profile.learn(due.rows, due.seconds, due.before, due.after)
        return Learned(lesson, due.answers.back() if due.answers is not None else ())

    def believe_locked(self, due: Due, learned: Learned) -> None:
        """From now on it is predicted from this."""
        if due.profile is not None and learned.lesson is not None:
            due.profile.believe(learned.lesson, due.now)
        if due.answers is not None:
            self._returners.believe(due.answers, learned.back)

    def did_not_fit(self, batch: Sequence[Request], device: int) -> None:
        """A batch, or a part of one, was too large for a device's memory."""
        rows = sum([request.rows_counted for request in batch])
        with self._lock:
            self._row_limits.did_not_fit(device, batch[0].key, rows, self._clock.now())

    def fitted(self, batch: Sequence[Request], device: int, seconds: float) -> None:
        """A part of a batch that had been too large ran, for so many seconds."""
        rows = sum([request.rows_counted for request in batch])
        with self.learning, self._lock:
            now = self._clock.now()
            self._row_limits.fitted(device, batch[0].key, rows)
            self._backlog.profile(batch[0].key).observe(now, rows, seconds)

    @property
    def limits_rows(self) -> bool:
        """Whether any device has had too large a batch for its memory lately."""
        return self._row_limits.needed

    def rows_that_fit(self, device: int, key: Hashable) -> int:
        """The most rows of a bucket's batch that are known to fit into a device's memory."""
        with self._lock:
            return self._row_limits.rows(device, key)

    def statistics(self) -> tuple[Mapping[Hashable, BucketStatistics], ReturnersStatistics]:
        """What is known of every bucket, and of callers that come back."""
        with self.learning, self._lock:
            return self._backlog.statistics(), self._returners.statistics()
