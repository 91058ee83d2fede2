"""Errors of requests. Messages state values and what to change.

Model functions raise the last four to report what happened.
"""

from __future__ import annotations

from collections.abc import Callable


class BatcherError(Exception):
    """Base of the batcher's errors."""


class InvalidRequest(BatcherError, ValueError):
    """The request's arrays cannot be batched: no rows, or rows that differ between inputs."""


class SequenceNotStarted(InvalidRequest):
    """The first request of a sequence does not say that it starts one."""


class SequenceEnded(BatcherError):
    """The sequence of the request has ended. The message says why."""


class RequestTooLarge(BatcherError, ValueError):
    """The request alone exceeds a bound of the queue and could never be accepted."""


class QueueFull(BatcherError):
    """Rejected: the queue has no room for the request now.

    `retry_after` is the estimated time until there is room, in seconds. A transport may leave new requests unread for
    `pause_seconds`, and then read them together: none of them could run sooner.
    """

    def __init__(self, message: str, retry_after: float, pause_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.pause_seconds = pause_seconds


class Shed(BatcherError):
    """Dropped from the queue in an overload, so that others meet their deadlines.

    `retry_after` is the estimated time in seconds until the queue has drained.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(BatcherError, TimeoutError):
    """The deadline passed before the request was answered, or could not be met."""


class Cancelled(BatcherError):
    """The caller cancelled the request before it was answered."""


class BatcherClosed(BatcherError):
    """The batcher is draining or closed and accepts no requests."""


class ModelOutputError(BatcherError):
    """The model function returned something that cannot be split into the requests' rows."""


class ModelRowsError(ModelOutputError):
    """An output of the model does not have as many rows as the batch."""


class OutOfMemory(BatcherError, MemoryError):
    """The batch does not fit into the device's memory.

    If a model function raises it, or any MemoryError, the batch runs again in parts, and batches are smaller for a while
    (see `MemoryRowLimit`). A request gets it if it, or one row of it, does not fit alone.
    """


class InstanceFailed(BatcherError):
    """The device is broken; the batch's requests are not at fault.

    If a model function raises it, the batch's requests are queued again at the head, each once. The function is then not
    called again until `recover`, if given, has returned: a worker calls it outside every lock. It repairs the device, or
    raises InstanceFailed with the time to the next try as `retry_after`. A request gets this error if it was queued again
    before, or no device is left to run it; `retry_after`, in seconds, is then a hint.
    """

    def __init__(
        self, message: str, retry_after: float = 1.0, recover: Callable[[], None] | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.recover = recover


class RunTimedOut(BatcherError):
    """The batch ran for too long and was aborted. All its requests get this error, and none runs again."""


class BatchFailed(BatcherError):
    """All requests of the batch get `error`, and none runs again: it does not depend on what they are."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error
