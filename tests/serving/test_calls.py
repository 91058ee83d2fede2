"""Calls of other models within a model's function, with a stand-in for the server."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from tensorferry.batcher import DeadlineExceeded
from tensorferry.serving import calls_through, infer


class _Caller:
    """`ModelCaller` whose calls get one future."""

    def __init__(self) -> None:
        self.future: Future[dict[str, Any]] = Future()

    def submit(
        self, model: str, version: str, inputs: Mapping[str, Any], timeout: float | None
    ) -> Future[dict[str, Any]]:
        return self.future


def test_infer_waits_no_longer_than_its_timeout() -> None:
    """Also for a model that runs, which the server does not end."""
    caller = _Caller()
    with (
        calls_through(caller),
        pytest.raises(DeadlineExceeded, match="model 'slow' gave no answer within 0 s"),
    ):
        infer("slow", x=[1], timeout=0)
    assert caller.future.cancelled()


def test_a_timeout_error_of_the_other_model_stays_its_own() -> None:
    caller = _Caller()
    caller.future.set_exception(TimeoutError("of its code"))
    with calls_through(caller), pytest.raises(TimeoutError, match="of its code"):
        infer("slow", x=[1], timeout=1)
