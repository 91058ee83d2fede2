"""Protocols of the queue as the policy uses it, so that tests can bring their own requests and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class QueuedRequest(Protocol):
    """A queued request; `Request` implements it."""

    @property
    def rows_counted(self) -> int:
        """The number of rows, at least one."""

    @property
    def arrival(self) -> float:
        """The time at which it was accepted."""

    @property
    def deadline(self) -> float:
        """The absolute deadline; inf for none."""


R = TypeVar("R", bound=QueuedRequest)
R_co = TypeVar("R_co", bound=QueuedRequest, covariant=True)


class ClassQueueView(Protocol[R_co]):
    """The queued requests of one priority class that may share a batch."""

    @property
    def with_deadline(self) -> Sequence[R_co]:
        """The requests with a deadline, the earliest first."""

    @property
    def without_deadline(self) -> Sequence[R_co]:
        """The requests without a deadline, in order of arrival."""

    @property
    def rows(self) -> int:
        """The sum of the requests' rows."""

    @property
    def serve_by(self) -> float:
        """The time by which the first request is to be served, compared between queues; inf if empty."""

    @property
    def max_wait_before_priority(self) -> float:
        """Time that a request without a deadline waits before it may precede those with one."""


class BucketView(Protocol):
    """The queued requests that may share a batch; never empty."""

    @property
    def class_queues(self) -> Sequence[ClassQueueView[QueuedRequest]]:
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
