"""The engine's end of the link to a front-end, with a real link, service and batcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.server.link_pair import Pair, pair
from support.server.rig import request, signature, spec

from tensorferry.batcher import Batcher
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.engine.front_end_port import FrontEndPort, ResponseBursts
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.link_messages import ANSWERED, FAILED
from tensorferry.server.models.registry import Model, ModelRegistry

# A message of these is above 4 KiB, so it is in the memory that requests share.
WIDTH, SHARED = 1024, 1024
SIGNATURE = signature(
    spec("x", "FP32", "batch", WIDTH), spec("s", "FP32", SHARED), outputs=(spec("y", "FP32", "batch", WIDTH),)
)


class Engine:
    """A port with the model y = x + s[0], whose batches wait, before they are joined, until the test starts them."""

    def __init__(self) -> None:
        self.starting = ScriptedRunner(lambda batch: None, gated=True)
        self.batcher = Batcher(
            lambda inputs: {"y": inputs["x"] + inputs["s"][0]}, 8, batch_started=self.starting
        )
        registry = ModelRegistry()
        registry.mark_ready(Model("m", "1", SIGNATURE, 8, "", self.batcher))
        self.service = InferenceService(registry)

    def serve(self, both: Pair) -> FrontEndPort:
        return FrontEndPort(both.engine, self.service, ResponseBursts(), lambda runner: self.batcher.wake())


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.starting.open()
    assert engine.batcher.close()


def message(x: float, s: float) -> bytes:
    arrays = {"x": np.full((1, WIDTH), x, np.float32), "s": np.full(SHARED, s, np.float32)}
    return request(arrays).SerializeToString()


def answers(both: Pair, count: int) -> list[Any]:
    """The next answers: the value that all elements of `y` have, or the code of an error."""
    found: list[Any] = []
    while len(found) < count:
        for _, code, payload, _ in both.front_end.receive():
            if code != ANSWERED:
                found.append(code)
                continue
            (raw,) = pb.ModelInferResponse.FromString(payload).raw_output_contents
            (value,) = set(np.frombuffer(raw, np.float32).tolist())
            found.append(value)
    return found


def test_a_batch_does_not_read_memory_of_a_cancelled_request_that_another_client_got(engine: Engine) -> None:
    with pair() as both:
        port = engine.serve(both)

        def send(x: float, s: float) -> int:
            ticket = both.front_end.submit(message(x, s))
            both.front_end.flush()
            port.handle()
            return ticket

        send(0, 100)
        engine.starting.await_batches(1)
        cancelled = send(1, 100)
        send(2, 100)
        engine.starting.release()
        assert answers(both, 1) == [100]
        engine.starting.await_batches(2)
        # The batch of these two was dispatched, and is yet to be joined. The input without rows is that of the first.
        both.front_end.cancel(cancelled)
        both.front_end.flush()
        port.handle()
        assert answers(both, 1) == [FAILED]
        for _ in range(4):
            both.front_end.submit(message(7, -5000))
        engine.starting.open()
        assert answers(both, 1) == [102]
