"""PyTriton: tritonserver in front, and the model in this process, behind a proxy."""

from __future__ import annotations

from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from serving.peers.settings import HOST, MAX_BATCH_SIZE, MODEL_NAME, PORT, WINDOW_MS, Engine

engine = Engine()


def width(shape: list[Any]) -> int:
    """Return the width of a row."""
    return shape[1] if isinstance(shape[1], int) else -1


@batch
def infer(**inputs: Any) -> list[Any]:
    """Answer a batch."""
    return [engine.run(inputs[engine.input.name])]


config = TritonConfig(
    grpc_address=HOST, grpc_port=PORT, http_address=HOST, http_port=PORT + 1, allow_metrics=False
)
with Triton(config=config) as triton:
    triton.bind(
        model_name=MODEL_NAME,
        infer_func=infer,
        inputs=[Tensor(name=engine.input.name, dtype=engine.dtype.type, shape=(width(engine.input.shape),))],
        outputs=[Tensor(name=engine.output.name, dtype=np.float32, shape=(width(engine.output.shape),))],
        config=ModelConfig(
            max_batch_size=MAX_BATCH_SIZE,
            batcher=DynamicBatcher(max_queue_delay_microseconds=int(WINDOW_MS * 1000)),
        ),
        strict=False,
    )
    triton.serve()
