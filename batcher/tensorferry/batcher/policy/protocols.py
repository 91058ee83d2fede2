"""What the policy sees of the queue: protocols, so that tests can bring requests and times of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar


class QueuedRequest(Protocol):
    """What the policy sees of a queued request; `Request` is the real one, tests bring their own."""

    @property
    def rows_counted(self) -> int:
        """Rows, at least one."""

    @property
    def arrival(self) -> float:
        """When it was accepted."""

    @property
    def deadline(self) -> float:
        """Absolute; inf for none."""


R = TypeVar("R", bound=QueuedRequest)
R_co = TypeVar("R_co", bound=QueuedRequest, covariant=True)


class OrderedRequests(Protocol[R_co]):
    """Requests in an order."""

    def __len__(self) -> int:
        """How many."""

    def __iter__(self) -> Iterator[R_co]:
        """The first first."""


class ClassQueueView(Protocol[R_co]):
    """What the policy sees of the queued requests of one priority class that may share a batch."""

    @property
    def with_deadline(self) -> Sequence[R_co]:
        """Those with a deadline, the earliest first."""

    @property
    def without_deadline(self) -> OrderedRequests[R_co]:
        """Those without, in order of arrival."""

    @property
    def rows(self) -> int:
        """The sum of their costs."""

    @property
    def serve_by(self) -> float:
        """When the first must be served at the latest, to be compared with other lanes'; inf when empty."""

    @property
    def max_wait_before_priority(self) -> float:
        """How long one without a deadline waits before it may go before those with one."""


class BucketView(Protocol):
    """What the policy sees of the queued requests that may share a batch: never empty."""

    @property
    def class_queues(self) -> Sequence[ClassQueueView[QueuedRequest]]:
        """The requests by priority class, the highest first."""

    @property
    def rows(self) -> int:
        """The sum of their costs."""

    @property
    def oldest_arrival(self) -> float:
        """The arrival of the one that came first."""

    @property
    def latest_start(self) -> float:
        """When its batch must leave at the latest for the earliest deadline to be met; inf for none."""


class BatchTimes(Protocol):
    """How long batches take, in seconds: `Profile` is the real one."""

    @property
    def stale(self) -> bool:
        """Whether no large batch has run for so long that what one takes is a guess."""

    def mean(self, rows: int) -> float:
        """Expected; 0 when nothing is known."""

    def upper(self, rows: int) -> float:
        """With a margin; 0 when nothing is known."""

    def fit(self, slack: float) -> int:
        """The most rows whose `upper` is within the slack."""
