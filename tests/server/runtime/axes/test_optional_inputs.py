"""Initialisers that are graph inputs: a request may give them or leave them out."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from google.protobuf import text_format
from support.models.scaled import with_defaults
from support.models.small import written
from support.server.rig import Array, Load, Replies, request, response_of

from tensorferry.server.errors import StartError
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry

X = np.ones((2, 3), np.float32)


def run_three(model: Model, inputs: dict[str, Array]) -> int:
    """Send three requests, whose answer is 3 everywhere, before any runs. Return the number of batches."""
    registry = ModelRegistry()
    registry.mark_ready(model)
    service = InferenceService(registry)
    before, replies = model.batcher.statistics().batches, [Replies() for _ in range(3)]
    for each in replies:
        service.submit(request(inputs).SerializeToString(), math.inf, each, run_soon=lambda batcher: None)
    model.batcher.run_inline(math.inf)
    for each in replies:
        (raw,) = response_of(each.first()).raw_output_contents
        np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.full(6, 3))
    return model.batcher.statistics().batches - before


def test_requests_with_optional_inputs_run_alone_if_batching_was_only_tested(load: Load) -> None:
    """The test ran without optional inputs, so rows may affect each other with them."""
    loaded = load(with_defaults)
    assert loaded.batching_verdict == "proved"
    for verdict, batches in (("proved", 1), ("tested", 3)):
        model = replace(loaded, batching_verdict=verdict)
        assert run_three(model, {"x": X, "scale": np.array(3, np.float32)}) == batches


def test_requests_with_an_optional_input_of_variable_shape_run_alone(load: Load) -> None:
    """The input may have one row per row of its request, so too few for a batch of two."""
    text = "(float[n, 3] x, float[m, 3] state) => (float[n, 3] y) { y = Add (x, state) }"
    model = load(partial(written, text=text, state=np.zeros((1, 3), np.float32)))
    run_three(model, {"x": X, "state": 2 * X})
    assert model.batcher.statistics().failed_batches == 0


def test_configurations(load: Load) -> None:
    model = load(with_defaults)
    again = load(with_defaults, text_format.MessageToString(model.config))
    assert again.signature == model.signature
    x = 'input { name: "x" data_type: TYPE_FP32 dims: [3] }'
    bias = 'input { name: "bias" data_type: TYPE_FP32 dims: [3] optional: true }'
    one = load(with_defaults, f"max_batch_size: 4 {x} {bias}")
    assert [(spec.name, spec.dims) for spec in one.signature.optional] == [("bias", (3,))]
    with pytest.raises(StartError, match="optional inputs, which need 'optional: true', are: scale, bias"):
        load(with_defaults, f"max_batch_size: 4 {x} {bias.replace('optional: true', '')}")
    with pytest.raises(StartError, match="configuration expects 0 inputs, model provides 1"):
        load(with_defaults, f"max_batch_size: 4 {x.replace('dims', 'optional: true dims')}")
