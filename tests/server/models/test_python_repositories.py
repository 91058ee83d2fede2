"""Python models of a repository: loaded and reloaded like others, and never chosen by a client."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from support.models import small
from support.models.served_repository import ServedRepository

from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import InvalidRequestError, LoadFailedError, StartError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.models.lifecycle.registry import ModelState
from tensorferry.server.models.repository.declared_sources import declared_sources

READY = ModelState.READY

TIMES = """
from tensorferry.serving import FP32, model

@model(inputs={"x": FP32[-1, 3]}, outputs={"y": FP32[-1, 3]})
def times(x):
    return x * FACTOR
"""


def times(factor: int) -> str:
    return TIMES.replace("FACTOR", str(factor))


def ask(served: ServedRepository, model: str = "p") -> float:
    """Return the factor of a model."""
    answer = served.ask(model, np.ones((2, 3), np.float32), name="x")
    return float(answer[0, 0])


def test_polling_reloads_only_what_has_changed(served_repository: ServedRepository) -> None:
    served = served_repository
    served.write_code("p", "from factors import FACTOR\n" + TIMES)
    served.write_code("p", "FACTOR = 5", file="factors.py")
    control = served.start("*", mode="poll")
    before = served.registry.get("p")
    assert ask(served) == 5
    control._poll()
    assert served.registry.get("p") is before
    served.write_code("p", "FACTOR = 6", file="factors.py")
    control._poll()
    assert ask(served) == 6


def test_models_do_not_share_their_neighbours(served_repository: ServedRepository) -> None:
    served, paths, modules = served_repository, list(sys.path), set(sys.modules)
    for name, factor in (("p", 2), ("q", 3)):
        served.write_code(name, "from factors import FACTOR\n" + TIMES)
        served.write_code(name, f"FACTOR = {factor}", file="factors.py")
    served.start("*")
    assert (ask(served, "p"), ask(served, "q")) == (2, 3)
    assert sys.path == paths
    assert not {"factors", "model"} & (set(sys.modules) - modules)
    assert not list(served.root.rglob("__pycache__"))


def test_one_of_several_models_has_the_name_of_the_directory(served_repository: ServedRepository) -> None:
    served = served_repository
    served.write_code("p", times(2) + times(3).replace("def times", "def p"))
    served.start("*")
    assert ask(served) == 3
    served.write_code("p", times(2) + times(3).replace("def times", "def other"))
    with pytest.raises(
        LoadFailedError, match=r"declares the models 'times', 'other'; .* must declare one named 'p'"
    ):
        served.control.load("p")


def test_a_pipeline_of_a_repository(served_repository: ServedRepository) -> None:
    """It names another model of the repository, which is loaded before it."""
    served = served_repository
    served.write("twice", small.twice)
    served.write_code(
        "p",
        times(3)
        + """
from tensorferry.serving import pipeline, step
p = pipeline("p", step(times, outputs={"y": "middle"}), step("twice", inputs={"x": "middle"}))
""",
    )
    control = served.start("p")
    assert served.states() == {"p": READY, "twice": READY}
    assert ask(served) == 6
    control.unload("twice")
    assert served.states()["p"] is ModelState.UNAVAILABLE
    control.load("twice")
    assert ask(served) == 6
    served.write("p", config="max_batch_size: 4")
    with pytest.raises(LoadFailedError, match="has max_batch_size, but its Python file declares a pipeline"):
        control.load("p")


def test_a_pipeline_of_the_command_line_may_name_a_model_of_a_repository(
    served_repository: ServedRepository, tmp_path: Path
) -> None:
    served = served_repository
    served.write("twice", small.twice)
    app = tmp_path / "app.py"
    app.write_text('from tensorferry.serving import pipeline\np = pipeline("p", "twice")')
    control = served.start(named=declared_sources([ModelSource("app", app)]))
    assert served.states() == {"p": READY, "twice": READY}
    assert served.registry.get("p").max_batch_size == served.registry.get("twice").max_batch_size
    served.write("twice", lambda path: small.twice(path, ("batch", 4)))
    control.load("twice")
    assert served.states() == {"p": ModelState.UNAVAILABLE, "twice": READY}
    assert "was replaced by one that does not fit them: its inputs are x: FP32[-1, 4] now" in served.reason(
        "p"
    )
    served.write("twice", small.twice)
    control.load("twice")
    assert ask(served) == 2


TRITON = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.response = pb_utils.InferenceResponse
    def execute(self, requests):
        return [self.response(request.inputs()) for request in requests]
"""
TRITON_CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "x" data_type: TYPE_FP32 dims: 3 }
"""


@pytest.mark.parametrize(
    ("old", "new", "config", "said"),
    [
        ("utils.Inf", "utils.DInf", TRITON_CONFIG, "model.py:5: this server's .* has no DInferenceResponse"),
        (
            "return",
            "requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE); return",
            TRITON_CONFIG,
            "has no TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
        ),
        (
            "",
            "",
            'backend: "python"',
            "'p' has no inputs and outputs; give it a config.pbtxt with both, or a",
        ),
        ("import", "import no_such_module, ", TRITON_CONFIG, "No module named 'no_such_module'"),
        (
            "",
            "",
            TRITON_CONFIG + "max_batch_size: -1",
            "max_batch_size is -1; it must be an integer of at least 0",
        ),
        ("args)", "args, more)", TRITON_CONFIG, "'p' cannot be loaded:(.|\n)* positional argument: 'more'"),
        ("execute", "run", TRITON_CONFIG, "class TritonPythonModel has no method execute"),
        (
            "initialize(self, args",
            "auto_complete_config(config",
            'backend: "python"',
            "auto_complete_config",
        ),
    ],
)
def test_what_is_wrong_with_a_model_of_tritons_python_backend(
    served_repository: ServedRepository, old: str, new: str, config: str, said: str
) -> None:
    """Models that are right have tests of their own, with a server."""
    served_repository.write_code("p", TRITON.replace(old, new) if old else TRITON, config)
    with pytest.raises(StartError, match=said):
        served_repository.start("*")


def test_a_model_that_cannot_be_served_is_finalized(
    served_repository: ServedRepository, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error is reported, not that of `finalize`."""
    finalize = "    def finalize(self):\n        raise OSError('finalized')\n"
    reshaped = TRITON_CONFIG.replace("dims: 3 }", "dims: 3 reshape { shape: [ 1, 3 ] } }")
    served_repository.write_code("p", TRITON + finalize, reshaped)
    with pytest.raises(StartError, match="specifies 2 dimensions"):
        served_repository.start("*")
    assert "OSError: finalized" in caplog.text
    assert "During handling" not in caplog.text


CONFIG = """
backend: "python" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 }
dynamic_batching { preferred_batch_size: 2 priority_levels: 2 default_priority_level: 1 }
instance_group { count: 3 kind: KIND_CPU }
"""


def test_the_configuration_decides_batching_and_workers(served_repository: ServedRepository) -> None:
    served = served_repository
    served.write_code("p", times(2), CONFIG)
    control = served.start("*")
    model = served.registry.get("p")
    settings = model.batcher.settings
    assert (settings.max_batch_size, settings.devices, len(settings.priority_weights)) == (4, 3, 2)
    assert (settings.preferred_batch_sizes, settings.default_priority) == ((2,), 1)
    assert model.config.backend == "python"
    served.write("p", config=CONFIG[: CONFIG.index("dynamic_batching")])
    control.load("p")
    settings = served.registry.get("p").batcher.settings
    assert (settings.merge, settings.devices) == (False, 1)
    assert ask(served) == 2


@pytest.mark.parametrize(
    ("config", "declared", "message"),
    [
        ("max_batch_size: 9", "max_batch_size=8", "max_batch_size: 9, but the function declares at most 8"),
        ("max_batch_size: 9", "max_batch_size=0", "the function declares max_batch_size=0: it has no axis of rows"),
        (CONFIG.replace("max_batch_size: 4", ""), "", "so its requests have no axis of rows, but the function declares one"),
        (CONFIG.replace("dims: 3", "dims: 4"), "", "the model expects"),
        ("instance_group { kind: KIND_GPU }", "", "this server runs functions on the CPU"),
    ],
)  # fmt: skip
def test_a_configuration_that_contradicts_the_declaration_is_refused(
    served_repository: ServedRepository, config: str, declared: str, message: str
) -> None:
    served = served_repository
    code = times(2).replace("@model(", f"@model({declared + ', ' if declared else ''}")
    served.write_code("p", code, config)
    with pytest.raises(StartError, match=message):
        served.start("*")


def test_clients_cannot_send_code(served_repository: ServedRepository) -> None:
    control = served_repository.start()
    for file in ("1/model.py", "1/deep/helper.PY", "1/model.pyc"):
        with pytest.raises(InvalidRequestError, match="is Python code, which clients cannot send"):
            control.load("p", parse_config("", ""), {file: b""})


def test_a_clients_configuration_cannot_choose_code(served_repository: ServedRepository) -> None:
    served = served_repository
    served.write("m", small.twice)
    served.write_code("m", times(9), file="train.py")
    served.write_code("p", times(2), version=1)
    served.write_code("p", times(3), version=2)
    control = served.start("*")
    for name, config in (
        ("m", 'default_model_filename: "train.py"'),
        ("m", 'backend: "python"'),
        ("p", "version_policy { specific { versions: 1 } }"),
    ):
        with pytest.raises(LoadFailedError, match=r"chooses the Python file .* a client cannot choose code"):
            control.load(name, parse_config(config, ""))
    assert (ask(served, "m"), ask(served)) == (2, 3)
    control.load("p", parse_config("max_batch_size: 2", ""))
    assert served.registry.get("p").max_batch_size == 2
