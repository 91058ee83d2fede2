"""Tensors of tritonclient: without elements, without dimensions, with any string or float, and very
large.
"""

from __future__ import annotations

from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.processes.server import ServerProcess
from support.wire.inputs import DATATYPES, tensor
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

MIB = 1 << 20
FLOATS: dict[str, Any] = {"FP16": np.uint16, "BF16": np.uint16, "FP32": np.uint32, "FP64": np.uint64}


STRINGS = 65_536


@pytest.fixture
def server(echoes: ServerProcess) -> ServerProcess:
    return echoes


def echoed(client: triton.InferenceServerClient, model: str, array: Any) -> Any:
    return client.infer(model, [tensor("x", array, model.split("-")[1])]).as_numpy("y")


def test_no_elements(client: triton.InferenceServerClient) -> None:
    for name, dtype in DATATYPES.items():
        for shape in ((0, 3), (2, 0), (0, 0)):
            result = client.infer(f"echo-{name}", [tensor("x", np.empty(shape, dtype), name)])
            (output,) = result.get_response().outputs
            assert (output.datatype, tuple(output.shape)) == (name, shape)
            assert list(result.get_response().raw_output_contents) == [b""]


def test_no_dimensions(client: triton.InferenceServerClient) -> None:
    number = echoed(client, "scalar-FP32", np.array(1.5, np.float32))
    assert (number.shape, number.item()) == ((), 1.5)
    text = echoed(client, "scalar-BYTES", np.array("eins", object))
    assert (text.shape, text.item()) == ((), b"eins")


@pytest.mark.parametrize("name", FLOATS)
def test_every_bit_of_a_float_survives(client: triton.InferenceServerClient, name: str) -> None:
    dtype, bits = DATATYPES[name], FLOATS[name]
    finfo: Any = ml_dtypes.finfo
    limits = finfo(dtype)
    special = [np.nan, np.inf, -np.inf, -0.0, 0.0, limits.max, limits.min, limits.smallest_subnormal]
    array = np.array([special], dtype)
    # A NaN with a sign and unusual bits.
    array = np.concatenate([array, array], axis=1)
    array.view(bits)[0, 0] |= 5
    array.view(bits)[0, 8] |= bits(1) << bits(8 * array.itemsize - 1)
    np.testing.assert_array_equal(echoed(client, f"echo-{name}", array).view(bits), array.view(bits))


TEXTS = [
    "",
    "a",
    "zwölf Boxkämpfer",
    "終わり",
    "\U0001f6a2",
    "a\0b",
    "\0",
    "\0\0a",
    "a\0\0",
    " \t\r\n",
    "x" * 70_000,
]


def test_strings(client: triton.InferenceServerClient) -> None:
    given = [text.encode() if number % 2 else text for number, text in enumerate(TEXTS)]
    expected = [text if isinstance(text, bytes) else text.encode() for text in given]
    array = np.empty((1, len(given)), object)
    array[0] = given
    assert echoed(client, "echo-BYTES", array).tolist() == [expected]


def test_large_tensors_and_a_too_large_one(client: triton.InferenceServerClient) -> None:
    array = np.arange(6 * MIB, dtype=np.float32).reshape(1, -1)  # 24 MiB.
    np.testing.assert_array_equal(echoed(client, "echo-FP32", array), array)
    with pytest.raises(InferenceServerException, match="larger than max") as caught:
        echoed(client, "echo-FP32", np.zeros((1, 9 * MIB), np.float32))
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    np.testing.assert_array_equal(echoed(client, "echo-FP32", array[:, :8]), array[:, :8])


def test_as_many_strings_as_the_server_takes(server: ServerProcess) -> None:
    """In typed contents, with tritonclient's stubs, because it has no method for them."""
    given = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="BYTES", shape=[1, STRINGS])
    given.contents.bytes_contents.extend([b"a"] * (STRINGS - 1) + [b"z"])
    with grpc.insecure_channel(server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.ModelInferRequest(model_name="echo-BYTES", inputs=[given])
        response = stub.ModelInfer(request, timeout=60)
    assert response.outputs[0].contents.bytes_contents == given.contents.bytes_contents
