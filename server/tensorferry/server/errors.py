"""The server's own errors; `status.py` says which gRPC status each becomes."""

_MOST_SHOWN = 128


def truncate(text: str, most: int = _MOST_SHOWN) -> str:
    """What a client sent, for an error message: at most `most` characters of it."""
    return text if len(text) <= most else text[:most] + "..."


class ServerError(Exception):
    """The root of the errors whose message is meant for the client."""


class InvalidRequestError(ServerError):
    """The request does not fit the protocol or the model."""


class NotFoundError(ServerError):
    """There is no such model, or no such version of it."""


class AlreadyExistsError(ServerError):
    """What is to be made is there already."""


class LimitError(ServerError):
    """The server has as many of something as it keeps, or the machine has no more room."""


class UnreadResponsesError(LimitError):
    """Clients have yet to read as many bytes of answers as the server keeps; `retry_after` in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotReadyError(ServerError):
    """The model is not ready, or the server drains."""


class UnauthenticatedError(ServerError):
    """The call has no token or certificate that the server knows."""


class PermissionDeniedError(ServerError):
    """Whoever calls is known, and does not have the role that the method wants."""


class LoadFailedError(ServerError):
    """A model cannot be loaded: the message names the file or the setting that is at fault."""


class UnsupportedError(ServerError):
    """The request asks for something that this server does not do."""


class ModelFailedError(ServerError):
    """The model raised while it ran this request alone; its cause is for the log, not for clients."""


class StartError(Exception):
    """The server cannot start: the message names what is at fault, for the person at the shell."""


class ModelConfigError(StartError):
    """A model's configuration cannot be used: the message names the file or the model, and the field."""


class ConfigError(Exception):
    """An option has a bad value: the message names the option, the value, and what is allowed."""
