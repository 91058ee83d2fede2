"""Memory after requests with many distinct shapes."""

from __future__ import annotations

import gc
import math
import threading
import tracemalloc
from pathlib import Path

import numpy as np
from support.models import small
from support.models.small import value
from support.server.rig import PATIENCE

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.registry import ModelRegistry

_MIB = 1 << 20
# Distinct shapes of one half, more than any cache holds.
_SHAPES = 600


def _message(index: int) -> bytes:
    shape = (1, 1 + index % 100, 1 + index // 100)
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=shape)
    raw = np.zeros(shape, np.float32).tobytes()
    return pb.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[raw]).SerializeToString()


def test_memory_does_not_grow_with_the_number_of_shapes(tmp_path: Path) -> None:
    path = small.identity(tmp_path / "m.onnx", value("x", "FP32", ("batch", "height", "width")))
    source = ModelSource("m", path, "1", None)
    model = load_model(source, LoadContext(ServerConfig(models=(source,))))
    registry = ModelRegistry()
    registry.mark_loading("m", "1")
    registry.mark_ready(model)
    service = InferenceService(registry)
    error_reply: list[BaseException] = []

    def run(indices: range) -> int:
        """Run a request of each shape. Return the bytes that Python has allocated."""
        for index in indices:
            answered = threading.Event()

            def complete(reply: InferenceReply, answered: threading.Event = answered) -> None:
                try:
                    reply.message()
                except Exception as error:
                    error_reply.append(error)
                answered.set()

            service.submit(_message(index), math.inf, complete)
            assert answered.wait(PATIENCE)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    try:
        run(range(100))
        tracemalloc.start()
        half = run(range(100, _SHAPES))
        whole = run(range(_SHAPES, 2 * _SHAPES))
    finally:
        tracemalloc.stop()
        model.batcher.close()
    assert error_reply == []
    assert whole - half < _MIB / 2
