"""Requests of zero rows are answered without a run, on a real server with models that a run would
crash.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.models import recurrent
from support.models.small import node, save, value
from support.processes import models
from support.processes.server import ServerProcess, running
from support.server.rig import request
from support.wire.inputs import tensor
from tritonclient.utils import InferenceServerException

from tensorferry.protos.inference_pb2_grpc import GRPCInferenceServiceStub


def _unnamed(path: Path) -> Path:
    """x FP32 [n, k] to y FP32 [n, ?], x twice side by side."""
    return save(
        path,
        [node("Concat", "x x", "y", axis=1)],
        [value("x", dims=["n", "k"])],
        [value("y", dims=["n", None])],
    )


@pytest.fixture(scope="module")
def server(transport: str, model_dir: Path) -> Iterator[ServerProcess]:
    served: list[str | Path] = [
        recurrent.gru(model_dir / "gru.onnx"),
        recurrent.lstm(model_dir / "lstm.onnx"),
        _unnamed(model_dir / "unnamed.onnx"),
        *models.echoes(model_dir, "BYTES", "INT32"),
    ]
    with running("--allow-shared-memory", *served, transport=transport) as server:
        yield server


def _success(client: triton.InferenceServerClient, model: str) -> tuple[int, int, int]:
    (one,) = client.get_inference_statistics(model).model_stats
    assert one.inference_stats.fail.count == 0
    return one.inference_stats.success.count, one.inference_count, one.execution_count


def test_models_that_abort_are_not_run(client: triton.InferenceServerClient) -> None:
    for length in (0, 5):
        result = client.infer(
            "gru", [tensor("ids", np.zeros((0, length), np.int64), "INT64")], request_id="7"
        )
        assert result.as_numpy("y").shape == (0, 4)
        assert result.as_numpy("y").dtype == np.float32
        assert result.get_response().id == "7"
        result = client.infer("lstm", [tensor("x", np.zeros((0, length, 3), np.float32), "FP32")])
        # From the name of an axis that an input also has.
        assert result.as_numpy("states").shape == (0, length, 4)
    assert _success(client, "gru") == (2, 0, 0)
    assert client.infer("gru", [tensor("ids", np.ones((2, 3), np.int64), "INT64")]).as_numpy("y").shape == (
        2,
        4,
    )
    assert _success(client, "gru") == (3, 2, 1)


@pytest.mark.parametrize(
    ("kind", "array"),
    [("BYTES", np.empty((0, 3), object)), ("INT32", np.zeros((0, 3), np.int32))],
)
def test_every_form_of_request(server: ServerProcess, kind: str, array: Any) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for typed in (False, True):
            message = request({"x": array}, typed=typed, model=f"echo-{kind}")
            (unary,) = stub.ModelInfer(message).outputs
            assert (unary.datatype, list(unary.shape)) == (kind, [0, 3])
            (streamed,) = stub.ModelStreamInfer(iter([message]))
            assert not streamed.error_message
            assert streamed.infer_response.outputs[0] == unary


def test_requested_outputs_and_classes(client: triton.InferenceServerClient) -> None:
    x = tensor("x", np.zeros((0, 5, 3), np.float32), "FP32")
    outputs = [triton.InferRequestedOutput("y", class_count=2)]
    result = client.infer("lstm", [x], outputs=outputs)
    assert result.as_numpy("y").shape == (0, 2)
    assert [output.name for output in result.get_response().outputs] == ["y"]


def test_an_unknown_shape_is_an_error(client: triton.InferenceServerClient) -> None:
    empty = tensor("x", np.zeros((0, 3), np.float32), "FP32")
    for _ in range(2):
        with pytest.raises(InferenceServerException, match="axis 1 of its output 'y'") as caught:
            client.infer("unnamed", [empty])
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    beside = tensor("x", np.ones((2, 3), np.float32), "FP32")
    assert client.infer("unnamed", [beside]).as_numpy("y").shape == (2, 6)


def test_the_shape_of_a_request_without_rows_is_checked(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="unexpected shape for input 'x'"):
        client.infer("lstm", [tensor("x", np.zeros((0, 5, 7), np.float32), "FP32")])
