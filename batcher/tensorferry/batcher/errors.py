"""What can become of a request besides an answer. Messages state values and what to change.

The last three are also what a model function raises to tell the batcher what happened to it.
"""

from __future__ import annotations

from collections.abc import Callable


class BatcherError(Exception):
    """The root of the batcher's errors."""


class InvalidRequest(BatcherError, ValueError):
    """The request's arrays cannot be batched: no rows, or rows that differ between inputs."""


class RequestTooLarge(BatcherError, ValueError):
    """The request alone exceeds a bound of the queue and could never be accepted."""


class QueueFull(BatcherError):
    """Refused: the queue has no room for the request now.

    `retry_after` is the estimated time in seconds until there is room. So much waits that who takes requests in may
    leave those that come for `pause_seconds`, to take them in together: none of them could leave sooner.
    """

    def __init__(self, message: str, retry_after: float, pause_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.pause_seconds = pause_seconds


class Shed(BatcherError):
    """Dropped from the queue under overload, so that others make their deadlines.

    `retry_after` is the estimated time in seconds until the queue has drained.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(BatcherError, TimeoutError):
    """The deadline passed before the answer was there."""


class Cancelled(BatcherError):
    """The caller left before the answer was there."""


class BatcherClosed(BatcherError):
    """The batcher drains or is closed and accepts nothing new."""


class ModelOutputError(BatcherError):
    """The model function returned something that cannot be split into the requests' rows."""


class ModelRowsError(ModelOutputError):
    """An output of the model has another number of rows than the batch."""


class OutOfMemory(BatcherError, MemoryError):
    """So many rows do not fit into the device's memory.

    From a model function it, as any MemoryError, has the batch run again in smaller ones, and batches be
    smaller for a while (see `MemoryRowLimit`). A request gets it when it alone, or one row of it, is too much.
    """


class InstanceFailed(BatcherError):
    """What runs the batch is broken: its requests are not at fault.

    From a model function it sends the batch's requests back to the head of the queue, each once. With `recover`
    the function is not called again until that, called by a worker outside every lock, has returned: it brings
    the function back, or raises InstanceFailed, whose `retry_after` is when to try again. A request gets it when
    it was sent back before, or nothing is left that could run it; `retry_after` in seconds is then a hint.
    """

    def __init__(
        self, message: str, retry_after: float = 1.0, recover: Callable[[], None] | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.recover = recover


class RunTimedOut(BatcherError):
    """The batch ran for longer than it may, and was given up: all its requests get this, and none runs again."""
