"""Common parts of the batcher's tests: waits that fail instead of hanging, and recorded completions."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
from hypothesis import settings

from tensorferry.batcher import Batcher, BatcherStatistics, Outcome, Padding, Pipeline, Request
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

# Bound for waits that end at once unless something is broken; a passing test never waits it out.
PATIENCE = 30.0

# The same examples in every run, without a time limit.
reproducible = settings(derandomize=True, deadline=None, database=None)


def result(future: Future[Any]) -> Any:
    return future.result(PATIENCE)


def results(futures: Iterable[Future[Any]]) -> list[Any]:
    return [result(future) for future in futures]


def error(future: Future[Any]) -> BaseException | None:
    return future.exception(PATIENCE)


def reach(event: threading.Event) -> None:
    assert event.wait(PATIENCE), "the expected event did not happen"


def ignore(outcome: object) -> None:
    """Ignore the outcome."""


class Recorder:
    """Completion that records every call. Thread-safe."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._called = threading.Event()

    def __call__(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._called.set()

    def await_outcome(self) -> Outcome:
        reach(self._called)
        return self.outcomes[0]

    @property
    def only(self) -> Outcome:
        """The only outcome; read it when no further completion is possible."""
        assert len(self.outcomes) == 1, f"completed {len(self.outcomes)} times: {self.outcomes}"
        return self.outcomes[0]

    @property
    def kind(self) -> str:
        """`answered`, or the name of the error's type, of the only outcome."""
        return "answered" if self.only.error is None else type(self.only.error).__name__


def new_request(
    x: Any,
    complete: Callable[[Outcome], None] = ignore,
    *,
    batched: bool = True,
    deadline: float = math.inf,
    padding: Padding | None = None,
    **attributes: Any,
) -> Request:
    """Make a request of the rows `x`, with these attributes."""
    request = request_of(x, complete, one_row=False, batched=batched, deadline=deadline, padding=padding)
    for name, value in attributes.items():
        setattr(request, name, value)
    return request


def enqueue(batcher: Batcher | Pipeline, x: Any, **options: Any) -> tuple[Request, Recorder]:
    """Enqueue the rows `x` with a callback."""
    recorder = Recorder()
    request = new_request(x, recorder, **options)
    batcher.enqueue(request)
    return request, recorder


def dirty(tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> dict[str, Any]:
    """Return memory for a batch, with old contents."""
    return {
        name: np.frombuffer(bytearray(b"\xa5") * (math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
        for name, (dtype, shape) in tensors.items()
    }


def occupy(batcher: Batcher, runner: ScriptedRunner) -> Future[Any]:
    """Give the worker of a gated batcher a batch, so that later requests are queued."""
    before = len(runner.batches)
    future = batcher.submit(0.0)
    runner.await_batches(before + 1)
    return future


def rows(runner: ScriptedRunner, start: int = 0) -> list[list[Any]]:
    """Return the runner's batches as lists, from this one on."""
    return [batch.tolist() for batch in runner.batches[start:]]


def fails_below_zero(x: Any) -> Any:
    """Model that raises for negative numbers, and doubles all others."""
    if (x < 0).any():
        raise ValueError(f"negative: {x[x < 0].tolist()}")
    return x * 2


def takes(clock: VirtualClock, seconds: float) -> Callable[[Any], Any]:
    """A model that takes so long on the clock, doubles its input, and raises for negative numbers."""

    def model_fn(x: Any) -> Any:
        clock.advance(seconds)
        return fails_below_zero(x)

    return model_fn


class Watch:
    """A model function that keeps weak references to its arrays."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._seen: list[weakref.ref[Any]] = []

    def __call__(self, x: Any) -> Any:
        y = self._function(x)
        for arrays in (x, y):
            values = arrays.values() if isinstance(arrays, Mapping) else [arrays]
            self._seen += [weakref.ref(array) for array in values]
        return y

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self._seen)


def figures_add_up(statistics: BatcherStatistics) -> None:
    """Check the sums that hold when nothing is queued or running."""
    s = statistics
    ends = {
        "answered": s.answered, "failed": s.failed, "cancelled": s.cancelled, "expired": s.expired,
        "shed": s.shed, "abandoned": s.abandoned,
    }  # fmt: skip
    assert s.accepted == sum(ends.values()), "each accepted request has ended once"
    assert s.refused == sum(s.refusals.values())
    lost = {name for name, count in {**ends, "refused": s.refused}.items() if count} - {"answered"}
    assert set(s.unanswered_rows) == lost, "rows are lost as requests are"
    assert s.batches == sum(s.batch_rows.values())
    assert s.rows == sum(rows * batches for rows, batches in s.batch_rows.items())
    assert s.compute_time_sum == sum(times.compute_time_sum for times in s.batch_times.values())
    times = s.answer_times
    stages = (times.queue_delay_sum, times.input_time_sum, times.compute_time_sum, times.output_time_sum)
    assert min(stages) >= 0
    assert times.total_sum == sum(stages)
    if not s.answered:
        assert times.total_sum == 0
    assert (s.last_run is None) == (s.batches == 0)
    sizes = s.sizes
    assert (sizes.queued, sizes.queued_rows, sizes.running, sizes.held_bytes) == (0, 0, 0, 0)
    assert not any(sizes.class_rows)
