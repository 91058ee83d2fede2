"""The last batches, for who wants to see how they formed: who rode in each, how long they waited, what it took.

What a batch was is kept always: its figures are there anyway. Who rode in it is noted only while somebody
looks, since that costs something for every request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.request import BatchAssignment, BatchInfo, CloseReason, Request, Times

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


# What is put together to a `Rider` when somebody looks: its fields.
_Noted: TypeAlias = tuple[object, int, int, float, bool]
# What is put together to a record when somebody looks: the batch, the instance, whether it is a part, when it left,
# its times, when its answers began, its error, its riders.
_Kept: TypeAlias = tuple[BatchInfo, int, bool, float, Times, float, str, list[_Noted] | None]


class Record:
    """Keeps the last batches. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Without a lock: to append to it, and to copy it, are one step each for all threads.
        self._kept: deque[_Kept] = deque(maxlen=MOST_BATCHES)
        self._watched_until = -math.inf

    def ran(
        self,
        info: BatchInfo,
        batch: Sequence[Request],
        here: Sequence[Request],
        instance: int,
        work: BatchAssignment,
        times: Times,
        now: float,
    ) -> None:
        """A batch has run and is now to be answered: to those of its requests who are still here."""
        riders = None
        if now < self._watched_until:
            riders = [_noted(request, request.deadline > now) for request in batch[:MOST_RIDERS]]
            if len(here) < len(batch):
                still = set(map(id, here))
                for place, request in enumerate(batch[:MOST_RIDERS]):
                    if id(request) not in still:
                        riders[place] = _noted(request, False)
        self._kept.append((info, instance, batch is not work.batch, batch[0].started, times, now, "", riders))

    def failed(
        self,
        error: BaseException,
        batch: Sequence[Request],
        instance: int,
        work: BatchAssignment,
        times: Times,
    ) -> None:
        """A batch failed; what becomes of its requests is another matter."""
        riders = None
        if times.ended < self._watched_until:
            riders = [_noted(request, False) for request in batch[:MOST_RIDERS]]
        again = batch is not work.batch
        rows = sum([request.rows for request in batch])
        info = BatchInfo(0, len(batch), rows, times.ended - times.started, work.reason, work.predicted)
        if batch[0].padding is not None:
            info = info._replace(padded_length=batch[0].padding.padded_length)
        name = type(error).__name__
        self._kept.append((info, instance, again, batch[0].started, times, times.ended, name, riders))

    def look(self) -> Sequence[BatchRecord]:
        """What is kept, the oldest first; from now on, for a while, riders are noted."""
        self._watched_until = self._clock.now() + WATCHED_SECONDS
        return [_record_of(kept) for kept in self._kept.copy()]


def _noted(request: Request, answered: bool) -> _Noted:
    tag = request.tag
    if isinstance(tag, str) and len(tag) > _TAG_CHARACTERS:
        tag = tag[:_TAG_CHARACTERS]
    return tag, request.rows, request.priority, request.started - request.arrival, answered


def _record_of(kept: _Kept) -> BatchRecord:
    info, instance, again, left, times, answered, error, riders = kept
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
        done=times.done[0] if times.done else None,
        error=error,
        riders=None if riders is None else [Rider(*noted) for noted in riders],
    )
