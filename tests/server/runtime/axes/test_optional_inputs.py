"""Initialisers that are graph inputs: a request may give them or leave them out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from support.models.scaled import with_defaults
from support.models.small import node, save, value
from support.server.rig import Replies, request, response_of

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.inference.interface import InlineRunner
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.registry import Model, ModelRegistry

X = np.ones((2, 3), np.float32)


def load(path: Path, config: str = "", max_batch_size: int = 8) -> Model:
    given = text_format.Parse(config, ModelConfig()) if config else None
    options = ServerConfig(models=(), max_batch_size=max_batch_size)
    return load_model(ModelSource("m", path, config=given), LoadContext(options))


def service_of(model: Model) -> InferenceService:
    registry = ModelRegistry()
    registry.mark_ready(model)
    return InferenceService(registry)


def later(batcher: InlineRunner) -> None:
    """Do nothing: the test runs the batches itself."""


def test_requests_with_optional_inputs_run_alone_if_batching_was_only_tested(tmp_path: Path) -> None:
    """The test ran without optional inputs, so rows may affect each other with them."""
    loaded = load(with_defaults(tmp_path / "m.onnx"))
    assert loaded.batching_verdict == "proved"
    for verdict, batches in (("proved", 1), ("tested", 3)):
        model = replace(loaded, batching_verdict=verdict)
        service = service_of(model)
        before = model.batcher.statistics().batches
        replies = [Replies() for _ in range(3)]
        for each in replies:
            data = request({"x": X, "scale": np.array(3, np.float32)}).SerializeToString()
            service.submit(data, math.inf, each, run_soon=later)
        # Runs all batches now that all requests are queued.
        model.batcher.run_inline(math.inf)
        for each in replies:
            np.testing.assert_array_equal(
                np.frombuffer(response_of(each.first()).raw_output_contents[0], "<f4"), np.full(6, 3)
            )
        assert model.batcher.statistics().batches == before + batches
    loaded.batcher.close()


def test_requests_with_an_optional_input_of_variable_shape_run_alone(tmp_path: Path) -> None:
    """The input may have one row per row of its request, so too few for a batch of two."""
    path = save(
        tmp_path / "m.onnx",
        [node("Add", "x state", "y")],
        [value("x", dims=["n", 3]), value("state", dims=["m", 3])],
        [value("y", dims=["n", 3])],
        {"state": np.zeros((1, 3), np.float32)},
    )
    model = load(path)
    service = service_of(model)
    replies = [Replies() for _ in range(3)]
    for each in replies:
        data = request({"x": X, "state": 2 * X}).SerializeToString()
        service.submit(data, math.inf, each, run_soon=later)
    model.batcher.run_inline(math.inf)
    for each in replies:
        (raw,) = response_of(each.first()).raw_output_contents
        np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.full(6, 3))
    assert model.batcher.statistics().failed_batches == 0
    model.batcher.close()


def test_configurations(tmp_path: Path) -> None:
    path = with_defaults(tmp_path / "m.onnx")
    model = load(path)
    model.batcher.close()
    again = load(path, text_format.MessageToString(model.config))
    again.batcher.close()
    assert again.signature == model.signature
    x = 'input { name: "x" data_type: TYPE_FP32 dims: [3] }'
    bias = 'input { name: "bias" data_type: TYPE_FP32 dims: [3] optional: true }'
    one = load(path, f"max_batch_size: 4 {x} {bias}")
    one.batcher.close()
    assert [(spec.name, spec.dims) for spec in one.signature.optional] == [("bias", (3,))]
    with pytest.raises(StartError, match="optional inputs, which need 'optional: true', are: scale, bias"):
        load(path, f"max_batch_size: 4 {x} {bias.replace('optional: true', '')}")
    with pytest.raises(StartError, match="configuration expects 0 inputs, model provides 1"):
        load(path, f"max_batch_size: 4 {x.replace('dims', 'optional: true dims')}")
