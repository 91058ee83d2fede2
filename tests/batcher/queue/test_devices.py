"""A device's free time and dispatch time, and the estimates for device and host."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.rig import Recorder, error, fails_below_zero, result

from tensorferry.batcher import Batcher, Request
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.devices import Device, Devices
from tensorferry.batcher.settings import BatcherSettings, Limits
from tensorferry.batcher.testing import VirtualClock

GUARD = 300e-6


@pytest.fixture
def devices() -> Devices:
    return Devices(threading.Lock(), 1)


@pytest.fixture
def device(devices: Devices) -> Device:
    return devices.each[0]


def test_an_idle_device_is_free_now_and_its_turn_is_now(device: Device) -> None:
    assert device.idle
    assert (device.start_at(5.0), device.dispatch_at(5.0)) == (5.0, 5.0)


def test_the_next_batch_closes_its_preparation_time_before_the_device_is_free(
    devices: Devices, device: Device
) -> None:
    devices.dispatched(device, 0.0, 10.0, 1.0)
    assert not device.idle
    assert device.free_at == 11.0, "the first is prepared, then run"
    assert device.dispatch_at(0.0) == 10.0 - GUARD
    assert (device.start_at(0.0), device.start_at(10.5)) == (10.0, 10.5)


def test_a_second_batch_runs_after_the_first(devices: Devices, device: Device) -> None:
    devices.dispatched(device, 0.0, 10.0)
    devices.dispatched(device, 9.0, 5.0)
    assert device.free_at == 15.0
    assert device.batches_outstanding == 2


@pytest.mark.parametrize("when", [8.0, 12.0], ids=["early", "late"])
def test_a_completed_batch_corrects_the_estimate(devices: Devices, device: Device, when: float) -> None:
    devices.dispatched(device, 0.0, 10.0)
    devices.dispatched(device, 7.0, 5.0)
    devices.completed(device, when)
    assert device.free_at == when + 5.0
    devices.completed(device, when + 1.0)
    assert device.idle
    assert device.dispatch_at(when + 1.0) == when + 1.0


def test_a_device_that_is_overdue_may_be_free_at_any_moment(devices: Devices, device: Device) -> None:
    devices.dispatched(device, 0.0, 10.0)
    assert device.start_at(30.0) == 30.0
    assert device.dispatch_at(30.0) < 30.0


@pytest.mark.parametrize("pipelined", [False, True])
def test_device_and_host_are_learned_apart(pipelined: bool) -> None:
    cost_model = BatchCostModel(8, pipelined=pipelined)
    assert not cost_model.known
    assert (
        cost_model.mean(4),
        cost_model.end_to_end(4),
        cost_model.upper(4),
        cost_model.max_rows_within(0.1),
    ) == (0, 0, 0, 8)
    for _ in range(200):
        cost_model.observe(1.0, 4, 0.010, 0.003, 0.001)
    assert cost_model.end_to_end(4) == pytest.approx(0.014)
    assert cost_model.mean(4) == pytest.approx(0.010 if pipelined else 0.014), "what keeps the next waiting"
    assert cost_model.host_lead_time(4) == pytest.approx(0.003, rel=0.01)
    assert cost_model.upper(4) > cost_model.end_to_end(4)
    assert cost_model.max_rows_within(cost_model.upper(4)) == 4
    assert cost_model.max_rows_within(cost_model.upper(8)) == 8


def test_estimates_may_refuse_requests_for_a_second() -> None:
    cost_model = BatchCostModel(8)
    cost_model.observe(1.0, 4, 0.010)
    assert cost_model.upper_if_recent(4, 1.9) == cost_model.upper(4)
    assert cost_model.upper_if_recent(4, 2.1) == 0.0


def queued(backlog: Backlog, rank: int, arrival: float, deadline: float = math.inf, rows: int = 1) -> Request:
    request = request_of(np.zeros((rows, 1)), Recorder(), one_row=False, deadline=deadline)
    request.rank, request.arrival = rank, arrival
    backlog.add(request)
    return request


def test_the_last_request_of_the_lowest_class_is_displaced_first() -> None:
    backlog = Backlog(Limits(4, 0.0), 3, pipelined=False)
    queued(backlog, 0, 1.0)
    middle = [queued(backlog, 1, 2.0), queued(backlog, 1, 3.0)]
    low = [queued(backlog, 2, 4.0, rows=2), queued(backlog, 2, 5.0)]
    assert backlog.displaceable(0, 1, "", 99) == [low[1]]
    assert backlog.displaceable(0, 2, "", 99) == [low[1], low[0]], "rows, not requests"
    assert backlog.displaceable(0, 5, "", 99) == [low[1], low[0], middle[1], middle[0]]
    assert backlog.displaceable(1, 3, "", 99) == [low[1], low[0]]
    assert not backlog.displaceable(0, 6, "", 99), "all or none"
    assert not backlog.displaceable(1, 4, "", 99)
    assert not backlog.displaceable(2, 1, "", 99)


def test_the_next_infeasible_time_is_the_earliest_deadline_less_the_time_of_one_row() -> None:
    backlog = Backlog(Limits(4, 0.0), 2, pipelined=False)
    assert backlog.next_infeasible(0.0) == math.inf
    queued(backlog, 0, 1.0)
    assert backlog.next_infeasible(0.0) == math.inf
    early, late = queued(backlog, 1, 2.0, 5.0), queued(backlog, 0, 3.0, 9.0)
    assert backlog.next_infeasible(0.0) == 5.0
    cost_model = backlog.bucket(early.key).cost_model
    cost_model.observe(0.0, 4, 1.0)
    assert backlog.next_infeasible(0.5) == 5.0 - cost_model.upper(1)
    assert backlog.infeasible(4.5, 0.5) == [early]
    assert backlog.infeasible(8.9, 0.5) == [late, early]
    assert backlog.infeasible(0.0, 0.5) == []


def test_limits_that_no_full_batch_passes_are_warned_of(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert not list(BatcherSettings(8, max_queue_size=8).warnings())
    batcher = make(lambda x: x, 8, max_queue_size=4, name="tight")
    assert "no batch can have more than 4 rows" in batcher.statistics().warnings[0]
    assert "tight: no batch can have more than 4 rows" in caplog.text


@pytest.mark.parametrize(
    ("model_fn", "options", "message"),
    [
        ([], {}, "model_fn has 0 functions"),
        ([abs, abs], {"workers": 2}, "model_fn has 2 functions and workers is 2"),
        (abs, {"priority_weights": ()}, r"priority_weights is \(\)"),
        (abs, {"priority_weights": (2, 0)}, r"priority_weights is \(2, 0\); give each class at least 1"),
        (abs, {"default_priority": 2}, "default_priority is 2; there are 1 classes"),
        (abs, {"default_priority": -1}, "default_priority is -1; it must be at least 0"),
        (abs, {"preferred_batch_sizes": [2], "max_batch_size": 0}, "preferred_batch_sizes is"),
    ],
)
def test_options_that_do_not_fit_are_named(model_fn: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batcher(model_fn, **options)


@pytest.mark.parametrize("rows", [0, -1])
def test_a_warm_up_run_that_makes_no_sense_is_refused_at_once(make: Make, rows: int) -> None:
    """At once, not at the first request of each kind."""
    batcher = make(lambda x: x)
    with pytest.raises(ValueError, match="rows must be at least 1"):
        batcher.add_warmup_sample(rows, 1.0)
    with pytest.raises(ValueError, match="seconds at least 0 and finite"):
        batcher.add_warmup_sample(1, math.nan)
    assert result(batcher.submit(1.0)) == 1


def test_after_a_failure_the_device_is_estimated_as_before(make: Make, clock: VirtualClock) -> None:
    """Property 12: a failed run does not change the estimates."""

    def model_fn(x: Any) -> Any:
        clock.advance(50.0 if (x < 0).any() else 1.0)
        return fails_below_zero(x)

    batcher = make(model_fn, 4, clock=clock)
    for _ in range(20):
        result(batcher.submit(1.0))
    before = next(iter(batcher.statistics().buckets.values())).device
    assert error(batcher.submit(-1.0)) is not None
    assert batcher.drain(timeout=1e9)
    assert next(iter(batcher.statistics().buckets.values())).device == before
