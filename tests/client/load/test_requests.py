from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tensorferry.client.errors import InvalidInput
from tensorferry.client.load.requests import RequestMaker
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import tensors
from tensorferry.protos.tensors import DATATYPES, Array


def model(*inputs: TensorMetadata) -> ModelMetadata:
    return ModelMetadata("m", ("1",), "", inputs, ())


def maker_of(described: ModelMetadata, version: str = "", **options: Any) -> RequestMaker:
    return RequestMaker(described, version, **options)


def arrays(bodies: Sequence[bytes], name: str = "x") -> list[Array]:
    found = []
    for body in bodies:
        request = pb.ModelInferRequest.FromString(body)
        place = [tensor.name for tensor in request.inputs].index(name)
        tensor = request.inputs[place]
        kind = tensors.datatype(tensor.datatype)
        found.append(tensors.decode_raw(request.raw_input_contents[place], kind, tensor.shape))
    return found


def test_random_rows_of_every_datatype() -> None:
    for datatype in DATATYPES:
        bodies = maker_of(model(TensorMetadata("x", datatype, (-1, 64))), "7").requests(2)
        assert len(set(bodies)) == len(bodies) == 16
        first = pb.ModelInferRequest.FromString(bodies[0])
        assert (first.model_name, first.model_version, first.inputs[0].datatype) == ("m", "7", datatype)
        assert {array.shape for array in arrays(bodies)} == {(2, 64)}


def test_the_seed_decides_the_values() -> None:
    def bodies(seed: int) -> tuple[bytes, ...]:
        return maker_of(model(TensorMetadata("x", "FP32", (-1, 3))), seed=seed).requests(1)

    assert bodies(1) == bodies(1) != bodies(2)


def test_shapes_have_the_rows_of_the_requests() -> None:
    described = model(TensorMetadata("ids", "INT64", (-1, -1)), TensorMetadata("x", "FP32", (-1, 2, -1)))
    with pytest.raises(InvalidInput, match="such as --shape ids:1,8, or give it with --input"):
        maker_of(described).requests(1)
    bodies = maker_of(described, shapes={"ids": (5,), "x": (4, 2, 3)}).requests(4)
    assert arrays(bodies, "ids")[0].shape == (4, 5)
    assert arrays(bodies, "x")[0].shape == (4, 2, 3)
    assert min(array.min() for array in arrays(bodies, "ids")) >= 0
    assert max(array.max() for array in arrays(bodies, "ids")) == 1
    for shape in ((4, 3, 3), (4, 1, 2, 3), (2,), (3, 2, 3)):
        with pytest.raises(InvalidInput, match="or all but the first, whose length is 4 by --rows"):
            maker_of(described, shapes={"ids": (5,), "x": shape}).requests(4)


def test_a_model_without_batch_axis_has_one_row() -> None:
    described = model(TensorMetadata("x", "FP32", (-1, 2)), TensorMetadata("y", "FP32", (3,)))
    assert arrays(maker_of(described, shapes={"x": (4, 2)}).requests(1))[0].shape == (4, 2)
    with pytest.raises(InvalidInput, match="rows expects 1, got 2"):
        maker_of(described, shapes={"x": (4, 2)}).requests(2)


def test_rows_of_files_are_sent_in_turn() -> None:
    described = model(TensorMetadata("x", "INT64", (-1, 1)), TensorMetadata("y", "INT64", (-1,)))
    x, y = np.arange(5).reshape(5, 1), np.arange(10, 13)
    bodies = maker_of(described, arrays={"x": x, "y": y}).requests(2)
    assert [array.ravel().tolist() for array in arrays(bodies, "x")] == [[0, 1], [2, 3], [4, 0]]
    assert [array.tolist() for array in arrays(bodies, "y")] == [[10, 11], [12, 10], [11, 12]]
    # A file with fewer rows than a request is repeated within it.
    (body,) = maker_of(described, arrays={"x": x, "y": y}).requests(6)
    assert arrays([body], "x")[0].ravel().tolist() == [0, 1, 2, 3, 4, 0]


def test_files_of_the_wrong_datatype_or_name_are_refused() -> None:
    described = model(TensorMetadata("x", "FP32", (-1, 1)))
    with pytest.raises(InvalidInput, match="x"):
        maker_of(described, arrays={"x": np.zeros((1, 1), np.int8)}).requests(1)
    with pytest.raises(InvalidInput, match="--input expects one of 'x', got 'z'"):
        maker_of(described, arrays={"z": np.zeros(1)})
    with pytest.raises(InvalidInput, match="--input or --shape"):
        maker_of(described, arrays={"x": np.zeros((1, 1), np.float32)}, shapes={"x": (1,)})
    with pytest.raises(InvalidInput, match="at least one row"):
        maker_of(described, arrays={"x": np.zeros((0, 1), np.float32)}).requests(1)


def test_optional_inputs_are_left_out_and_parameters_are_sent() -> None:
    described = model(TensorMetadata("x", "FP32", (-1,)), TensorMetadata("y", "FP32", (-1,), optional=True))
    body, *_ = maker_of(described, parameters={"priority": 2}).requests(1)
    request = pb.ModelInferRequest.FromString(body)
    assert [tensor.name for tensor in request.inputs] == ["x"]
    assert request.parameters["priority"].int64_param == 2
