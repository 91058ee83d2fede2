"""Models whose first axis is fixed to 1 share batches, and clients get what ONNX Runtime gives for the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from e2e.fixtures import Serve
from support.models import small

from tensorferry.client import InferenceClient


def convolution(path: Path, factor: float = 1.0) -> Path:
    """x [1, 1, 6, 6] → y [1, 4], by a Reshape to one row; its weights are in another file."""
    generator = np.random.default_rng(3)
    small.written(
        path,
        """(float[1, 1, 6, 6] x) => (float[1, 4] y) {
            c = Conv (x, k) r = Relu (c) f = Reshape (r, flat) y = MatMul (f, w)
        }""",
        k=generator.standard_normal((2, 1, 3, 3)).astype(np.float32),
        flat=np.array([1, 32]),
        w=(factor * generator.standard_normal((32, 4))).astype(np.float32),
    )
    onnx.save(onnx.load(path), path, save_as_external_data=True, size_threshold=64, location="own.weights")
    return path


def answers(path: Path, x: np.ndarray) -> np.ndarray:
    """Return what ONNX Runtime gives for each row alone."""
    session = onnxruntime.InferenceSession(path)
    return np.concatenate([session.run(None, {"x": x[at : at + 1]})[0] for at in range(len(x))])


def test_rows_alone_and_together_get_the_answers_of_the_file(serve: Serve, tmp_path: Path) -> None:
    server = serve(convolution(tmp_path / "conv.onnx"), "--max-queue-delay-ms", "5")
    x = np.random.default_rng(1).standard_normal((64, 1, 6, 6)).astype(np.float32)
    right = answers(tmp_path / "conv.onnx", x)
    with InferenceClient(server.address) as client:
        metadata = client.metadata("conv")
        assert (
            metadata.properties["batching"]
            == "batches of up to 32 rows after at most 5 ms (proved, rewritten)"
        )
        assert [tuple(tensor.shape) for tensor in (*metadata.inputs, *metadata.outputs)] == [
            (-1, 1, 6, 6),
            (-1, 4),
        ]
        alone = [client.infer("conv", {"x": x[at : at + 1]})["y"] for at in range(8)]
        futures = [client.submit("conv", {"x": x[at : at + 1]}) for at in range(64)]
        together = np.concatenate([future.result(30)["y"] for future in futures])
        statistics = client.statistics("conv")[0]
        assert statistics.executions < statistics.rows
        several = client.infer("conv", {"x": x})["y"]
    np.testing.assert_allclose(np.concatenate(alone), right[:8], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(together, right, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(several, right, rtol=1e-5, atol=1e-5)


def test_a_model_that_is_loaded_again_is_rewritten_again(serve: Serve, tmp_path: Path) -> None:
    version = tmp_path / "models" / "conv" / "1"
    version.mkdir(parents=True)
    convolution(version / "model.onnx")
    server = serve(
        "--model-repository", tmp_path / "models", "--model-control", "explicit", "--load-model", "conv"
    )
    x = np.random.default_rng(1).standard_normal((5, 1, 6, 6)).astype(np.float32)
    with InferenceClient(server.address) as client:
        before = client.infer("conv", {"x": x})["y"]
        np.testing.assert_allclose(before, answers(version / "model.onnx", x), rtol=1e-5, atol=1e-5)
        convolution(version / "model.onnx", factor=2)
        client.load_model("conv")
        assert client.metadata("conv").properties["batching"].endswith("(proved, rewritten)")
        np.testing.assert_allclose(client.infer("conv", {"x": x})["y"], 2 * before, rtol=1e-5, atol=1e-5)
