"""Inputs without rows, and optional inputs, of batches staged in device memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from support.models.scaled import scaled, with_defaults
from support.server.cpu_as_device import CountingDeviceMemory
from support.server.rig import PATIENCE

from tensorferry.batcher import Batcher, Outcome, Request, Tensor
from tensorferry.server.runtime.session import Session

_FLOAT = np.dtype("<f4")


class _Answers:
    """Outcomes by request number."""

    def __init__(self, count: int) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._completed = threading.Semaphore(0)
        self._count = count

    def completion(self, number: int) -> Any:
        def complete(outcome: Outcome) -> None:
            self.outcomes[number] = outcome
            self._completed.release()

        return complete

    def await_all(self) -> None:
        for _ in range(self._count):
            assert self._completed.acquire(timeout=PATIENCE)


def _request(number: int, others: dict[str, Any], answers: _Answers) -> Request:
    x = np.full((2, 3), number, _FLOAT)
    arrays = {"x": x, **{name: np.asarray(array, _FLOAT) for name, array in others.items()}}
    return Request(
        tuple(Tensor(_FLOAT, array.shape, array.tobytes()) for array in arrays.values()),
        answers.completion(number),
        names=tuple(arrays),
        rows=2,
        nbytes=1,
        key=repr(others),
        shared=frozenset(range(1, len(arrays))),
    )


def _answered(session: Session, given: list[dict[str, Any]]) -> list[Any]:
    assert session.staged is not None
    answers = _Answers(len(given))
    # A batch runs once it is full, with two requests of one kind.
    with Batcher(session.staged, 4, 600.0, pipelined=True, steady=False) as batcher:
        for number, others in enumerate(given):
            batcher.enqueue(_request(number, others, answers))
        answers.await_all()
        assert batcher.statistics().batches == len(given) / 2
    for outcome in answers.outcomes.values():
        assert outcome.error is None
    return [answers.outcomes[number].outputs["y"].tolist() for number in range(len(given))]


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
