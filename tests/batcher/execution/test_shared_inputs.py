"""Inputs without rows are passed once per batch; its requests have equal ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.rig import Recorder, dirty, ignore

from tensorferry.batcher import Request, Tensor
from tensorferry.batcher.execution.collate import join
from tensorferry.batcher.testing import ScriptedRunner


def request(rows: int, scale: float, complete: Any = ignore, place: int = 1) -> Request:
    x = np.arange(rows, dtype=np.float32)
    tensors = [Tensor(x.dtype, x.shape, x.tobytes())]
    tensors.insert(place, Tensor(np.dtype("<f4"), (), np.float32(scale).tobytes()))
    names = ["x"]
    names.insert(place, "scale")
    return Request(
        tuple(tensors),
        complete,
        names=tuple(names),
        rows=rows,
        nbytes=8,
        key=scale,
        shared=frozenset({place}),
    )


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("placed", [False, True])
def test_a_shared_input_is_passed_once(place: int, placed: bool) -> None:
    for sizes in ([2, 1, 3], [1]):
        joined = join([request(rows, 3.0, place=place) for rows in sizes], dirty if placed else None)
        assert joined["scale"].shape == ()
        assert joined["scale"] == 3.0
        np.testing.assert_array_equal(joined["x"], np.concatenate([np.arange(rows) for rows in sizes]))


def test_each_part_of_a_split_request_has_the_shared_input_and_no_other_request_shares_its_batch(
    make: Make,
) -> None:
    def scaled(inputs: Mapping[str, Any]) -> Any:
        return inputs["x"] * inputs["scale"]

    runner = ScriptedRunner(scaled, gated=True)
    batcher = make(runner, 4)
    sent: Sequence[tuple[int, float]] = [(1, 2.0), (10, 3.0), (2, 2.0), (1, 2.0)]
    first = Recorder()
    batcher.enqueue(request(1, 7.0, first))
    runner.await_batches(1)
    recorders = []
    for rows, scale in sent:
        recorders.append(Recorder())
        batcher.enqueue(request(rows, scale, recorders[-1]))
    runner.open()
    assert batcher.drain()
    assert first.only.error is None
    for (rows, scale), recorder in zip(sent, recorders, strict=True):
        np.testing.assert_array_equal(recorder.only.outputs, np.arange(rows, dtype=np.float32) * scale)
    sizes = sorted((float(batch["scale"]), len(batch["x"])) for batch in runner.batches)
    assert sizes == [(2.0, 4), (3.0, 2), (3.0, 4), (3.0, 4), (7.0, 1)]
