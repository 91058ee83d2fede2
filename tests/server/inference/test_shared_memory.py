"""Requests with tensors in shared memory: what is written, what is refused, and that no region is held afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.server.rig import infer, request, signature, spec

from tensorferry.batcher import Batcher
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.inference.shared_memory.regions import Regions
from tensorferry.server.models.lifecycle.registry import Model, ModelRegistry

X, T = np.array([[1.5, -2]], np.float32), np.array(["é"], object)


@pytest.fixture
def service(regions: Regions) -> Iterator[InferenceService]:
    """The model m, y = 2 x and u = t, and the region r of 64 bytes."""
    form = signature(
        spec("x", "FP32", "batch", 2),
        spec("t", "BYTES", "batch"),
        outputs=(spec("y", "FP32", "batch", 2), spec("u", "BYTES", "batch")),
    )
    batcher = Batcher(lambda inputs: {"y": 2 * inputs["x"], "u": inputs["t"]}, 4)
    registry = ModelRegistry()
    registry.mark_ready(Model("m", "1", form, 4, "", batcher))
    regions.register_system("r", "key", 0, 64)
    yield InferenceService(registry, regions=regions)
    assert regions.regions()[0].users == 0, "the region is held"
    assert batcher.close()


def placed(tensor: Any, offset: int, nbytes: int) -> None:
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_offset"].int64_param = offset
    tensor.parameters["shared_memory_byte_size"].int64_param = nbytes


def test_inputs_are_read_from_a_region_and_outputs_written_to_it(
    service: InferenceService, tmp_path: Path
) -> None:
    before = X.tobytes() + bytes(56)
    (tmp_path / "key").write_bytes(before)
    message = request({"t": T, "x": X})
    del message.raw_input_contents[1]
    placed(message.inputs[1], 0, 8)
    for name, offset in (("y", 16), ("u", 40)):
        placed(message.outputs.add(name=name), offset, 12)
    response = infer(service, message)
    assert [(tensor.name, list(tensor.shape)) for tensor in response.outputs] == [("y", [1, 2]), ("u", [1])]
    assert list(response.raw_output_contents) == [b"", b""]
    expected = bytearray(before)
    expected[16:24], expected[40:46] = (2 * X).tobytes(), b"\2\0\0\0" + "é".encode()
    assert (tmp_path / "key").read_bytes() == expected


def test_outputs_without_a_place_are_in_the_response(service: InferenceService, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(X.tobytes() + bytes(56))
    message = request({"t": T, "x": X})
    del message.raw_input_contents[1]
    placed(message.inputs[1], 0, 8)
    response = infer(service, message)
    assert list(response.raw_output_contents) == [(2 * X).tobytes(), b"\2\0\0\0" + "é".encode()]


def too_small(message: pb.ModelInferRequest) -> None:
    placed(message.outputs.add(name="u"), 0, 64)
    placed(message.outputs.add(name="y"), 0, 7)


def with_contents(message: pb.ModelInferRequest) -> None:
    placed(message.inputs[0], 0, 8)
    message.inputs[0].contents.fp32_contents.append(1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            too_small,
            "shared memory size specified with the request for output 'y' (7 bytes) should be at least 8 bytes to hold the results",
        ),
        (
            with_contents,
            "unexpected 'content' provided when using shared memory for input tensor 'x' for model 'm': leave it out, or send the tensor",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    service: InferenceService, change: Callable[[pb.ModelInferRequest], None], text: str, tmp_path: Path
) -> None:
    before = (tmp_path / "key").read_bytes()
    message = request({"x": X, "t": T})
    change(message)
    with pytest.raises(InvalidRequestError) as refused:
        infer(service, message)
    assert str(refused.value) == text
    assert (tmp_path / "key").read_bytes() == before
