"""Too large responses are refused with the flag named, before the model runs if the shapes show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.models import small
from support.server.rig import PATIENCE, Array, Make, fp32, request

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc
from tensorferry.server.app import App
from tensorferry.server.config.server_config import ModelSource

MAX_BYTES = 10_000


def repeated(path: Path) -> Path:
    text = "(float[batch, 1] x) => (float[batch, 500] y, float[batch, 1] z) { y = Mul (x, ones) z = Identity (x) }"
    return small.written(path, text, ones=np.ones((1, 500), np.float32))


def echoed_twice(path: Path) -> Path:
    text = (
        "(float[batch, n] x) => (float[batch, n] y, float[batch, n] z) { y = Identity (x) z = Identity (x) }"
    )
    return small.written(path, text)


def zeros(path: Path) -> Path:
    """y has the shape that x says."""
    return small.written(path, "(int64[2] x) => (float[a, b] y) { y = ConstantOfShape (x) }")


@pytest.fixture
def serving(make: Make) -> Callable[[Path], Any]:
    @contextmanager
    def served(path: Path) -> Iterator[tuple[App, Any]]:
        app = make(models=(ModelSource("m", path),), max_message_bytes=MAX_BYTES)
        app.start()
        app.load()
        with grpc.insecure_channel(app.address) as channel:
            yield app, inference_pb2_grpc.GRPCInferenceServiceStub(channel)

    return served


def refused(stub: Any, message: pb.ModelInferRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message, timeout=PATIENCE)
    error: Any = caught.value
    return error.code(), error.details()


def runs(app: App) -> int:
    (model,) = app.registry.models()
    return model.batcher.statistics().batches


def message(array: Array, *outputs: str) -> pb.ModelInferRequest:
    made = request({"x": array})
    for name in outputs:
        made.outputs.add(name=name)
    return made


@pytest.mark.parametrize("rows", [6, 30])
def test_a_known_shape_is_refused_before_the_model_runs(serving: Any, tmp_path: Path, rows: int) -> None:
    with serving(repeated(tmp_path / "m.onnx")) as (app, stub):
        assert stub.ModelInfer(message(fp32(4, 1)), timeout=PATIENCE)
        before = runs(app)
        for _ in range(2):
            code, details = refused(stub, message(fp32(rows, 1)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"the response would have {rows * 501 * 4} bytes" in details
            assert "at most 10000" in details
            assert "--max-message-bytes" in details
        assert runs(app) == before
        # Outputs that are not requested or are classified do not count.
        assert stub.ModelInfer(message(fp32(rows, 1), "z"), timeout=PATIENCE)
        classes = message(fp32(rows, 1), "y")
        classes.outputs[0].parameters["classification"].int64_param = 2
        assert stub.ModelInfer(classes, timeout=PATIENCE)


def test_dimensions_named_like_an_inputs_are_known(serving: Any, tmp_path: Path) -> None:
    with serving(echoed_twice(tmp_path / "m.onnx")) as (_, stub):
        code, details = refused(stub, message(fp32(1, 2000)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "the response would have 16000 bytes (outputs y, z)" in details
        assert stub.ModelInfer(message(fp32(1, 2000), "y"), timeout=PATIENCE)


def test_the_id_and_what_is_around_the_outputs_count(serving: Any, tmp_path: Path) -> None:
    """Otherwise gRPC refused the message, and ended the stream."""
    with serving(repeated(tmp_path / "m.onnx")) as (_, stub):
        # y has exactly as many bytes as a message.
        large, small = message(fp32(5, 1), "y"), message(fp32(1, 1), "y")
        answers = list(stub.ModelStreamInfer(iter([large, small]), timeout=PATIENCE))
        assert sorted("--max-message-bytes" in answer.error_message for answer in answers) == [False, True]
        named = request({"x": fp32(4, 1)}, id="i" * 3000)
        named.outputs.add(name="y")
        assert refused(stub, named)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("form", ["raw", "typed"])
def test_a_response_of_unknown_shape_is_refused_after_the_run(
    serving: Any, tmp_path: Path, form: str
) -> None:
    with serving(zeros(tmp_path / "m.onnx")) as (_, stub):
        message = request({"x": np.array([10, 500])}, typed=form == "typed")
        for _ in range(2):
            code, details = refused(stub, message)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "the response has 20" in details
            assert "--max-message-bytes" in details
        # The stream continues after the error.
        small = request({"x": np.array([1, 5])})
        answers = list(stub.ModelStreamInfer(iter([message, small]), timeout=PATIENCE))
        assert sorted("--max-message-bytes" in answer.error_message for answer in answers) == [False, True]
