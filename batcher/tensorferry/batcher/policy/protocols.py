"""Protocols of what the policy uses of the queue and of the cost model, which it does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tensorferry.batcher.policy.class_queue import ClassQueue


class BucketView(Protocol):
    """The queued requests that may share a batch; never empty."""

    @property
    def class_queues(self) -> Sequence[ClassQueue]:
        """The requests by rank, the highest first."""

    @property
    def rows(self) -> int:
        """The sum of the requests' rows."""

    @property
    def full_rows(self) -> int:
        """The rows of a full batch."""

    @property
    def oldest_arrival(self) -> float:
        """The arrival of the oldest request."""

    @property
    def latest_start(self) -> float:
        """The latest start of its batch at which the earliest deadline is met; inf for none."""


class BatchTimes(Protocol):
    """Times of batches in seconds; the cost model implements it."""

    @property
    def stale(self) -> bool:
        """Whether large batches have not run for so long that their time is a guess."""

    def mean(self, rows: int, /) -> float:
        """Return the expected time; 0 if nothing is known."""

    def upper(self, rows: int, /) -> float:
        """Return the time with a margin; 0 if nothing is known."""

    def max_rows_within(self, slack: float) -> int:
        """Return the most rows whose `upper` is within the slack."""
