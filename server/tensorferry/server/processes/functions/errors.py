"""Errors of a run in a child process, and exceptions that one process sends and the other raises."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from tensorferry.server.errors import NotReadyError, StepFailedError
from tensorferry.server.processes.suspect_requests import REFUSED
from tensorferry.server.python.functions.failure import Failure, text_of

# Modules with the exceptions that are raised as they are. Of another one its next base is raised.
_KNOWN = ("builtins", "tensorferry.serving.errors", "tensorferry.batcher.errors", "tensorferry.server.errors")
_PLAIN = frozenset({str, int, float, bool})


class FunctionRaised(Exception):
    """The function raised an exception, or returned what cannot be sent. Its process goes on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class ProcessDied(StepFailedError):
    """The process ended while it ran the batch. `how`: with an exit status, by a signal, or by `end_runs` or `close`.

    The message is for the client.
    """

    def __init__(self, message: str, how: str) -> None:
        super().__init__(message, f"the process that ran it ended ({how})")


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


class SentError(NamedTuple):
    """An exception that is sent. `attributes` are those that are numbers or text."""

    module: str
    name: str
    text: str
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> SentError:
        """Return what is sent of an exception."""
        known = next(each for each in type(error).__mro__ if each.__module__ in _KNOWN)
        text = text_of(error) if known is type(error) else f"{type(error).__name__}: {text_of(error)}"
        # No subclasses, such as members of an Enum, because the other process does not have the user's classes.
        attributes = {name: value for name, value in vars(error).items() if type(value) in _PLAIN}
        return cls(known.__module__, known.__qualname__, text, attributes)

    def exception(self) -> BaseException:
        """Return an exception of the same class with the same text; RuntimeError if the class needs more than a text."""
        kind: type[BaseException] = getattr(import_module(self.module), self.name)
        try:
            # Not the constructor, which may have other parameters.
            error = kind.__new__(kind, self.text)
            error.args = (self.text,)
        except TypeError:
            error = RuntimeError(f"{self.name}: {self.text}")
        if self.text and not str(error):
            error = RuntimeError(f"{self.name}: {self.text}")
        vars(error).update(self.attributes)
        return error
