"""Arguments of calls of other models: the same checks wherever the function runs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from support.server.worker_app import WRONG, mistaken

from tensorferry.serving import calls_through, infer


class Caller:
    """A `ModelCaller` that answers at once, and keeps the types of what it gets."""

    def __init__(self) -> None:
        self.types: list[set[type]] = []

    def submit(
        self, model: str, version: str, inputs: Mapping[str, Any], timeout: float | None
    ) -> Future[dict[str, Any]]:
        self.types.append({*map(type, (model, version, timeout, *inputs))})
        future: Future[dict[str, Any]] = Future()
        future.set_result({"y": inputs["x"]})
        return future


def test_names_and_timeouts_are_checked_and_made_plain() -> None:
    caller = Caller()
    with calls_through(caller):
        found = mistaken(np.arange(3.0))
    # The values of inputs are for the caller to check.
    assert found.keys() - {"right"} == set(list(WRONG)[:6])
    assert caller.types[-1] == {str, float}


def test_infer_outside_of_a_function_says_so() -> None:
    with pytest.raises(RuntimeError, match="called outside of a model's function"):
        infer("other", x=1)
