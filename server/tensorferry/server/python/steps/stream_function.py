"""The model function of a Python function that yields: each request runs alone, and takes answers while it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from tensorferry.batcher import Request
from tensorferry.server.python.steps.stage_function import CallsOfBatch, StepTimes
from tensorferry.server.runtime.recovery.watchdog import Watchdog


class StreamFunction:
    """Runs a function that yields. One thread at a time calls it; see `BatchAware`.

    Its requests are of the class `StreamedInference`, which takes several answers. The watchdog ends them at their
    deadline, while the function computes or waits.
    """

    def __init__(
        self,
        model: str,
        answers: Callable[..., Generator[Mapping[str, Any], None, None]],
        times: StepTimes,
        calls: CallsOfBatch,
        watchdog: Watchdog | None,
    ) -> None:
        self._model = model
        self._answers = answers
        self._times = times
        self._calls = calls
        self._watchdog = watchdog
        # The request that runs. Written by the thread that runs it, read by the watchdog's.
        self._request: Any = None

    def run_batch(self, inputs: Mapping[str, Any], requests: Sequence[Request], /) -> Mapping[str, Any]:
        """Give the only request its answers; return no outputs. Raises what the function raises."""
        request: Any = requests[0]
        began = time.monotonic()
        self._request = request
        if self._watchdog is not None and request.deadline < math.inf:
            self._watchdog.watch(self)
        try:
            with (
                self._calls(self._model, requests),
                closing(self._answers(inputs, request.on_over)) as answers,
            ):
                for outputs in answers:
                    if not request.take(outputs):
                        break
        finally:
            self._request = None
        self._times.add(time.monotonic() - began)
        return {}

    def check(self, now: float) -> float | None:
        """End the request that runs if its deadline has passed. See `Watched`."""
        request = self._request
        if request is None:
            return None
        if now < request.deadline:
            return float(request.deadline)
        request.cancel()
        return None
