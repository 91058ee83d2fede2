"""Errors of a run in a child process."""

from __future__ import annotations

from tensorferry.server.errors import ModelFailedError, NotReadyError
from tensorferry.server.function_failure import Failure


class FunctionRaised(Exception):
    """The function raised an exception, or returned what cannot be sent. Its process goes on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class ProcessDied(ModelFailedError):
    """The process ended while it ran the batch. `how` is for the log: an exit status, or a signal by name.

    The message is for the client. `ended` is whether the server ended it, by `end_runs` or `close`.
    """

    def __init__(self, message: str, how: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.how = how
        self.ended = ended


class RequestRefused(ModelFailedError):
    """Equal inputs have ended a process lately."""


class ProcessNotStarted(NotReadyError):
    """The process cannot be started: the app file, or the class's `load`, fails.

    The message is for the client, `reason`, with the traceback, for the operator. `retry_after` is the time in seconds until
    the next start is tried; until then runs raise this error.
    """

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(
            "the process of the model's function cannot be started; the server's log has the reason"
        )
        self.reason = reason
        self.retry_after = retry_after
