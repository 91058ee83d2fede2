"""Errors of a run in a child process."""

from __future__ import annotations

from tensorferry.server.errors import NotReadyError, StepFailedError
from tensorferry.server.functions.failure import Failure
from tensorferry.server.refused_requests import REFUSED


class FunctionRaised(Exception):
    """The function raised an exception, or returned what cannot be sent. Its process goes on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class ProcessDied(StepFailedError):
    """The process ended while it ran the batch. `how`: with an exit status, or by a signal.

    The message is for the client. `ended` is whether the server ended it, by `end_runs` or `close`.
    """

    def __init__(self, message: str, how: str, *, ended: bool = False) -> None:
        super().__init__(message, f"the process that ran it ended ({how})")
        self.how = how
        self.ended = ended


class RequestRefused(StepFailedError):
    """Equal inputs have ended a process lately."""

    def __init__(self) -> None:
        super().__init__(REFUSED, "refused, because equal inputs have ended a process lately")


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
