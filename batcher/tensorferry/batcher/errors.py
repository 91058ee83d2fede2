"""What can become of a request besides an answer. Messages state values and what to change."""


class BatcherError(Exception):
    """The root of the batcher's errors."""


class InvalidRequest(BatcherError, ValueError):
    """The request's arrays cannot be batched: no rows, or rows that differ between inputs."""


class RequestTooLarge(BatcherError, ValueError):
    """The request alone exceeds a bound of the queue and could never be accepted."""


class QueueFull(BatcherError):
    """Refused: the queue has no room for the request now.

    `retry_after` is the estimated time in seconds until there is room.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


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
