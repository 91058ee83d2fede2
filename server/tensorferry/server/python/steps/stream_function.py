"""The model function of a Python function that yields: each request runs alone, and takes answers while it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, Protocol

from tensorferry.batcher import Request
from tensorferry.server.python.steps.stage_function import CallsOfBatch, StepTimes
from tensorferry.server.runtime.recovery.watchdog import Watchdog


class TakesAnswers(Protocol):
    """A request that takes several answers."""

    deadline: float

    def cancel(self) -> None:
        """End the request; with DeadlineExceeded if its deadline has passed. Thread-safe."""

    def take(self, outputs: Mapping[str, Any]) -> bool:
        """Send an answer, and wait until there is room for another one. Return whether it is wanted.

        Raises what keeps the answer from being sent, such as LimitError.
        """

    def on_over(self, call: Callable[[], None]) -> None:
        """Call a function, on any thread, if the request ends before its last answer; at once if it has."""


class StreamFunction:
    """Runs a function that yields. One thread at a time calls it; see `BatchAware`.

    The watchdog ends requests at their deadline, while the function computes or waits.
    """

    def __init__(
        self,
        model: str,
        answers: Callable[..., Generator[Mapping[str, Any], None, None]],
        times: StepTimes,
        calls: CallsOfBatch,
        watchdog: Watchdog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._answers = answers
        self._times = times
        self._calls = calls
        self._watchdog = watchdog
        self._clock = clock
        # The request that runs. Written by the thread that runs it, read by the watchdog's.
        self._request: TakesAnswers | None = None

    def run_batch(self, inputs: Mapping[str, Any], requests: Sequence[Request], /) -> Mapping[str, Any]:
        """Give the only request its answers; return no outputs. Raises what the function raises."""
        request: Any = requests[0]
        began = self._clock()
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
        self._times.add(self._clock() - began)
        return {}

    def check(self, now: float) -> float | None:
        """End the request that runs if its deadline has passed. See `Watched`."""
        request = self._request
        if request is None:
            return None
        if now < request.deadline:
            return request.deadline
        request.cancel()
        return None
