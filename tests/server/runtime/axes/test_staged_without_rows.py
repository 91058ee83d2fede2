"""Inputs without rows, and optional inputs, of batches staged in device memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from support.models.scaled import scaled, with_defaults
from support.server.cpu_as_device import CountingDeviceMemory
from support.server.rig import PATIENCE

from tensorferry.batcher import Batcher, Outcome, Request, Tensor
from tensorferry.server.runtime.session import Session

_FLOAT = np.dtype("<f4")


def _request(number: int, others: dict[str, Any], complete: Callable[[Outcome], None]) -> Request:
    x = np.full((2, 3), number, _FLOAT)
    arrays = {"x": x, **{name: np.asarray(array, _FLOAT) for name, array in others.items()}}
    return Request(
        tuple(Tensor(_FLOAT, array.shape, array.tobytes()) for array in arrays.values()),
        complete,
        names=tuple(arrays),
        rows=2,
        nbytes=1,
        key=repr(others),
        shared=frozenset(range(1, len(arrays))),
    )


def _answered(session: Session, given: list[dict[str, Any]]) -> list[Any]:
    assert session.staged is not None
    answered: list[SimpleQueue[Outcome]] = [SimpleQueue() for _ in given]
    # A batch runs once it is full, with two requests of one kind.
    with Batcher(session.staged, 4, 600.0, pipelined=True, steady=False) as batcher:
        for number, (others, answer) in enumerate(zip(given, answered, strict=True)):
            batcher.enqueue(_request(number, others, answer.put))
        outcomes = [answer.get(timeout=PATIENCE) for answer in answered]
        assert batcher.statistics().batches == len(given) / 2
    assert not any(outcome.error for outcome in outcomes)
    return [outcome.outputs["y"].tolist() for outcome in outcomes]


def test_a_scalar_is_staged_beside_the_rows(tmp_path: Path, device: CountingDeviceMemory) -> None:
    session = Session(scaled(tmp_path / "m.onnx"), memory=device)
    scales = [2, 3, 3, 2]
    found = _answered(session, [{"scale": scale} for scale in scales])
    assert found == [[[number * scale] * 3] * 2 for number, scale in enumerate(scales)]
    assert device.loads == 2


def test_a_batch_with_an_optional_input_is_not_staged(tmp_path: Path, device: CountingDeviceMemory) -> None:
    session = Session(with_defaults(tmp_path / "m.onnx"), memory=device)
    given: list[dict[str, Any]] = [{}, {"scale": 3}, {"bias": [1, 1, 1]}] * 2
    found = _answered(session, given)
    for number, (others, y) in enumerate(zip(given, found, strict=True)):
        expected = number * others.get("scale", 2) + (1 if "bias" in others else 0)
        assert y == [[expected] * 3] * 2
    assert device.loads == 1
