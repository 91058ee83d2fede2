"""Models of Triton's Python backend without a server. tests/e2e/functions/test_triton_models.py has what they do in one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorferry.server.errors import StartError, StepFailedError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.python.functions.answers import NO_MORE
from tensorferry.server.python.triton.backend_utils import InferenceRequest, Tensor
from tensorferry.server.python.triton.python_model import is_triton_model, triton_model
from tensorferry.serving import calls_through

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

_OTHER_FUNCTION = """
    def fetch(self, url):
        each = self.network(url)
        return each.correlation_id()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.py"


def test_a_model_in_the_current_directory_is_initialized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(_MODEL)
    declared, _ = triton_model("m", "1", Path("model.py"), None)
    declared.function().load()
    assert caplog.record_tuples == [("tensorferry.model", logging.WARNING, "m in '.'")]


def test_a_class_may_add_batching_to_a_configuration_with_tensors(file: Path) -> None:
    file.write_text(
        _MODEL.replace(
            "(config):", "(config):\n        config.set_max_batch_size(8); config.set_dynamic_batching()"
        )
    )
    tensor = '{ name: "x" data_type: TYPE_FP32 dims: 1 }'
    declared, config = triton_model("m", "1", file, parse_config(f"input {tensor} output {tensor}", "given"))
    assert declared.max_batch_size == config.max_batch_size == 8
    assert config.HasField("dynamic_batching")


def test_what_requests_lack_is_named_at_load(file: Path) -> None:
    file.write_text(_MODEL.replace("return []", "return [each.correlation_id() for each in requests]"))
    with pytest.raises(StartError, match=r"model\.py:14: requests have no correlation_id in this server"):
        triton_model("m", "1", file, None)
    # Of another object, a name means something else.
    file.write_text(_MODEL.replace("return []", "for each in requests: self.network.correlation_id()"))
    triton_model("m", "1", file, None)
    # So it does in another function.
    file.write_text(_MODEL.replace("return []", "return [each for each in requests]") + _OTHER_FUNCTION)
    triton_model("m", "1", file, None)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class TritonPythonModel: pass", True),
        ("class Base: pass\nTritonPythonModel = Base", True),
        ("from impl import TritonPythonModel", True),
        ("from impl import Model as TritonPythonModel", True),
        ("try:\n    import torch\nexcept ImportError:\n    class TritonPythonModel: pass", True),
        ("if True:\n    class TritonPythonModel: pass", True),
        ("def make():\n    class TritonPythonModel: pass", False),
        ("print(TritonPythonModel)", False),
    ],
)
def test_a_file_has_the_class_if_it_binds_the_name(text: str, found: bool, file: Path) -> None:
    file.write_text(text)
    assert is_triton_model(file) is found


def test_an_exit_in_auto_complete_config_fails_the_load(file: Path) -> None:
    file.write_text(_MODEL.replace("for add in", "raise SystemExit(3)\n        for add in"))
    with pytest.raises(StartError, match=r"auto_complete_config failed:\n(.*\n)*SystemExit: 3"):
        triton_model("m", "1", file, None)


@pytest.mark.parametrize("of_class", [False, True])
def test_an_optional_input_is_refused(file: Path, of_class: bool) -> None:
    adds = '(config):\n        config.add_input({"name": "z", "data_type": "TYPE_FP32", "dims": [1], "optional": True})'
    file.write_text(_MODEL.replace("(config):", adds) if of_class else _MODEL)
    given = parse_config('input { name: "z" data_type: TYPE_FP32 dims: 1 optional: true }', "given")
    with pytest.raises(StartError, match=r"model 'm' has `optional: true` for z, which .* leave it out"):
        triton_model("m", "1", file, None if of_class else given)


@pytest.mark.parametrize("error", ["ValueError", "SystemExit"])
def test_what_finalize_raises_is_logged(error: str, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The unload goes on, and other models are finalized."""
    file.write_text(_MODEL + f"\n    def finalize(self):\n        raise {error}('closed')\n")
    triton_model("m", "1", file, None)[0].function().close()
    assert "model m: finalize raised; the model is unloaded without the rest of it:\n" in caplog.text
    assert f"{error}: closed" in caplog.text


def answers_of(file: Path, execute: str) -> Any:
    """Return the answers to a request of a decoupled model with this end of `execute`."""
    decoupled = '(config):\n        config.set_model_transaction_policy({"decoupled": True})'
    file.write_text(_MODEL.replace("(config):", decoupled).replace("return []", execute))
    made = triton_model("m", "1", file, None)[0].function()
    return made.answers({"x": np.ones(1, np.float32)})


def test_execute_of_a_decoupled_model_must_return_none(file: Path) -> None:
    answers = answers_of(file, "return [pb_utils.InferenceResponse([])]")
    with pytest.raises(StepFailedError, match=r"execute returned an object of type list; .* and return None"):
        answers.read()
    answers.close()


def test_an_exception_after_the_last_response_is_logged(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = answers_of(file, "requests[0].get_response_sender().send(flags=1); raise KeyError('late')")
    assert answers.read() is NO_MORE
    answers.close()
    assert "model m: execute raised after the last response" in caplog.text
    assert "KeyError: 'late'" in caplog.text


class _Echo:
    """`ModelCaller` that answers with the inputs."""

    def submit(
        self, model: str, version: str, inputs: Mapping[str, Any], timeout: float | None
    ) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        future.set_result({**inputs})
        return future


def test_a_call_of_another_model_may_run_on_a_thread_of_the_model() -> None:
    """Such a thread has nothing of the context of `execute`, as there is nothing of it after the block."""
    with calls_through(_Echo()):
        request = InferenceRequest(
            model_name="echo", inputs=[Tensor("x", np.ones(1))], requested_output_names=["x"]
        )
    response = request.exec()
    assert not response.has_error()
    assert [tensor.name() for tensor in response.output_tensors()] == ["x"]
