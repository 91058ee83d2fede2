"""Functions that know their batch's requests: which they get, and which of these are still wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from batcher.conftest import Make
from support.batcher.rig import enqueue, fails_below_zero, reach

from tensorferry.batcher import BatchAware, DeadlineExceeded, OutOfMemory, Request
from tensorferry.batcher.testing import VirtualClock


class Aware:
    """A function that records its requests' tags and calls `step` with the inputs and the requests."""

    def __init__(self, step: Callable[[Any, Sequence[Request]], Any]) -> None:
        self.seen: list[list[object]] = []
        self._step = step

    def run_batch(self, inputs: Any, requests: Sequence[Request]) -> Any:
        self.seen.append([request.tag for request in requests])
        return self._step(inputs, requests)


class TwoSteps:
    """A step that waits for the test, and a second one that runs only if a request is wanted."""

    def __init__(self, clock: VirtualClock) -> None:
        self.between, self.go_on = threading.Event(), threading.Event()
        self.second: list[list[float]] = []
        self.wanted: list[list[bool]] = []
        self._clock = clock

    def run_batch(self, x: Any, requests: Sequence[Request]) -> Any:
        self.between.set()
        reach(self.go_on)
        now = self._clock.now()
        self.wanted.append([request.is_wanted(now) for request in requests])
        if not any(self.wanted[-1]):
            raise DeadlineExceeded("no request is wanted any more")
        self.second.append(x.tolist())
        return fails_below_zero(x)


def test_each_run_gets_its_requests_in_the_order_of_their_rows(make: Make, clock: VirtualClock) -> None:
    def step(x: Any, requests: Sequence[Request]) -> Any:
        assert sum(request.rows for request in requests) == len(x)
        return fails_below_zero(x)

    model = Aware(step)
    assert isinstance(model, BatchAware)
    assert not isinstance(step, BatchAware)
    batcher = make(model, 6, max_queue_delay=1.0, clock=clock)
    recorders = [enqueue(batcher, x, tag=tag)[1] for tag, x in (("a", [1, 2]), ("b", [-3]), ("c", [4, 5, 6]))]
    assert [recorder.await_outcome().error is None for recorder in recorders] == [True, False, True]
    assert recorders[2].only.outputs.tolist() == [8, 10, 12]
    assert model.seen == [["a", "b", "c"], ["a", "b"], ["a"], ["b"], ["c"]]


class InSteps:
    """A function that says when its steps ended; its times are those of its runs."""

    def __init__(self) -> None:
        self._runs = 0

    def run_batch(self, x: Any, requests: Sequence[Request]) -> Any:
        self._runs += 1
        return fails_below_zero(x)

    def step_ends(self) -> Sequence[tuple[str, float]]:
        return [("a", self._runs), ("b", self._runs + 0.5)]


def test_the_ends_of_the_steps_are_in_the_batch_of_each_answer(make: Make, clock: VirtualClock) -> None:
    batcher = make(InSteps(), 2, max_queue_delay=1.0, clock=clock)
    recorders = [enqueue(batcher, x, tag=tag)[1] for tag, x in (("a", [1]), ("b", [-3]))]
    for recorder in recorders:
        recorder.await_outcome()
    # The second run is that of the good half.
    batch = recorders[0].only.batch
    assert batch is not None
    assert batch.step_ends == [("a", 2), ("b", 2.5)]
    plain = make(fails_below_zero, 2, clock=clock)
    outcome = enqueue(plain, [1], tag="c")[1].await_outcome()
    assert outcome.batch is not None
    assert outcome.batch.step_ends == ()


def test_a_request_that_runs_in_parts_is_seen_by_its_tag(make: Make) -> None:
    def step(x: Any, requests: Sequence[Request]) -> Any:
        if len(x) > 2:
            raise OutOfMemory("too many rows")
        assert [request.rows for request in requests] == [len(x)]
        assert all(request.is_wanted(0.0) for request in requests)
        return x * 2

    model = Aware(step)
    _, recorder = enqueue(make(model, 4), [1, 2, 3, 4], tag="a")
    assert recorder.await_outcome().outputs.tolist() == [2, 4, 6, 8]
    assert model.seen == [["a"]] * 3


def test_a_staged_function_gets_its_requests_too(make: Make) -> None:
    class Staged(Aware):
        def place(self, tensors: Any) -> None:
            return None

        def load(self, batch: Any) -> Any:
            return batch + 1

        def __call__(self, batch: Any) -> Any:
            raise AssertionError("run_batch is called instead")

        def fetch(self, outputs: Any) -> Any:
            return outputs * 10

    model = Staged(lambda x, requests: x)
    _, recorder = enqueue(make(model), [1.0], tag="a")
    assert recorder.await_outcome().outputs.tolist() == [20]
    assert model.seen == [["a"]]


def test_nothing_more_runs_for_a_batch_of_which_no_request_is_wanted(make: Make, clock: VirtualClock) -> None:
    model = TwoSteps(clock)
    batcher = make(model, 4, max_queue_delay=1.0, clock=clock)
    late = [enqueue(batcher, [value], tag="late", deadline=5.0)[1] for value in (1.0, 2.0, 3.0)]
    gone, cancelled = enqueue(batcher, [4.0], tag="gone")
    reach(model.between)
    assert batcher.cancel(gone)
    clock.advance(5.0)
    model.go_on.set()
    for recorder in late:
        assert isinstance(recorder.await_outcome().error, DeadlineExceeded)
    assert batcher.drain()
    assert cancelled.kind == "Cancelled"
    assert [recorder.kind for recorder in late] == ["DeadlineExceeded"] * 3
    assert (model.second, len(model.wanted)) == ([], 1)
    assert batcher.statistics().expired == 3


def test_after_an_error_no_request_runs_again_whose_deadline_has_passed(
    make: Make, clock: VirtualClock
) -> None:
    model = TwoSteps(clock)
    batcher = make(model, 4, max_queue_delay=1.0, clock=clock)
    late = [enqueue(batcher, [value], tag="late", deadline=5.0)[1] for value in (1.0, 2.0)]
    rest = [enqueue(batcher, [value], tag="rest")[1] for value in (3.0, -4.0)]
    reach(model.between)
    clock.advance(5.0)
    model.go_on.set()
    assert [recorder.await_outcome().error is None for recorder in rest] == [True, False]
    assert batcher.drain()
    assert [recorder.kind for recorder in late] == ["DeadlineExceeded"] * 2
    assert model.second == [[1, 2, 3, -4], [3], [-4]]
