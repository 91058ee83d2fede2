"""Tables of models: their configurations come first, reloads keep them, and those without a model are named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.models import small
from support.server.rig import made_apps

from tensorferry.server.app import App
from tensorferry.server.config.load import load_config
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model


def test_the_configuration_of_a_model_precedes_its_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'device = "cpu"\n[models.m]\nmax-batch-size = 4\nslo-ms = 60000\ninstances = 2\nmax-queue-delay-ms = 9\n'
        'tf32 = true\nproviders = "tensorrt"'
    )
    own = parse_config("max_batch_size: 8 instance_group { count: 1 } dynamic_batching { }", "test")
    source = ModelSource("m", small.twice(tmp_path / "model.onnx"), config=own)
    config = load_config([f"m={source.path}"], {}, {}, file)
    model = load_model(source, LoadContext(config, {"cpu": "cpu"}))
    assert model.batcher.close()
    assert (model.max_batch_size, model.devices, model.slo) == (8, ("cpu",), 60.0)
    assert model.batcher.settings.max_queue_delay == 0
    first = "which has no effect: the model's own configuration comes first, and it sets"
    no_gpu = "which has no effect: no instance of the model is on a GPU"
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"[models.m] has instances, {first} instance_group",
        f"[models.m] has tf32, {no_gpu}",
        f"[models.m] has max-batch-size, {first} max_batch_size, or input and output",
        f"[models.m] has max-queue-delay-ms, {first} how requests share batches",
        f"[models.m] has the provider tensorrt, {no_gpu}",
    ]


# The whole server.


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., App]]:
    with made_apps(small.twice(tmp_path / "m.onnx")) as made:
        yield made


def repository(root: Path) -> Path:
    (root / "r" / "1").mkdir(parents=True)
    small.twice(root / "r" / "1" / "model.onnx")
    return root


def test_the_limits_of_all_models_bound_what_they_share(make: Callable[..., App]) -> None:
    app = make(
        max_queue_bytes=1000, model_options={"n": {"max_queue_bytes": 5000}, "m": {"run_timeout": 2.0}}
    )
    assert app._regions.max_bytes == 5000
    assert app._watchdog._shortest_limit == 2.0


@pytest.mark.parametrize(("control", "warned"), [("none", True), ("poll", False), ("explicit", False)])
def test_a_table_of_no_model_causes_a_warning_unless_models_can_be_loaded_later(
    control: str, warned: bool, make: Callable[..., App], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = make(
        model_repositories=(repository(tmp_path / "models"),),
        model_control=control,
        model_options={"m": {"slo": 60.0}, "r": {"slo": 60.0}, "absent": {"slo": 60.0}},
    )
    app.start()
    app.load()
    found = [record.getMessage() for record in caplog.records if "[models." in record.getMessage()]
    assert found == (["[models.absent] has no effect: no model of that name is served"] if warned else [])


def test_a_table_with_a_device_that_is_missing_is_an_error_at_start(make: Callable[..., App]) -> None:
    app = make(model_options={"n": {"device": "cuda:77"}})
    app.start()
    with pytest.raises(StartError, match=r"^\[models\.n\]: --device is 'cuda:77', but "):
        app.load()
