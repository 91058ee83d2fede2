"""Failures of a model's Python functions: what the client gets, and what the log gets.

A function may run in another process, so a failure is described there, as text, and made an error here.
"""

from __future__ import annotations

import traceback
from typing import NamedTuple

from tensorferry.batcher import BatcherError, InstanceFailed
from tensorferry.server.errors import (
    InvalidRequestError,
    NotReadyError,
    ServerError,
    StepFailedError,
    truncate,
)
from tensorferry.serving.errors import InvalidInput

# The longest text of an InvalidInput, which the client gets, in characters.
_MAX_PUBLIC_CHARACTERS = 1000
# The most of an exception's text and of its traceback in the log, in characters.
_MAX_REASON_CHARACTERS = 500
_MAX_DETAILS_CHARACTERS = 16_000


class Failure(NamedTuple):
    """An exception of a function, as text. `refusal` is the text of an InvalidInput, else None.

    `reason` is the exception's type and text, `details` its traceback. Both are for the log only.
    """

    refusal: str | None
    reason: str
    details: str


def describe(error: BaseException) -> Failure:
    """Return the description of an exception that a function raised. It keeps no reference to the exception."""
    try:
        text = str(error)
    except Exception:
        text = "(its __str__ raises an exception)"
    refusal = None
    if isinstance(error, InvalidInput):
        # A lone surrogate, from bytes decoded by "surrogateescape", has no UTF-8, and a status must be UTF-8.
        refusal = truncate(text.encode(errors="replace").decode(), _MAX_PUBLIC_CHARACTERS)
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    details = "".join(traceback.format_exception(error)).rstrip()
    return Failure(refusal, truncate(reason, _MAX_REASON_CHARACTERS), _shortened(details))


def error_of(failure: Failure, model: str, step: str) -> ServerError:
    """Return the error of a request for which a model's function failed.

    `step` is the name of the function's step, which is `model` if the function is the whole model.
    """
    if failure.refusal is not None:
        return InvalidRequestError(failure.refusal or f"{_place(model, step)} refused the input")
    return StepFailedError(
        f"{_place(model, step)} failed on this request: the server's log has the reason",
        f"{_step(step)} raised {failure.reason}",
        failure.details,
    )


def request_error(error: BaseException, model: str, step: str) -> BaseException:
    """Return the error of a request for which a function in this process raised an exception.

    Errors of the server and the batcher, which other models' answers raise in a function, stay as they are, and so does
    MemoryError, after which the batcher runs the batch in parts. InstanceFailed becomes NotReadyError, because it
    would put this model's instance out of service.

    Raise it after the `except` block. Otherwise it refers to the exception, whose traceback keeps the batch's arrays.
    """
    if isinstance(error, InstanceFailed):
        return NotReadyError(f"{_place(model, step)} called a model that is not available: {error}")
    if isinstance(error, (ServerError, BatcherError, MemoryError)):
        return error
    return error_of(describe(error), model, step)


def wrong_return(problem: str, model: str, step: str) -> StepFailedError:
    """Return the error of a function that returned something else than it declares.

    `problem` says what was returned and what is declared, without values: "output 'y' is INT32[2], declared FP32[-1]".
    """
    return StepFailedError(
        f"{_place(model, step)} failed on this request: {problem}",
        f"{_step(step)} returned a wrong result: {problem}",
    )


def _place(model: str, step: str) -> str:
    return f"model {model!r}" if step == model else f"step {step!r} of model {model!r}"


def _step(step: str) -> str:
    return f"step {step!r}"


def _shortened(text: str) -> str:
    """Return a traceback without its middle if it is too long: the end has the exception, the beginning the call."""
    if len(text) <= _MAX_DETAILS_CHARACTERS:
        return text
    half = _MAX_DETAILS_CHARACTERS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
