"""States of sequences that stay in the memory of a device, with the CPU as the device."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from support.models import small
from support.server.cpu_as_device import CountingDeviceMemory
from support.server.rig import PATIENCE, Load

from tensorferry.batcher import HeldTensor, Outcome, SequenceTag, Tensor
from tensorferry.batcher.execution.collate import request_of
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.runtime.gpu.cuda_graphs import GraphOptions
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session

_WIDTH = 40_000
_STATES = {"past": "next"}
_LARGE = 4 * _WIDTH


def _send(model: Model, x: float, number: int | None, **tag: Any) -> SimpleQueue[Outcome]:
    answered: SimpleQueue[Outcome] = SimpleQueue()
    request = request_of({"x": np.full((1, 1), x, np.float32)}, answered.put, one_row=False)
    request.sequence = SequenceTag(number, **tag)
    model.batcher.enqueue(request)
    return answered


def _answers(sent: Sequence[SimpleQueue[Outcome]]) -> list[Mapping[str, Any]]:
    outcomes = [answered.get(timeout=PATIENCE) for answered in sent]
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.outputs for outcome in outcomes]


def _y(sent: Sequence[SimpleQueue[Outcome]]) -> list[float]:
    return [float(outputs["y"][0, 0]) for outputs in _answers(sent)]


@pytest.mark.parametrize("graphs", [None, ()], ids=["", "graphs"])
def test_states_do_not_pass_through_the_host(
    load: Load, on_device: CountingDeviceMemory, graphs: Any
) -> None:
    model = load(small.totals, state=(("past", "next"),), max_batch_size=4, cuda_graphs=graphs)
    on_device.copied = 0
    assert _y([_send(model, number, number, start=True) for number in range(6)]) == list(range(6))
    for step in range(2, 5):
        sent = [_send(model, number, number) for number in range(6)]
        assert _y(sent) == [number * step for number in range(6)]
    assert on_device.copied < _LARGE
    blocks = len(on_device.devices)
    for step in range(5, 9):
        assert _y([_send(model, 1, 1)]) == [step]
    assert len(on_device.devices) == blocks


def test_a_client_gets_a_state_that_it_wants(load: Load, on_device: CountingDeviceMemory) -> None:
    model = load(small.totals, state=(("past", "next"),))
    wanted = frozenset({"next"})
    for number in (1, None):
        (found,) = _answers([_send(model, 2, number, start=True, wanted=wanted)])
        np.testing.assert_array_equal(found["next"], np.full((1, _WIDTH), 2))
    (found,) = _answers([_send(model, 3, 1, wanted=wanted)])
    np.testing.assert_array_equal(found["next"], np.full((1, _WIDTH), 5))


def test_without_device_memory_states_pass_through_the_host(
    load: Load, on_device: CountingDeviceMemory, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(small.totals, state=(("past", "next"),))
    assert _y([_send(model, 1, 1, start=True)]) == [1]
    on_device.full = True
    assert _y([_send(model, 1, 1)]) == [2]
    assert "no memory of" in caplog.text
    on_device.full = False
    for total in (3, 4):
        assert _y([_send(model, 1, 1)]) == [total]


def _run(session: Session, past: Sequence[Any], x: Sequence[float]) -> Mapping[str, Any]:
    steps, dtype, rows = session.staged, np.dtype(np.float32), len(x)
    assert steps is not None
    batch = steps.place({"x": (dtype, (rows, 1)), "past": (dtype, (rows, _WIDTH))}, _STATES)
    assert batch is not None
    batch["x"][:, 0] = x
    batch["past"] += [Tensor(dtype, (1, _WIDTH), state) for state in past]
    outputs: Mapping[str, Any] = steps.fetch(steps(steps.load(batch)))
    return outputs


def test_a_captured_batch_is_padded_with_its_last_state(tmp_path: Path) -> None:
    device = CountingDeviceMemory()
    session = Session(small.totals(tmp_path / "m.onnx"), "cpu", OrtOptions(graphs=GraphOptions()), device)
    assert session.capture([{"x": (4, 1), "past": (4, _WIDTH)}], pads=True)
    zeros = np.zeros((1, _WIDTH), np.float32)
    kept = _run(session, [zeros] * 3, [1, 2, 3])["next"]
    assert [state.shape for state in kept] == [(1, _WIDTH)] * 3
    found = _run(session, [kept[2], zeros], [5, 7])
    assert found["y"].tolist() == [[8], [7]]


def test_device_memory_is_used_again_once_a_state_is_dropped(tmp_path: Path) -> None:
    device = CountingDeviceMemory()
    session = Session(small.totals(tmp_path / "m.onnx"), memory=device)
    state: Any = np.zeros((1, _WIDTH), np.float32)
    for total in range(1, 6):
        found = _run(session, [state], [1])
        state = found["next"][0]
        assert isinstance(state, HeldTensor)
        assert found["y"].tolist() == [[total]]
    gc.collect()
    # One for the batch, and two for the states, in turn.
    assert len(device.devices) == 3
