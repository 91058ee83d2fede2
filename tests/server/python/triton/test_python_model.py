"""Models of Triton's Python backend without a server. tests/e2e/functions/test_triton_models.py has what they do in one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.python.triton.python_model import triton_model

_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for add in (config.add_input, config.add_output):
            add({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})

    def initialize(self, args):
        pb_utils.Logger.log(f"{args['model_name']} in {args['model_repository']!r}", pb_utils.Logger.WARNING)

    def execute(self, requests):
        return []
"""


def test_a_model_in_the_current_directory_is_initialized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(_MODEL)
    declared, _ = triton_model("m", "1", Path("model.py"), None)
    declared.function().load()
    assert caplog.record_tuples == [("tensorferry.model", logging.WARNING, "m in '.'")]


def test_a_class_may_add_batching_to_a_configuration_with_tensors(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        _MODEL.replace(
            "(config):", "(config):\n        config.set_max_batch_size(8); config.set_dynamic_batching()"
        )
    )
    tensor = '{ name: "x" data_type: TYPE_FP32 dims: 1 }'
    declared, config = triton_model("m", "1", file, parse_config(f"input {tensor} output {tensor}", "given"))
    assert declared.max_batch_size == config.max_batch_size == 8
    assert config.HasField("dynamic_batching")


def test_what_requests_lack_is_named_at_load(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(_MODEL.replace("return []", "return [each.correlation_id() for each in requests]"))
    with pytest.raises(StartError, match=r"model\.py:14: requests have no correlation_id in this server"):
        triton_model("m", "1", file, None)
    # Of another object, a name means something else.
    file.write_text(_MODEL.replace("return []", "for each in requests: self.network.correlation_id()"))
    triton_model("m", "1", file, None)
