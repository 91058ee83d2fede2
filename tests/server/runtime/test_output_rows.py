"""Classifiers whose label is declared with one row, as onnxmltools does for LightGBM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from support.models.classifiers import trees
from support.models.small import written

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.io_mapping import io_mapping_of
from tensorferry.server.runtime.session import Session


def test_one_label_for_all_rows_is_not_corrected(tmp_path: Path) -> None:
    text = "(float[n, 2] x) => (float[1] label) { most = ReduceMax <keepdims = 0> (x) label = Reshape (most, one) }"
    path = written(tmp_path / "m.onnx", text, one=np.array([1]))
    signature = Session(path).signature
    assert signature.outputs[0].dims == (1,)
    assert "fixed to 1" in str(signature.no_batch_axis_reason())


def test_a_configuration_may_declare_either_form(tmp_path: Path) -> None:
    signature = Session(trees(tmp_path / "m.onnx")).signature
    text = """name: "m" max_batch_size: %d input { name: "x" data_type: TYPE_FP32 dims: [%s] }
        output { name: "label" data_type: TYPE_INT64 %s }
        output { name: "probabilities" data_type: TYPE_FP32 dims: [%s] }"""

    def labels(batch: int, dims: str, x: str, probabilities: str) -> tuple[int, ...]:
        config = text_format.Parse(text % (batch, x, dims, probabilities), ModelConfig())
        return io_mapping_of(config, signature).signature.outputs[0].shape

    assert labels(0, "dims: [1]", "-1, 2", "-1, 3") == (1,)
    assert labels(0, "dims: [-1]", "-1, 2", "-1, 3") == (-1,)
    assert labels(8, "", "2", "3") == (-1,)
    with pytest.raises(ModelConfigError, match="label"):
        labels(0, "dims: [2]", "-1, 2", "-1, 3")
