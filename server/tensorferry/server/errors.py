"""Errors of the server; `status.py` maps them to gRPC statuses."""

_MAX_QUOTED_CHARACTERS = 128


def truncate(text: str, length: int = _MAX_QUOTED_CHARACTERS) -> str:
    """Return at most `length` characters of a text that a client sent, for an error message."""
    return text if len(text) <= length else text[:length] + "..."


class ServerError(Exception):
    """Base class of errors whose message is for the client."""


class InvalidRequestError(ServerError):
    """The request does not fit the protocol or the model."""


class NotFoundError(ServerError):
    """The model, or the version of the model, does not exist."""


class AlreadyExistsError(ServerError):
    """The object to create exists already."""


class LimitError(ServerError):
    """A limit of the server is reached, or the machine lacks a resource."""


class UnreadResponsesError(LimitError):
    """Clients have not read their responses, and the server keeps no more of them; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ResponseTooLargeError(LimitError):
    """The response is larger than a message may be, which is known only after the model has run."""


class NotReadyError(ServerError):
    """The model is not ready, or the server is draining."""


class SuspectError(NotReadyError):
    """An equal request may have ended a process, and this one cannot be tried alone yet.

    `retry_after` is in seconds. It is suspect until `until`, on the clock of time.monotonic.
    """

    def __init__(self, message: str, retry_after: float, until: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.until = until


class UnauthenticatedError(ServerError):
    """The call has no valid token or certificate."""


class PermissionDeniedError(ServerError):
    """The client is known, but lacks the role that the method requires."""


class LoadFailedError(ServerError):
    """A model cannot be loaded; the message names the file or the setting that causes it."""


class UnsupportedError(ServerError):
    """The request uses a feature that this server does not support."""


class ModelFailedError(ServerError):
    """The model failed while it ran this request alone; the cause is for the log, not for the client."""


class OneProcessError(ServerError):
    """The method changes one process, and the server has several."""


class StepFailedError(ModelFailedError):
    """A Python function of a model raised an exception, or returned something else than it declares.

    The message is for the client. It names the model and the step, and has nothing of the exception. `reason` is for the
    log's line, and `details`, such as a traceback, for the lines after it.
    """

    def __init__(self, message: str, reason: str = "", details: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message
        self.details = details


class StartError(Exception):
    """The server cannot start; the message names the cause, for the operator."""


class ModelConfigError(StartError):
    """A model's configuration is invalid; the message names the file or the model, and the field."""


class ConfigError(Exception):
    """An option has a bad value; the message names the option, the value, and what is allowed."""
