"""Consistency of the figures: they add up, and are counted before completions are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import (
    Recorder,
    enqueue,
    fails_below_zero,
    figures_add_up,
    new_request,
    occupy,
    reproducible,
    takes,
)

from tensorferry.batcher import (
    Batcher,
    BatcherClosed,
    BatcherError,
    BatcherStatistics,
    BatchInfo,
    CloseReason,
    DeadlineExceeded,
    InvalidRequest,
    Outcome,
    QueueFull,
    RequestTooLarge,
)
from tensorferry.batcher.execution.collate import join, split
from tensorferry.batcher.execution.completion import RequestCompleter
from tensorferry.batcher.learning.return_model import ReturnStatistics
from tensorferry.batcher.request import BatchRun
from tensorferry.batcher.statistics.counters import Counters, QueueSizes
from tensorferry.batcher.statistics.recent_batches import RecentBatches
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


def ends(statistics: BatcherStatistics) -> dict[str, int]:
    """The counters that are not 0."""
    names = ("refused", "answered", "failed", "cancelled", "expired", "shed", "abandoned")
    return {name: getattr(statistics, name) for name in names if getattr(statistics, name)}


def test_the_stages_of_requests_and_of_batches(busy: Busy, clock: VirtualClock) -> None:
    batcher, runner = busy(takes(clock, 2.0), clock=clock)
    enqueue(batcher, [1.0, 2.0])
    clock.advance(3)
    enqueue(batcher, [3.0])
    runner.open()
    assert batcher.drain()
    statistics = batcher.statistics()
    figures_add_up(statistics)
    assert {rows: asdict(times) for rows, times in statistics.batch_times.items()} == {
        # The clock advances by 3 s while the first runs.
        1: {"batches": 1, "input_time_sum": 0, "compute_time_sum": 5.0, "output_time_sum": 0},
        3: {"batches": 1, "input_time_sum": 0, "compute_time_sum": 2.0, "output_time_sum": 0},
    }
    times = statistics.answer_times
    assert times.compute_time_sum == 5.0 + 2.0 + 2.0, "each request has its batch's"
    assert times.queue_delay_sum == 5.0 + 2.0
    assert times.total_sum == 5.0 + 7.0 + 4.0
    assert statistics.last_run == 7.0


def test_joining_and_splitting_are_separate_stages(
    make: Make, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slowly(*arguments: Any) -> Any:
            clock.advance(seconds)
            return function(*arguments)

        return slowly

    monkeypatch.setattr("tensorferry.batcher.execution.executor.join", slow(join, 0.5))
    monkeypatch.setattr("tensorferry.batcher.execution.executor.split", slow(split, 0.25))
    batcher = make(takes(clock, 2.0), clock=clock)
    _, recorder = enqueue(batcher, [1.0, 2.0])
    assert batcher.drain()
    statistics = batcher.statistics()
    figures_add_up(statistics)
    batch = recorder.only.batch
    assert batch is not None
    assert (batch.input_time, batch.compute_time, batch.output_time) == (0.5, 2.0, 0.25)
    for sums in (statistics.answer_times, statistics.batch_times[2]):
        assert (sums.input_time_sum, sums.compute_time_sum, sums.output_time_sum) == (0.5, 2.0, 0.25)
    assert statistics.answer_times.total_sum == 2.75


def test_waiting_for_the_device_is_queue_delay(clock: VirtualClock) -> None:
    """With two batches in flight, the next is ready before it runs."""
    counters = Counters()
    request = new_request([1.0], recorder := Recorder())
    request.arrival = request.started = 0.0
    clock.advance(8.0)
    run = BatchRun(
        0, False, CloseReason.IDLE, 0.0, 0, 0.0, join_start=1.0, ready=2.0, started=5.0, ended=7.0, done=[]
    )
    queue: Any = SimpleNamespace(finish=list)
    completer = RequestCompleter(queue, counters, RecentBatches(clock), clock, "m")
    completer.answer([request], [[1.0]], run)
    statistics = counters.statistics(1, QueueSizes(0, 0, 0, 0), {}, ReturnStatistics(0.0, 0.0, 0), ())
    figures_add_up(statistics)
    assert asdict(statistics.answer_times) == {
        "input_time_sum": 1.0,
        "compute_time_sum": 2.0,
        "output_time_sum": 1.0,
        "queue_delay_sum": 1.0 + 3.0,
    }
    assert recorder.only.batch == BatchInfo(
        1, 1, 1, 2.0, CloseReason.IDLE, input_time=1.0, output_time=1.0, ended=7.0
    )


def test_a_failed_run_before_the_answer_is_queue_delay(make: Make, clock: VirtualClock) -> None:
    runner = ScriptedRunner(takes(clock, 1.0), gated=True)
    clock.advance(100.0)
    batcher = make(runner, clock=clock)
    occupy(batcher, runner)
    good, bad = enqueue(batcher, [1.0])[1], enqueue(batcher, [-1.0])[1]
    runner.open()
    assert batcher.drain()
    assert (good.kind, bad.kind) == ("answered", "ValueError")
    assert bad.only.queue_delay == 1
    statistics = batcher.statistics()
    figures_add_up(statistics)
    assert ends(statistics) == {"answered": 2, "failed": 1}
    assert (statistics.batch_rows, statistics.failed_batches) == ({1: 2}, 2), "only what succeeded ran"
    assert statistics.close_reasons == {CloseReason.IDLE: 2}, "halves are not counted by reason"
    # One second behind the first batch, one in the failed batch, and one alone.
    assert statistics.answer_times.queue_delay_sum == 0 + 2
    assert statistics.answer_times.compute_time_sum == 1 + 1
    assert statistics.unanswered_time_sum == 1 + 1 + 1 + 1
    assert statistics.unanswered_rows == {"failed": 1}


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({}, QueueFull, "queue_full"),
        ({"rows": 9}, RequestTooLarge, "too_large"),
        ({"deadline": 0.0}, DeadlineExceeded, "deadline"),
        ({"priority": 3}, InvalidRequest, "invalid"),
        ({"closed": True}, BatcherClosed, "closed"),
    ],
)
def test_refusals_by_reason(
    busy: Busy, options: dict[str, Any], error: type[BatcherError], reason: str
) -> None:
    batcher, runner = busy(None, 4, max_queue_size=8)
    enqueue(batcher, np.ones(7))
    if options.get("closed"):
        batcher.drain(timeout=0)
    request = new_request(
        np.ones(options.get("rows", 2)), Recorder(), deadline=options.get("deadline", np.inf)
    )
    request.priority = options.get("priority", 0)
    with pytest.raises(error):
        batcher.enqueue(request)
    statistics = batcher.statistics()
    assert statistics.refusals == {reason: 1}
    assert (statistics.refused, statistics.unanswered_rows) == (1, {"refused": request.rows})
    runner.open()
    assert batcher.close()
    figures_add_up(batcher.statistics())


@pytest.mark.parametrize(
    ("x", "counted"),
    [([1.0], "answered"), ([1.0] * 5, "answered"), ([-1.0], "failed"), ([-1.0] * 5, "failed")],
)
def test_an_outcome_is_counted_before_its_completion(make: Make, x: list[float], counted: str) -> None:
    """Split or not, answered or not: a completion sees its request in the figures."""
    batcher = make(fails_below_zero, 2)
    seen: list[BatcherStatistics] = []

    def complete(outcome: Outcome) -> None:
        seen.append(batcher.statistics())

    batcher.enqueue(new_request(x, complete))
    assert batcher.drain()
    (statistics,) = seen
    assert ends(statistics) == {counted: 1}
    if counted == "answered":
        assert statistics.rows == len(x)
        assert statistics.answer_times.total_sum > 0
    else:
        assert statistics.unanswered_rows == {"failed": len(x)}


def test_the_prediction_error_is_the_sum_of_absolute_differences(make: Make, clock: VirtualClock) -> None:
    took = iter((2.0, 3.0, 1.0))

    def model_fn(x: Any) -> Any:
        clock.advance(next(took))
        return x

    batcher = make(model_fn, 4, clock=clock)
    recorders = []
    for _ in range(3):
        recorders.append(enqueue(batcher, [1.0])[1])
        recorders[-1].await_outcome()
    assert batcher.drain()
    first, *later = [recorder.only.batch for recorder in recorders]
    assert first is not None
    assert not first.predicted, "nothing is known before it"
    errors = [info.compute_time - info.predicted for info in later if info is not None]
    assert errors[0] > 0 > errors[1]
    statistics = batcher.statistics()
    assert statistics.predictions == 2
    assert statistics.prediction_error_sum == pytest.approx(errors[0] - errors[1])
    assert statistics.actual_time_sum - statistics.predicted_time_sum == pytest.approx(sum(errors))


_Event = st.one_of(
    st.tuples(st.just("enqueue"), st.integers(0, 9), st.booleans(), st.sampled_from([np.inf, 0.5, 2.0])),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("release"), st.integers(1, 3)),
    st.tuples(st.just("advance"), st.sampled_from([0.125, 1.0])),
)


@given(events=st.lists(_Event, max_size=30), most=st.sampled_from([0, 1, 3]), close=st.booleans())
@reproducible
def test_figures_add_up_whatever_happens(events: list[Any], most: int, close: bool) -> None:
    """They match the outcomes of the callers and the batches of the model."""
    clock, shapes = VirtualClock(), []

    def model_fn(x: Any) -> Any:
        clock.advance(0.25)
        y = fails_below_zero(x)
        shapes.append(len(x) if most else 1)
        return y

    runner = ScriptedRunner(model_fn, gated=True)
    batcher = Batcher(runner, most, max_queue_size=12, clock=clock)
    sent: list[tuple[Any, Recorder]] = []
    refused = 0
    for event in events:
        match event:
            case ("enqueue", count, bad, patience):
                x = np.full(count, -1.0 if bad else 1.0)
                deadline = clock.now() + patience
                try:
                    recorder = Recorder()
                    request = new_request(x, recorder, batched=most > 0, deadline=deadline)
                    batcher.enqueue(request)
                    sent.append((request, recorder))
                except BatcherError:
                    refused += 1
            case ("cancel", which) if sent:
                batcher.cancel(sent[which % len(sent)][0])
            case ("release", count):
                for _ in range(count):
                    runner.release()
            case ("advance", seconds):
                clock.advance(seconds)
    if close:
        batcher.close(drain=False, timeout=0)
    runner.open()
    assert batcher.close()
    statistics = batcher.statistics()
    figures_add_up(statistics)
    assert (statistics.accepted, statistics.refused) == (len(sent), refused)
    kinds = {"answered": 0, "ValueError": 0, "Cancelled": 0, "DeadlineExceeded": 0, "BatcherClosed": 0}
    for _, recorder in sent:
        kinds[recorder.kind] += 1
    assert (statistics.answered, statistics.failed, statistics.cancelled) == (
        kinds["answered"],
        kinds["ValueError"],
        kinds["Cancelled"],
    )
    assert (statistics.expired, statistics.abandoned) == (kinds["DeadlineExceeded"], kinds["BatcherClosed"])
    assert sorted(shapes) == sorted(
        rows for rows, batches in statistics.batch_rows.items() for _ in range(batches)
    )
    assert statistics.compute_time_sum >= 0.25 * statistics.batches
