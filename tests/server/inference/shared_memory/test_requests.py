"""Requests with tensors in regions, by the real service: what is read and written after a cancel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.server.regions import names
from support.server.rig import Replies, request, response_of, signature, spec

from tensorferry.batcher import Batcher, Cancelled, InstanceFailed, OutOfMemory, Request
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.inference.shared_memory.regions import Regions
from tensorferry.server.inference.shared_memory.system import SystemSharedMemory
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry

SIGNATURE = signature(spec("x", "FP32", "batch"), spec("s", "FP32", 1), outputs=(spec("y", "FP32", "batch"),))
SHARED, FOREIGN = 100.0, -5000.0


def in_memory(region: str, x: float) -> bytes:
    """A request whose input without rows, after 4 bytes, and output, at the start, are in a region."""
    message = request({"x": np.array([x], np.float32), "s": np.zeros(1, np.float32)})
    del message.raw_input_contents[1]
    output = message.outputs.add(name="y")
    for tensor, offset in ((message.inputs[1], 4), (output, 0)):
        tensor.parameters["shared_memory_region"].string_param = region
        tensor.parameters["shared_memory_byte_size"].int64_param = 4
        tensor.parameters["shared_memory_offset"].int64_param = offset
    return message.SerializeToString()


@pytest.mark.parametrize("failure", [None, ValueError, OutOfMemory, InstanceFailed])
@pytest.mark.parametrize("joined", [False, True])
def test_after_a_cancel_and_the_end_of_its_region_its_memory_is_the_clients(
    regions: Regions, tmp_path: Path, failure: type[Exception] | None, joined: bool
) -> None:
    """Also if its batch is yet to be joined, runs, or runs again."""
    failures = [] if failure is None else [failure("the batch fails")]
    ended = []

    def model(inputs: Any) -> Any:
        if len(inputs["x"]) > 1 and joined:
            ended.append(cancel())
        if len(inputs["x"]) > 1 and failures:
            raise failures.pop()
        return {"y": inputs["x"] + inputs["s"]}

    def starting(batch: Sequence[Request]) -> None:
        if len(batch) > 1 and not joined and not ended:
            ended.append(cancel())

    def cancel() -> bytes:
        call.cancel()
        regions.unregister("left", SystemSharedMemory)
        assert names(regions) == ["kept"]
        left.write_bytes(foreign)
        return left.read_bytes()

    left, kept = tmp_path / "left", tmp_path / "kept"
    foreign = np.full(2, FOREIGN, np.float32).tobytes()
    for file in (left, kept):
        file.write_bytes(np.array([0, SHARED], np.float32).tobytes())
        regions.register_system(file.name, file.name, 0, 8)
    runner = ScriptedRunner(model, gated=True)
    batcher = Batcher(runner, 4, batch_started=starting)
    registry = ModelRegistry()
    registry.mark_ready(Model("m", "1", SIGNATURE, 4, "", batcher))
    service = InferenceService(registry, regions=regions)
    occupied, cancelled, answered = Replies(), Replies(), Replies()
    service.submit(in_memory("kept", 0), math.inf, occupied)
    runner.await_batches(1)
    call = service.submit(in_memory("left", 1), math.inf, cancelled)
    service.submit(in_memory("kept", 2), math.inf, answered)
    runner.open()
    response_of(answered.first())
    assert batcher.close()
    with pytest.raises(Cancelled):
        response_of(cancelled.first())
    assert ended == [foreign] * len(ended) != []
    assert left.read_bytes() == foreign, "nothing is written to it"
    assert np.frombuffer(kept.read_bytes(), np.float32).tolist() == [2 + SHARED, SHARED]
