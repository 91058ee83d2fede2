"""Joined requests, and the parts of their answers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorferry.client.coalescing.joining import join, split
from tensorferry.client.messages import codec
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

ROWS = (1, 3, 2)
VALUES: dict[str, Array] = {
    "BOOL": np.arange(12) % 3 == 0,
    "FP16": np.arange(12, dtype=np.float16),
    "BF16": np.arange(12).astype(ml_dtypes.bfloat16),
    "BYTES": np.array([b"x" * n for n in range(12)], object),
    **{
        tensors.datatype_of(np.zeros(1, kind)): np.arange(12).astype(kind)
        for kind in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")
    },
}


def parts_of(values: Array) -> list[Array]:
    return np.split(values.reshape(6, 2), [1, 4])


def request(**inputs: Array) -> pb.ModelInferRequest:
    return codec.encode("m", "3", codec.request_of(inputs, None, ["y"], {"priority": 2}), None)


def answer(outputs: dict[str, Array], *, typed: bool = False) -> pb.ModelInferResponse:
    message = pb.ModelInferResponse(model_name="m", model_version="3", id="")
    message.parameters["p"].int64_param = 7
    for name, array in outputs.items():
        kind = tensors.datatype(tensors.datatype_of(array))
        tensor = message.outputs.add(name=name, datatype=kind.name, shape=array.shape)
        tensor.parameters["q"].bool_param = True
        if typed:
            tensors.encode_contents(array, kind, tensor.contents)
        else:
            message.raw_output_contents.append(tensors.encode_raw(array))
    return message


@pytest.mark.parametrize("datatype", tensors.DATATYPES)
def test_a_joined_request_is_that_of_the_joined_arrays(datatype: str) -> None:
    values = VALUES[datatype]
    weights = np.arange(6, dtype=np.float32)
    requests = [request(x=x, w=w) for x, w in zip(parts_of(values), np.split(weights, [1, 4]), strict=True)]
    assert join(requests) == request(x=values.reshape(6, 2), w=weights)


@pytest.mark.parametrize(
    ("datatype", "typed"),
    [(name, False) for name in tensors.DATATYPES]
    + [(name, True) for name, kind in tensors.DATATYPES.items() if kind.contents],
)
def test_each_request_gets_its_rows(datatype: str, typed: bool) -> None:
    values, more = VALUES[datatype], np.arange(18, dtype=np.float32).reshape(6, 1, 3)
    given = answer({"y": values.reshape(6, 2), "z": more}, typed=typed)
    parts = split(given, ROWS)
    assert parts is not None
    expected = [
        answer({"y": y, "z": z}, typed=typed)
        for y, z in zip(parts_of(values), np.split(more, [1, 4]), strict=True)
    ]
    assert parts == expected


def without(message: pb.ModelInferResponse, change: Any) -> pb.ModelInferResponse:
    change(message)
    return message


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(answer({"y": np.zeros((5, 2))}), id="too few rows"),
        pytest.param(answer({"y": np.zeros((6, 2)), "z": np.zeros((1, 2))}), id="an output of one row"),
        pytest.param(answer({"y": np.zeros(())}), id="a scalar"),
        pytest.param(without(answer({"y": np.zeros((6, 2))}), lambda m: m.raw_output_contents.append(b"")), id="contents"),
        pytest.param(
            without(answer({"y": np.zeros(6, "i1")}), lambda m: m.raw_output_contents.__setitem__(0, b"12345")),
            id="too few bytes",
        ),
        pytest.param(
            without(answer({"y": np.full(6, b"", object)}), lambda m: m.raw_output_contents.__setitem__(0, b"\1" * 24)),
            id="strings beyond the end",
        ),
        pytest.param(
            without(answer({"y": np.full(6, b"", object)}), lambda m: m.raw_output_contents.__setitem__(0, bytes(25))),
            id="bytes left over",
        ),
        pytest.param(
            without(answer({"y": np.zeros((6, 2))}), lambda m: setattr(m.outputs[0], "datatype", "FP31")), id="datatype"
        ),
        pytest.param(
            without(answer({"y": np.zeros(6)}, typed=True), lambda m: m.outputs[0].contents.fp64_contents.pop()),
            id="too few elements",
        ),
        pytest.param(
            without(answer({"y": np.zeros(6)}, typed=True), lambda m: m.outputs[0].contents.int_contents.append(1)),
            id="two fields",
        ),
        pytest.param(
            without(answer({"y": np.zeros(6)}, typed=True), lambda m: setattr(m.outputs[0], "datatype", "FP16")),
            id="a datatype without typed contents",
        ),
    ],
)  # fmt: skip
def test_an_answer_without_these_rows_is_not_split(given: pb.ModelInferResponse) -> None:
    assert split(given, ROWS) is None
