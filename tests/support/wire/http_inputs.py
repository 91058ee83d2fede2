"""Inputs of tritonclient over HTTP, and calls of either of its clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

# Calls a method by its name.
Ask = Callable[..., Awaitable[Any]]


def tensor(name: str, array: Any, datatype: str, *, binary: bool = True) -> triton.InferInput:
    """Return an input, as binary data or as JSON."""
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def probe(
    tag: int = 0, index: int = 0, work: int = 0, rows: int = 1, *, binary: bool = True
) -> list[triton.InferInput]:
    """Return the inputs of the probe model: it answers 2 tag + index, and fails for an index above 9."""
    return [
        tensor("work", np.full(rows, work), "INT64", binary=binary),
        tensor("x", np.full((rows, 4), tag, np.float32), "FP32", binary=binary),
        tensor("index", np.full(rows, index), "INT64", binary=binary),
    ]


def wanted(name: str, **options: Any) -> list[triton.InferRequestedOutput]:
    """Return the list of one requested output."""
    return [triton.InferRequestedOutput(name, **options)]


async def refusal(call: Awaitable[Any]) -> tuple[str, str]:
    """Return the status and the message of a call that must fail."""
    with pytest.raises(InferenceServerException) as caught:
        await call
    return str(caught.value.status()), str(caught.value.message())
