"""After sending responses the lane reports to the batcher when no request is left to read, so that no batch waits needlessly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.server.rig import PATIENCE, fp32, request, signature, spec
from support.server.scripted_service import ServedTransport

from tensorferry.batcher import Batcher
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.models.registry import Model

# Of a batch; and how many of these a batch waits for word.
SECONDS, NEVER = 1.0, 1000.0


@pytest.fixture
def runner(served: ServedTransport, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedRunner]:
    """The runner of the model `m`, whose batches wait until the lane reports that no request is left."""
    if served.lane is None:
        pytest.skip("only the lane enqueues quietly")
    monkeypatch.setattr("tensorferry.batcher.queue.wakeup._INPUT_WAIT_SHARE", NEVER)
    runner = ScriptedRunner(lambda inputs: {"x": inputs["x"]}, gated=True)
    batcher = Batcher(runner, 4)
    batcher.add_warmup_sample(1, SECONDS)
    batcher.add_warmup_sample(4, SECONDS)
    served.be_real()
    served.registry.mark_ready(Model("m", "1", signature(spec("x", "FP32", "b", 1)), 4, "", batcher))
    yield runner
    runner.open()
    assert batcher.close()


def test_calls(served: ServedTransport, runner: ScriptedRunner) -> None:
    calls: list[Any] = []
    for rows in (1, 2):
        calls.append(served.stub.ModelInfer.future(request({"x": fp32(rows, 1)}), timeout=PATIENCE))
        if rows == 1:
            runner.await_batches(1)
    await_queued(served, 1)
    runner.release(2)
    for rows, call in enumerate(calls, 1):
        assert call.result().outputs[0].shape == [rows, 1]


def test_streams(served: ServedTransport, runner: ScriptedRunner) -> None:
    stream = served.stream(timeout=PATIENCE)
    stream.send_bytes(request({"x": fp32(1, 1)}).SerializeToString())
    runner.await_batches(1)
    stream.send_bytes(request({"x": fp32(2, 1)}).SerializeToString())
    await_queued(served, 1)
    runner.release(2)
    shapes = [stream.read().infer_response.outputs[0].shape for _ in range(2)]
    assert shapes == [[1, 1], [2, 1]]
    stream.half_close()
    assert stream.rest() == []


def await_queued(served: ServedTransport, requests: int) -> None:
    """Wait until this many requests are queued; a later call is then answered after them."""
    batcher = served.registry.get("m").batcher
    while batcher.statistics().sizes.queued < requests:
        assert served.stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE).live
