"""A model with the batch axis elsewhere: its requests share batches, and clients see tensors as in the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.models import small
from support.server.rig import PATIENCE, Array, Load, made_apps, request

from tensorferry.client import Classification, InferenceClient
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc
from tensorferry.server.app import App
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.serving import onnx, pipeline


def inputs(rows: int, seed: int = 0) -> dict[str, Array]:
    drawn = np.random.default_rng(seed)
    return {
        "x": drawn.standard_normal((rows, 4), np.float32),
        "state": drawn.standard_normal((2, rows, 4), np.float32),
    }


def expected(given: dict[str, Array]) -> dict[str, Array]:
    return {"y": given["x"] + given["state"].sum(axis=0), "next": given["state"] + given["x"]}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[App]:
    with made_apps(small.streaming(tmp_path / "m.onnx")) as made:
        app = made(allow_shared_memory=True, max_queue_size=64)
        app.start()
        app.load()
        yield app


@pytest.fixture
def client(served: App) -> Iterator[InferenceClient]:
    with InferenceClient(served.address) as opened:
        yield opened


def test_clients_send_and_get_tensors_as_in_the_file(client: InferenceClient) -> None:
    # The second request of a shape is matched by the template of the first.
    for rows in (1, 1, 3, 3):
        given = inputs(rows, seed=rows)
        got = client.infer("m", given)
        for name, right in expected(given).items():
            assert got[name].shape == right.shape
            np.testing.assert_allclose(got[name], right, rtol=1e-6)


def test_requests_share_batches(tmp_path: Path) -> None:
    given = [inputs(1 + at % 2, seed=at) for at in range(32)]
    with made_apps(small.streaming(tmp_path / "m.onnx")) as made:
        # Without a delay, each could run at once if the client were slow.
        app = made(max_queue_delay=1.0)
        app.start()
        app.load()
        with InferenceClient(app.address) as client:
            futures = [client.submit("m", one) for one in given]
            for one, future in zip(given, futures, strict=True):
                np.testing.assert_allclose(future.result(30)["next"], expected(one)["next"], rtol=1e-6)
            (found,) = client.statistics("m")
    assert found.rows == sum(len(one["x"]) for one in given)
    assert found.executions < len(given)


def test_metadata_has_the_batch_axes_and_the_configuration_has_no_batch_axis(
    client: InferenceClient, served: App
) -> None:
    """To the protocol, max_batch_size means that the rows are on axis 0."""
    found = client.metadata("m")
    assert [tensor.shape for tensor in (*found.inputs, *found.outputs)] == [(-1, 4), (2, -1, 4)] * 2
    assert found.properties["batch_axes"] == "state=1,next=1"
    assert "max_request_rows" not in found.properties
    with grpc.insecure_channel(served.address) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        config = stub.ModelConfig(pb.ModelConfigRequest(name="m"), timeout=PATIENCE).config
    assert config.max_batch_size == 0
    assert [list(tensor.dims) for tensor in (*config.input, *config.output)] == [[-1, 4], [2, -1, 4]] * 2


@pytest.mark.parametrize(
    ("x", "state", "message"),
    [
        ((2, 4), (2, 3, 4), "input 'state' batch size does not match other inputs for model 'm': 3 rows, 'x' has 2"),
        ((2, 4), (3, 2, 4), "Expected [2, -1, 4], got [3, 2, 4] (axis 1 counts rows)"),
        ((65, 4), (2, 65, 4), "input 'x' has 65 rows; the queue of model 'm' holds 64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    x: tuple[int, ...], state: tuple[int, ...], message: str, served: App
) -> None:
    # The bundled client refuses some of these itself.
    given = request({"x": np.zeros(x, np.float32), "state": np.zeros(state, np.float32)})
    with grpc.insecure_channel(served.address) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError, match=re.escape(message)):
            stub.ModelInfer(given, timeout=PATIENCE)


def test_a_request_without_rows_gets_outputs_without_rows(client: InferenceClient) -> None:
    got = client.infer("m", inputs(0))
    assert (got["y"].shape, got["next"].shape) == ((0, 4), (2, 0, 4))


def test_classes_are_only_of_outputs_whose_rows_are_first(client: InferenceClient) -> None:
    found = client.infer("m", inputs(2), outputs={"y": Classification(1)})
    assert len(found["y"]) == 2
    with pytest.raises(Exception, match="output 'next' has its rows on axis 1"):
        client.infer("m", inputs(2), outputs={"next": Classification(1)})


def test_functions_call_it_with_tensors_as_in_the_file(tmp_path: Path) -> None:
    small.streaming(tmp_path / "m.onnx")
    app = tmp_path / "app.py"
    app.write_text("""
import numpy as np
from tensorferry.serving import FP32, infer, model, onnx

m = onnx("m.onnx")

@model(inputs={"x": FP32[-1, 4]}, outputs={"next": FP32[-1, 2, 4]})
def caller(x):
    state = np.ones((2, len(x), 4), np.float32)
    return infer("m", x=x, state=state)["next"].swapaxes(0, 1)
""")
    x = inputs(3)["x"]
    with made_apps(app) as made:
        started = made()
        started.start()
        started.load()
        with InferenceClient(started.address) as client:
            got = client.infer("caller", {"x": x})["next"]
    np.testing.assert_allclose(got, np.stack([x + 1, x + 1], axis=1), rtol=1e-6)


def test_steps_need_the_rows_on_axis_0(tmp_path: Path) -> None:
    small.streaming(tmp_path / "m.onnx")
    app = tmp_path / "app.py"
    lines = ["from tensorferry.serving import onnx, pipeline", 'm = onnx("m.onnx")', 'p = pipeline("p", "m")']
    app.write_text("\n".join(lines))
    with made_apps(app) as made:
        started = made()
        started.start()
        with pytest.raises(
            StartError, match="'state' has its rows on axis 1; steps exchange tensors with the"
        ):
            started.load()


def test_a_step_of_a_pipeline_is_not_rewritten(tmp_path: Path) -> None:
    """Its tensors are those of the pipeline, whose rows are on axis 0."""
    small.streaming(tmp_path / "own.onnx")
    declared = pipeline("p", onnx("own.onnx"), outputs=["y", "next"])
    source = ModelSource("p", tmp_path / "app.py", declaration=declared)
    context = LoadContext(ServerConfig((source,)), {"auto": "cpu"})
    model = load_model(source, context)
    assert (model.max_batch_size, str(model.signature.inputs[1])) == (0, "state: FP32[2, 1, 4]")
    assert model.batcher.close()


def test_an_output_may_be_elsewhere_than_a_variable_first_axis_of_the_input(load: Load) -> None:
    """Such as [sequence, batch, classes] of recurrent layers. Without the copy the model is refused."""

    def turned(path: Path) -> Path:
        text = "(float[n, length, 3] x) => (float[length, n, 3] y) { y = Transpose <perm = [1, 0, 2]> (x) }"
        return small.written(path, text)

    model = load(turned)
    assert (model.batching_verdict, dict(model.signature.batch_axes)) == ("proved", {"y": 1})
    assert load(turned, batching_rewrite=False).batching_verdict == "refused"


@pytest.mark.parametrize("second", ["m", "?"])
def test_axes_that_may_be_lengths_are_no_rows(second: str, load: Load) -> None:
    """The second input may have one row for all of the first."""

    def sums(path: Path) -> Path:
        text = f"(float[n, 2000] x, float[{second}, 2000] z) => (float[1, n, 2000] y)"
        return small.written(path, text + "{ s = Add (x, z) y = Unsqueeze (s, axis) }", axis=np.array([0]))

    assert load(sums).max_batch_size == 0
