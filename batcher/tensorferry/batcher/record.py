"""The last batches, for who wants to see how they formed: who rode in each, how long they waited, what it took.

What a batch was is kept always: its figures are there anyway. Who rode in it is noted only while somebody
looks, since that costs something for every request.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.policy import CloseReason
from tensorferry.batcher.request import BatchInfo, Request
from tensorferry.batcher.work import Times, Work

# How many batches are kept, and how many riders are noted of each.
MOST_BATCHES = 64
MOST_RIDERS = 64
# After a look, riders are noted for so many seconds.
WATCHED_SECONDS = 10.0

# A tag may be text that a client chose; more characters of it are not kept.
_TAG_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Rider:
    """A request in a batch: what it was tagged with, its rows and class, and how long it waited, in seconds.

    `queue_delay` is from its arrival until the batch left. One that is not `answered` left, or was
    too late, while the batch ran; or the batch failed.
    """

    tag: object
    rows: int
    priority: int
    queue_delay: float
    answered: bool


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch that ran. Moments are on the batcher's clock, in seconds; they follow each other as the fields do.

    It `left` the queue, began to be joined when `joining`, was `ready` for the device, `started` and
    `ended` there, its answers began to be handed out when `answered`, and all had been when `done`: None for one
    whose answers are not all out yet, for one that failed, and for a part. `number` counts those that succeeded, from 1; one that failed has none, and an `error` instead, the name of its type. `again`
    says that it is a part of a batch that had failed. It should have taken `predicted` seconds from
    leaving until done; 0 when nothing was known, and for a part. `instance` is the function that ran it, from 0.

    `riders` are at most the first 64 of its `requests`, in their places; None when nobody had looked lately.
    """

    number: int | None
    instance: int
    requests: int
    rows: int
    reason: CloseReason | None
    again: bool
    predicted: float
    padded_length: int | None
    left: float
    joining: float
    ready: float
    started: float
    ended: float
    answered: float
    done: float | None
    error: str
    riders: Sequence[Rider] | None


class _Kept(NamedTuple):
    """What is put together to a record when somebody looks. `done` gets the one moment that is known only later."""

    info: BatchInfo
    instance: int
    again: bool
    left: float
    times: Times
    answered: float
    error: str
    riders: list[Rider] | None
    done: list[float]


_new = tuple.__new__


class Record:
    """Keeps the last batches. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Guards _kept. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._kept: deque[_Kept] = deque(maxlen=MOST_BATCHES)
        # A float that is replaced: looking at it needs no lock.
        self._watched_until = -math.inf

    def ran(
        self,
        info: BatchInfo,
        batch: Sequence[Request],
        here: Sequence[Request],
        instance: int,
        work: Work,
        times: Times,
        now: float,
    ) -> None:
        """A batch has run and is now to be answered: to those of its requests who are still here."""
        riders = None
        if now < self._watched_until:
            still = set(map(id, here))
            riders = [
                _rider(request, answered=id(request) in still and request.deadline > now)
                for request in batch[:MOST_RIDERS]
            ]
        # As `_Kept(...)`, in half the time.
        kept: _Kept = _new(
            _Kept, (info, instance, batch is not work.batch, batch[0].started, times, now, "", riders, [])
        )
        with self._lock:
            self._kept.append(kept)

    def done(self, times: Times, now: float) -> None:
        """All answers of the batch that had these times are handed out."""
        with self._lock:
            for kept in reversed(self._kept):
                if kept.times is times:
                    kept.done.append(now)
                    return

    def failed(
        self, error: BaseException, batch: Sequence[Request], instance: int, work: Work, times: Times
    ) -> None:
        """A batch failed; what becomes of its requests is another matter."""
        riders = None
        if times.ended < self._watched_until:
            riders = [_rider(request, answered=False) for request in batch[:MOST_RIDERS]]
        again = batch is not work.batch
        rows = sum([request.rows for request in batch])
        info = BatchInfo(0, len(batch), rows, times.ended - times.started, work.reason, work.predicted)
        if batch[0].padding is not None:
            info = info._replace(padded_length=batch[0].padding.padded_length)
        name = type(error).__name__
        kept = _Kept(info, instance, again, batch[0].started, times, times.ended, name, riders, [])
        with self._lock:
            self._kept.append(kept)

    def look(self) -> Sequence[BatchRecord]:
        """What is kept, the oldest first; from now on, for a while, riders are noted."""
        self._watched_until = self._clock.now() + WATCHED_SECONDS
        with self._lock:
            every = list(self._kept)
        return [_record_of(kept) for kept in every]


def _rider(request: Request, *, answered: bool) -> Rider:
    tag = request.tag
    if isinstance(tag, str) and len(tag) > _TAG_CHARACTERS:
        tag = tag[:_TAG_CHARACTERS]
    return Rider(tag, request.rows, request.priority, request.started - request.arrival, answered)


def _record_of(kept: _Kept) -> BatchRecord:
    info, instance, again, left, times, answered, error, riders, done = kept
    return BatchRecord(
        number=info.number or None,
        instance=instance,
        requests=info.requests,
        rows=info.rows,
        reason=info.reason,
        again=again,
        predicted=0.0 if again else info.predicted,
        padded_length=info.padded_length,
        left=left,
        joining=times.begun,
        ready=times.ready,
        started=times.started,
        ended=times.ended,
        answered=answered,
        done=done[0] if done else None,
        error=error,
        riders=riders,
    )
