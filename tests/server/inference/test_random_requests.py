"""Every message is completed exactly once, with a response or with a client error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polling import until
from support.models import small
from support.server.rig import Replies, fp32, reproducible, request, response_of

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.load_context import LoadContext
from tensorferry.server.models.loader import load_model
from tensorferry.server.models.registry import Model, ModelRegistry
from tensorferry.server.shared_memory.regions import Regions
from tensorferry.server.status import status_of

MODELS = ("batched", "alone")
REGION_BYTES = 96


def known(model: Model) -> bool:
    """Return whether it is known which axes may have length zero."""
    return model.empty_axes.verdicts is not None


class Fuzzed:
    """A service over ONNX Runtime, and all its completions."""

    def __init__(self, directory: Path) -> None:
        path = small.identity(
            directory / "m.onnx",
            small.value("x", "FP32", ["batch", 3]),
            small.value("n", "INT64", ["batch", "k"]),
            small.value("s", "BYTES", ["batch"]),
        )
        registry = ModelRegistry()
        for name, max_batch_size in zip(MODELS, (4, 0), strict=True):
            config = ServerConfig((ModelSource(name, path),), max_batch_size=max_batch_size)
            model = load_model(config.models[0], LoadContext(config))
            until(partial(known, model))
            registry.mark_ready(model)
        self.registry = registry
        (directory / "key").write_bytes(bytes(REGION_BYTES))
        self.regions = Regions(allowed=True, directory=directory)
        self.regions.register_system("r", "key", 0, REGION_BYTES)
        self.service = InferenceService(registry, regions=self.regions)
        self.completions: list[Replies] = []

    @property
    def users(self) -> int:
        (region,) = self.regions.regions()
        return region.users

    def send(self, data: bytes) -> pb.ModelInferResponse | grpc.StatusCode:
        replies = Replies()
        self.completions.append(replies)
        self.service.submit(data, math.inf, replies)
        try:
            response = response_of(replies.first())
            assert self.users == 0, "a region is held by a request that is answered"
            return response
        except Exception as error:
            failure = error
        assert self.users == 0, "a region is held by a request that is done"
        code = status_of(failure).code
        assert code is not grpc.StatusCode.INTERNAL, failure
        return code


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    made = Fuzzed(tmp_path_factory.mktemp("fuzz"))
    yield made
    for model in made.registry.models():
        assert model.batcher.close()
        model.release()
    assert made.completions
    assert all(len(replies.all) == 1 for replies in made.completions)


def valid(rows: int = 2, *, typed: bool = False, model: str = "batched") -> pb.ModelInferRequest:
    return request(
        {
            "x": fp32(rows, 3),
            "n": np.arange(2 * rows).reshape(rows, 2),
            "s": np.array([f"é{row}" for row in range(rows)], dtype=object),
        },
        typed=typed,
        model=model,
        id="id",
    )


messages = st.builds(valid, st.integers(0, 6), typed=st.booleans(), model=st.sampled_from(MODELS))


@given(messages)
@reproducible
def test_valid_requests_are_answered(fuzzed: Fuzzed, message: pb.ModelInferRequest) -> None:
    answer = fuzzed.send(message.SerializeToString())
    assert isinstance(answer, pb.ModelInferResponse)
    assert list(answer.raw_output_contents) == list(message.raw_input_contents)
    assert [list(tensor.shape) for tensor in answer.outputs] == [
        list(tensor.shape) for tensor in message.inputs
    ]


@given(messages, st.data())
@settings(reproducible, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_valid_requests_with_bytes_changed(fuzzed: Fuzzed, message: pb.ModelInferRequest, data: Any) -> None:
    mutated = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(mutated) - 1)))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "cut", "repeat"]))
        if kind == "set" and mutated:
            mutated[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            mutated[at:at] = data.draw(st.binary(max_size=4))
        elif kind == "delete":
            del mutated[at : at + data.draw(st.integers(1, 8))]
        elif kind == "cut":
            del mutated[at:]
        else:
            mutated += mutated[at : at + 20]
    fuzzed.send(bytes(mutated))


DIMS = st.sampled_from([-(1 << 63), -1, 0, 1, 2, 3, 4, 5, 1 << 31, 1 << 60, (1 << 63) - 1])


@given(messages, st.data())
@settings(reproducible, max_examples=300)
def test_valid_requests_with_fields_changed(fuzzed: Fuzzed, message: pb.ModelInferRequest, data: Any) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        change(message, data)
    fuzzed.send(message.SerializeToString())


def change(message: pb.ModelInferRequest, data: Any) -> None:
    kind = data.draw(st.integers(0, 13))
    tensor = message.inputs[data.draw(st.integers(0, 2)) % len(message.inputs)] if message.inputs else None
    if kind == 0 and tensor:
        tensor.shape[:] = data.draw(st.lists(DIMS, max_size=4))
    elif kind == 1 and tensor and tensor.shape:
        tensor.shape[data.draw(st.integers(0, len(tensor.shape) - 1))] = data.draw(DIMS)
    elif kind == 2 and tensor:
        tensor.datatype = data.draw(st.sampled_from([*DATATYPES, "", "FP8"]))
    elif kind == 3 and tensor:
        tensor.name = data.draw(st.sampled_from(["x", "n", "s", "", "y"]))
    elif kind == 4 and message.raw_input_contents:
        at = data.draw(st.integers(0, len(message.raw_input_contents) - 1))
        message.raw_input_contents[at] = data.draw(st.binary(max_size=32))
    elif kind == 5:
        message.raw_input_contents.append(data.draw(st.binary(max_size=8)))
    elif kind == 6 and message.raw_input_contents:
        del message.raw_input_contents[data.draw(st.integers(0, len(message.raw_input_contents) - 1))]
    elif kind == 7 and tensor:
        tensor.contents.bytes_contents.extend(data.draw(st.lists(st.binary(max_size=3), max_size=3)))
    elif kind == 8 and tensor:
        tensor.contents.int64_contents.extend(data.draw(st.lists(st.integers(-5, 5), max_size=3)))
    elif kind == 9:
        name = data.draw(st.sampled_from(["x_out", "n_out", "s_out", "other"]))
        message.outputs.add(name=name)
    elif kind == 10 and tensor:
        put_in_region(tensor, data)
    elif kind == 11 and tensor and message.raw_input_contents:
        # As a client does: it sends no raw contents for this input.
        put_in_region(tensor, data)
        del message.raw_input_contents[data.draw(st.integers(0, len(message.raw_input_contents) - 1))]
    elif kind == 12:
        put_in_region(message.outputs.add(name=data.draw(st.sampled_from(["x_out", "n_out", "s_out"]))), data)
    elif kind == 13:
        output = message.outputs.add(name=data.draw(st.sampled_from(["x_out", "n_out", "s_out"])))
        output.parameters["classification"].int64_param = data.draw(st.sampled_from([-1, 0, 1, 2, 1 << 62]))


def put_in_region(tensor: Any, data: Any) -> None:
    tensor.parameters["shared_memory_region"].string_param = data.draw(
        st.sampled_from(["r", "r", "r", "other"])
    )
    sizes = st.sampled_from([0, 12, 16, 24, 32, 48, 64, REGION_BYTES, REGION_BYTES + 1, -8, (1 << 63) - 1])
    tensor.parameters["shared_memory_byte_size"].int64_param = data.draw(sizes)
    if data.draw(st.booleans()):
        tensor.parameters["shared_memory_offset"].int64_param = data.draw(
            st.sampled_from([0, 8, 32, -8, 1 << 62])
        )


@given(st.integers(0, 4), st.data())
@settings(reproducible, max_examples=100)
def test_inputs_in_shared_memory_give_the_same_answer(fuzzed: Fuzzed, rows: int, data: Any) -> None:
    message = valid(rows, model=data.draw(st.sampled_from(MODELS)))
    expected = fuzzed.send(message.SerializeToString())
    raws = list(message.raw_input_contents)
    chosen = data.draw(st.sets(st.integers(0, 2), min_size=1))
    (region,) = fuzzed.regions.regions()
    offset = 0
    for index in chosen:
        tensor = message.inputs[index]
        if offset >= REGION_BYTES or offset + len(raws[index]) > REGION_BYTES:
            return
        region.memory.write(offset, memoryview(raws[index]))
        tensor.parameters["shared_memory_region"].string_param = "r"
        tensor.parameters["shared_memory_offset"].int64_param = offset
        tensor.parameters["shared_memory_byte_size"].int64_param = len(raws[index])
        offset += len(raws[index])
    message.raw_input_contents[:] = [raw for index, raw in enumerate(raws) if index not in chosen]
    assert fuzzed.send(message.SerializeToString()) == expected
