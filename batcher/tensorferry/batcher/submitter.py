"""Futures for the requests of a batcher or a pipeline."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

import numpy.typing as npt

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import InvalidRequest
from tensorferry.batcher.execution.collate import first_row, own, request_of
from tensorferry.batcher.padding import Padding
from tensorferry.batcher.request import Outcome, Request
from tensorferry.batcher.settings import BatcherSettings, QueuePolicy


class Submitter(ABC):
    """Takes examples, and gives a future for each; the base class of `Batcher` and `Pipeline`. Thread-safe.

    `settings` are those that its callers see.
    """

    def __init__(self, settings: BatcherSettings, clock: Clock, padding: Padding | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._padding = padding
        self._batched = settings.max_batch_size > 0

    @property
    def settings(self) -> BatcherSettings:
        """Return the settings that hold for its callers."""
        return self._settings

    @property
    def priorities(self) -> int:
        """Return the number of priority classes."""
        return len(self._settings.priority_weights)

    @property
    def policies(self) -> Sequence[QueuePolicy]:
        """Return the queue policy of each class; empty if there are none."""
        return self._settings.policies

    def submit(
        self,
        x: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        *,
        timeout: float | None = None,
        priority: int = 0,
        tag: object = None,
        client: str = "",
    ) -> Future[Any]:
        """Enqueue one example, without the batch axis; the future gets its row of the result.

        `x` is an array, or a dict of arrays, of the shape of one row of the model's input. A pipeline takes and returns dicts,
        by the names of its inputs and outputs. It is copied when its batch starts, so do not change it until the future is
        done. `timeout` is in seconds from now; `priority` is the class, 1 the highest, 0 the default; `client` names the
        client, `tag` identifies the request in `last_batches`.

        Raises QueueFull, RequestTooLarge, DeadlineExceeded (the timeout is not positive, or too short), BatcherClosed,
        InstanceFailed (no device works) or InvalidRequest. The future gets the result, or the model's exception,
        OutOfMemory, InstanceFailed, RunTimedOut, DeadlineExceeded, Shed, or BatcherClosed if the batcher is closed
        without draining. Cancelling the future withdraws the request. Never blocks.
        """
        return self._submit(x, timeout, priority, tag, client, one_row=self._batched)

    def submit_rows(
        self,
        x: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        *,
        timeout: float | None = None,
        priority: int = 0,
        tag: object = None,
        client: str = "",
    ) -> Future[Any]:
        """Enqueue several rows as one request, with the rows on axis 0 of each array. Otherwise like `submit`."""
        return self._submit(x, timeout, priority, tag, client, one_row=False)

    def _submit(
        self, x: Any, timeout: float | None, priority: int, tag: object, client: str, *, one_row: bool
    ) -> Future[Any]:
        future: Future[Any] = Future()
        request = request_of(
            x,
            completion_of(future, one_row=one_row),
            one_row=one_row,
            batched=self._batched,
            deadline=self._until(timeout),
            padding=self._padding,
        )
        request.priority, request.tag, request.client = priority, tag, client
        self.enqueue(request)
        # Only now, because a rejected request and its future would keep each other, and the arrays, alive.
        future.add_done_callback(lambda done: self.cancel(request) if done.cancelled() else None)
        return future

    @abstractmethod
    def enqueue(self, request: Request, *, notify: bool = True, skip_admission: bool = False) -> bool:
        """Accept a request built by the caller."""

    @abstractmethod
    def cancel(self, request: Request) -> bool:
        """Withdraw a request."""

    @abstractmethod
    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Accept nothing new, finish, and end."""

    def _unknown_class(self, priority: int) -> InvalidRequest:
        """Return the error of a request whose class does not exist."""
        return InvalidRequest(
            f"priority is {priority}; it must be from 1, the highest, to {self.priorities}, or 0 for the default"
        )

    def _until(self, timeout: float | None) -> float:
        """Return the end of a timeout on the clock; inf for none."""
        return math.inf if timeout is None else self._clock.now() + timeout

    def _left(self, until: float) -> float | None:
        """Return the seconds until then, at least 0; None if there is no end."""
        return None if until == math.inf else max(0.0, until - self._clock.now())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def completion_of(future: Future[Any], *, one_row: bool) -> Callable[[Outcome], None]:
    """A callback that resolves a future with a request's rows; with `one_row`, with its only row without axis 0."""

    def complete(outcome: Outcome) -> None:
        # False if the future was cancelled: nothing waits for the outcome.
        if not future.set_running_or_notify_cancel():
            return
        if outcome.error is not None:
            future.set_exception(outcome.error)
            return
        try:
            result = own(first_row(outcome.outputs) if one_row else outcome.outputs)
        except Exception as error:
            # No memory for the copy, for example.
            future.set_exception(error)
            return
        future.set_result(result)

    return complete
