"""Calls of other models from within a model's function, in the same process and without gRPC."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any, Protocol

import numpy.typing as npt

from tensorferry.batcher import DeadlineExceeded


class ModelCaller(Protocol):
    """What sends a request to another model of the server. The server provides one for each run of a function."""

    def submit(
        self, model: str, version: str, inputs: Mapping[str, npt.ArrayLike], timeout: float | None
    ) -> Future[dict[str, Any]]:
        """Enqueue a request; the future gets the model's outputs by name.

        Names are of type str and the timeout is a float, not of their subclasses. Inputs that do not fit the model fail
        the future with InvalidInput.
        """


_caller: ContextVar[ModelCaller] = ContextVar("tensorferry model caller")


@contextmanager
def calls_through(caller: ModelCaller) -> Iterator[None]:
    """Let `infer` and `submit` use this caller within the block, in this thread. Tests can use a stand-in."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


def submit(
    model: str,
    inputs: Mapping[str, npt.ArrayLike] | None = None,
    /,
    *,
    version: str = "",
    timeout: float | None = None,
    **arrays: npt.ArrayLike,
) -> Future[dict[str, Any]]:
    """Send a request to another model of this server; the future gets its outputs by name.

    `inputs`, or keywords, have an array for each input, with the rows on axis 0. Arrays must have the input's datatype, and
    must not change until the future is done; lists are converted. The request goes through the other model's batcher, where
    requests of others join it. `version` is "" for the latest.

    The request is made for the whole batch that the calling function runs. Its deadline is the latest of the batch, or
    `timeout` seconds from now if that is earlier. Its client, priority and id are those of the batch's first request. It is
    traced below the first request that is traced. It is cancelled if it has no answer when the function returns.

    The future raises InvalidInput if the inputs do not fit the model, or if the model refuses them; RecursionError if the
    models would call each other in a circle, and might wait forever; and else the error of the request. If the function does
    not catch it, its own requests get the same status.

    TypeError or ValueError if a name is no str, `inputs` no mapping, or `timeout` no number of seconds.
    RuntimeError if no function of a model is running on this thread: in a thread of your own, run this in a copy of the
    function's context (`contextvars.copy_context`).
    """
    try:
        caller = _caller.get()
    except LookupError:
        raise RuntimeError(
            f"infer({model!r}) was called outside of a model's function; call it on the thread that runs the function"
        ) from None
    if inputs is None:
        inputs = {}
    elif not isinstance(inputs, Mapping):
        raise TypeError(
            f"the inputs are of type {type(inputs).__name__}; give a dict of arrays by input name, or arrays as keywords"
        )
    return caller.submit(
        _plain_name(model, "the model's name"),
        _plain_name(version, "the version"),
        {_plain_name(name, "the name of an input"): array for name, array in {**inputs, **arrays}.items()},
        None if timeout is None else _plain_seconds(timeout),
    )


def infer(
    model: str,
    inputs: Mapping[str, npt.ArrayLike] | None = None,
    /,
    *,
    version: str = "",
    timeout: float | None = None,
    **arrays: npt.ArrayLike,
) -> dict[str, Any]:
    """Send a request to another model of this server and wait for its outputs, by name. Like `submit` otherwise.

    The arrays are the caller's own, which it may change. After the timeout it raises DeadlineExceeded, also if the other
    model still runs.
    """
    return outputs_within(submit(model, inputs, version=version, timeout=timeout, **arrays), model, timeout)


def outputs_within(future: Future[dict[str, Any]], model: str, timeout: float | None) -> dict[str, Any]:
    """Return the outputs of a call of a model. After the timeout in seconds, cancel it and raise DeadlineExceeded."""
    seconds = None if timeout is None else min(_plain_seconds(timeout), TIMEOUT_MAX)
    try:
        return future.result(seconds)
    except TimeoutError:
        if not future.cancel():
            # It was answered meanwhile, or the error is its own.
            return future.result()
        raise DeadlineExceeded(
            f"model {model!r} gave no answer within {seconds:g} s, the timeout of the call"
        ) from None
    finally:
        # Its error refers to this frame, so the two would stay until a garbage collection.
        del future


def _plain_name(name: object, what: str) -> str:
    """Return a name without the user's class, such as an Enum, which other processes do not have."""
    if not isinstance(name, str):
        raise TypeError(f"{what} is of type {type(name).__name__}; give a str")
    return str.__str__(name)


def _plain_seconds(timeout: object) -> float:
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise TypeError(f"the timeout is of type {type(timeout).__name__}; give seconds as a float, or None")
    try:
        seconds = float(timeout)
    except OverflowError:
        seconds = math.inf
    if math.isnan(seconds):
        raise ValueError("the timeout is nan; give seconds as a float, or None")
    return seconds
