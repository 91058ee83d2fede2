"""FP16 models on a real server: clients send and get FP32, and a model that loses accuracy ends the
server.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from e2e.fixtures import Serve
from support.models import small

from tensorferry.client import InferenceClient


def test_clients_notice_nothing_but_the_rounding(serve: Serve, tmp_path: Path) -> None:
    whole = small.mlp(tmp_path / "whole.onnx")
    path = tmp_path / "m.onnx"
    onnx.save_model(
        onnx.load(str(whole)), str(path), save_as_external_data=True, location="weights", size_threshold=0
    )
    server = serve(path, "--fp16")
    assert server.ready["models"][0]["signature"] == "(x: FP32[-1, 8]) -> (p: FP32[-1, 4])"
    session = onnxruntime.InferenceSession(str(whole), providers=["CPUExecutionProvider"])
    with InferenceClient(server.address) as client:
        for seed in range(5):
            x = np.random.default_rng(seed).standard_normal((3, 8)).astype(np.float32)
            (expected,) = session.run(["p"], {"x": x})
            got = client.infer("m", {"x": x}, timeout=60)["p"]
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, expected, atol=5e-3)
            assert not np.array_equal(got, expected)
    assert server.stop() == 0
    assert any("model m in FP16: outputs differ from FP32 by at most" in line for line in server.log)
