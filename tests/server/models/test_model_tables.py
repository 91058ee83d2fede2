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
from tensorferry.server.models.lifecycle import loader
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.registry import Model
from tensorferry.server.runtime.devices import choose_device

Build = Callable[[Path], Path]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Model]]:
    """Load a model with the name, with the configuration in a file's text and with a config.pbtxt if given."""
    loaded: list[Model] = []

    def make(name: str, text: str, build: Build = small.twice, pbtxt: str | None = None) -> Model:
        file = tmp_path / "c.toml"
        file.write_text(text)
        parsed = parse_config(pbtxt, "test") if pbtxt is not None else None
        source = ModelSource(name, build(tmp_path / "model.onnx"), config=parsed)
        config = load_config([f"{name}={source.path}"], {}, {}, file).for_model(name)
        loaded.append(
            loader.load_model(source, LoadContext(config, {config.device: choose_device(config.device)}))
        )
        return loaded[-1]

    yield make
    for model in loaded:
        assert model.batcher.close()


def test_the_configuration_of_a_model_precedes_its_table(
    load: Callable[..., Model], caplog: pytest.LogCaptureFixture
) -> None:
    text = (
        'device = "cpu"\n[models.m]\nmax-batch-size = 4\nslo-ms = 60000\ninstances = 2\nmax-queue-delay-ms = 9\n'
        'tf32 = true\nproviders = "tensorrt"'
    )
    model = load("m", text, pbtxt="max_batch_size: 8 instance_group { count: 1 } dynamic_batching { }")
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


def test_a_model_that_is_loaded_again_keeps_its_options(make: Callable[..., App], tmp_path: Path) -> None:
    app = make(
        model_repositories=(repository(tmp_path / "models"),),
        model_control="explicit",
        model_options={"r": {"max_batch_size": 4}, "later": {"slo": 1.0}},
    )
    app.start()
    app.load()
    for _ in range(2):
        app._control.load("r")
        assert app.registry.get("r").max_batch_size == 4
        app._control.unload("r")
    assert app.registry.get("m").max_batch_size == 32


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
