"""Failures of a model's Python functions: what the client gets, and what the log gets.

A function may run in another process, so a failure is described there, as text (`Failure`), and made an error here.
"""

from __future__ import annotations

from tensorferry.batcher import BatcherError, InstanceFailed
from tensorferry.server.errors import InvalidRequestError, NotReadyError, ServerError, StepFailedError
from tensorferry.server.processes.functions.errors import FunctionRaised
from tensorferry.server.python.functions.failure import describe


def request_error(error: BaseException, model: str, step: str) -> BaseException:
    """Return the error of a request for which a function raised an exception, here or in a child process.

    `step` is the name of the function's step, which is `model` if the function is the whole model.

    Errors of the server and the batcher, which other models' answers raise in a function, stay as they are, and so does
    MemoryError, after which the batcher runs the batch in parts. InstanceFailed becomes NotReadyError, because it
    would put this model's instance out of service.

    Raise it after the `except` block. Otherwise it refers to the exception, whose traceback keeps the batch's arrays.
    """
    if isinstance(error, InstanceFailed):
        return NotReadyError(f"{_place(model, step)} called a model that is not available: {error}")
    if isinstance(error, (ServerError, BatcherError, MemoryError)):
        return error
    failure = error.failure if isinstance(error, FunctionRaised) else describe(error)
    if failure.refusal is not None:
        return InvalidRequestError(failure.refusal or f"{_place(model, step)} refused the input")
    return StepFailedError(
        f"{_place(model, step)} failed on this request: the server's log has the reason",
        f"step {step!r} raised {failure.reason}",
        failure.details,
    )


def wrong_return(problem: str, model: str, step: str) -> StepFailedError:
    """Return the error of a function that returned something else than it declares.

    `problem` says what was returned and what is declared, without values: "output 'y' is INT32[2], declared FP32[-1]".
    """
    return StepFailedError(
        f"{_place(model, step)} failed on this request: {problem}",
        f"step {step!r} returned a wrong result: {problem}",
    )


def _place(model: str, step: str) -> str:
    return f"model {model!r}" if step == model else f"step {step!r} of model {model!r}"
