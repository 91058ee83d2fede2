"""The last batches: their times and, on demand, their requests.

A batch's own figures are always kept, because they exist anyway. Its members are noted only for some seconds after a
snapshot, because that costs time for each request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.request import BatchInfo, BatchRun, CloseReason, Request, padded_length

# How many batches are kept, and how many members are noted of each.
MOST_BATCHES = 64
MOST_MEMBERS = 64
# For how long members are noted after a snapshot.
WATCHED_SECONDS = 10.0

# A client may choose a tag's text: only this many characters of it are kept.
_TAG_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class BatchMember:
    """A request in a batch: its tag, rows and class, and how long it was queued, in seconds.

    `queue_delay` ends when the batch is closed. `answered` is false if the request was cancelled or too late while
    the batch ran, or if the batch failed.
    """

    tag: object
    rows: int
    priority: int
    queue_delay: float
    answered: bool


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch that ran. Times are on the batcher's clock, in seconds, in the order of the fields.

    The batch was closed at `closed_at`, its inputs were joined from `join_at` on, it was `ready` for the device,
    `started` and `ended` there, its answers were handed out from `answered` on, and all were out at `done`. `done` is
    None while answers are handed out, for a failed batch, and for a part. `number` counts the batches that succeeded,
    from 1. A failed batch has None, and as `error` the name of the error's type. `again` marks a part of a batch that
    had failed. `predicted` is the expected time from `closed_at` to `done`; 0 if unknown, and for a part. `instance` is
    the index of the model function.

    `step_ends` has the name and the end of each step that the model function ran, if it says so.

    `members` are at most the first 64 of its `requests`; None if no snapshot was taken shortly before.
    """

    number: int | None
    instance: int
    requests: int
    rows: int
    reason: CloseReason | None
    again: bool
    predicted: float
    padded_length: int | None
    closed_at: float
    join_at: float
    ready: float
    started: float
    ended: float
    answered: float
    done: float | None
    error: str
    members: Sequence[BatchMember] | None
    step_ends: Sequence[tuple[str, float]] = ()


# The fields of a `BatchMember`; the record is made by a snapshot.
_Member: TypeAlias = tuple[object, int, int, float, bool]
# What a snapshot makes a `BatchRecord` of: batch, run, time of the first answer, error, members. Requests are not kept,
# because they hold tensors.
_Kept: TypeAlias = tuple[BatchInfo, BatchRun, float, str, list[_Member] | None]


class RecentBatches:
    """The last batches. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Has no lock, because appending and copying are atomic.
        self._kept: deque[_Kept] = deque(maxlen=MOST_BATCHES)
        self._watched_until = -math.inf

    def ran(
        self,
        info: BatchInfo,
        run: BatchRun,
        batch: Sequence[Request],
        remaining: Sequence[Request],
        now: float,
    ) -> None:
        """Add a batch that ran, before the `remaining` of its requests are answered."""
        members = None
        if now < self._watched_until:
            alive = {id(request) for request in remaining if request.deadline > now}
            members = [_member(request, id(request) in alive) for request in batch[:MOST_MEMBERS]]
        self._kept.append((info, run, now, "", members))

    def failed(self, error: BaseException, run: BatchRun, batch: Sequence[Request]) -> None:
        """Add a batch that failed."""
        members = None
        if run.ended < self._watched_until:
            members = [_member(request, False) for request in batch[:MOST_MEMBERS]]
        rows = sum([request.rows for request in batch])
        info = BatchInfo(0, len(batch), rows, run.ended - run.started, padded_length=padded_length(batch))
        self._kept.append((info, run, run.ended, type(error).__name__, members))

    def snapshot(self) -> Sequence[BatchRecord]:
        """The kept batches, the oldest first. From now on, for 10 seconds, members are noted."""
        self._watched_until = self._clock.now() + WATCHED_SECONDS
        return [_record_of(kept) for kept in self._kept.copy()]


def _member(request: Request, answered: bool) -> _Member:
    tag = request.tag
    if isinstance(tag, str) and len(tag) > _TAG_CHARACTERS:
        tag = tag[:_TAG_CHARACTERS]
    return tag, request.rows, request.priority, request.started - request.arrival, answered


def _record_of(kept: _Kept) -> BatchRecord:
    info, run, answered, error, members = kept
    return BatchRecord(
        number=info.number or None,
        instance=run.instance,
        requests=info.requests,
        rows=info.rows,
        reason=run.reason,
        again=run.again,
        predicted=0.0 if run.again else run.predicted,
        padded_length=info.padded_length,
        closed_at=run.closed_at,
        join_at=run.join_start,
        ready=run.ready,
        started=run.started,
        ended=run.ended,
        answered=answered,
        done=run.done[0] if run.done else None,
        error=error,
        members=None if members is None else [BatchMember(*member) for member in members],
        step_ends=run.step_ends,
    )
