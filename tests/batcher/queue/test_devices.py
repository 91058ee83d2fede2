"""A device's free time and dispatch time, and the estimates for device and host."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from batcher.conftest import Make
from support.batcher.rig import error, fails_below_zero, result

from tensorferry.batcher.learning.cost_model import BatchCostModel
from tensorferry.batcher.queue.devices import Device, Devices
from tensorferry.batcher.testing import VirtualClock

GUARD = 300e-6


@pytest.fixture
def devices() -> Devices:
    return Devices(threading.Lock(), 1)


@pytest.fixture
def device(devices: Devices) -> Device:
    return devices.each[0]


def test_the_next_batch_closes_its_preparation_time_before_the_device_is_free(
    devices: Devices, device: Device
) -> None:
    devices.dispatched(device, 0.0, 10.0, 1.0)
    assert not device.idle
    assert device.free_at == 11.0, "the first is prepared, then run"
    assert device.dispatch_at(0.0) == 10.0 - GUARD
    assert (device.start_at(0.0), device.start_at(10.5)) == (10.0, 10.5)


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
    # A worker learns a batch's time after the answer.
    assert batcher.wait_idle()
    before = next(iter(batcher.statistics().buckets.values())).device
    assert error(batcher.submit(-1.0)) is not None
    assert batcher.drain(timeout=1e9)
    assert next(iter(batcher.statistics().buckets.values())).device == before
