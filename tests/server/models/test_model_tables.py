"""Each option of a model's table has an effect on that model when it is loaded, and on no other model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import pytest
from support.models import small
from support.server.rig import made_apps

from tensorferry.batcher import ClientPolicy
from tensorferry.server.app import App
from tensorferry.server.config.load import load_config
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.models.lifecycle import loader
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.registry import Model
from tensorferry.server.onnx.loading import loading as onnx_loading
from tensorferry.server.runtime import devices
from tensorferry.server.runtime.devices import choose_device
from tensorferry.server.runtime.files import fp16, op_libraries
from tensorferry.server.runtime.gpu.cuda_graphs import GraphOptions, GraphSpec
from tensorferry.server.runtime.ort_options import ExecutionProvider, Fp16, OrtOptions
from tensorferry.server.runtime.recovery.watchdog import RunLimits, Watchdog
from tensorferry.server.runtime.session import Session

Build = Callable[[Path], Path]


class Recorded:
    """What the sessions and the watchdog of a model got while it was loaded."""

    def __init__(self) -> None:
        self.devices: list[str] = []
        self.options: list[OrtOptions] = []
        self.limits: list[RunLimits] = []


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Sessions run on the CPU, whatever their device and their execution providers. There are two GPUs."""
    seen = Recorded()

    class OnCpu(Session):
        def __init__(self, path: Path, device: str, settings: OrtOptions) -> None:
            super().__init__(path, "cpu", OrtOptions(intra_op_threads=settings.intra_op_threads))
            self.device = device
            seen.devices.append(device)
            seen.options.append(settings)

    def limits(watchdog: Watchdog | None, *seconds: float) -> RunLimits:
        seen.limits.append(RunLimits(watchdog, *seconds))
        return seen.limits[-1]

    monkeypatch.setattr(op_libraries, "_try", lambda libraries: None)
    monkeypatch.setattr(fp16, "Session", OnCpu)
    monkeypatch.setattr(onnx_loading, "RunLimits", limits)
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None, raising=False)
    monkeypatch.setattr(devices, "cuda_device_count", lambda: 2)
    return seen


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


def of_batcher(name: str) -> Callable[[Model, Recorded], Any]:
    return lambda model, recorded: getattr(model.batcher.settings, name)


def of_session(name: str) -> Callable[[Model, Recorded], Any]:
    return lambda model, recorded: getattr(recorded.options[0], name)


def cuda_option(name: str) -> Callable[[Model, Recorded], Any]:
    return lambda model, recorded: dict(recorded.options[0].cuda).get(name)


def pad_value(model: Model, recorded: Recorded) -> Any:
    inputs: Any = model.padding.inputs if model.padding is not None else None
    return int(inputs["ids"].value)


CLIENTS = of_batcher("clients")
ON_GPU = 'device = "cuda:0"\n'


class Effect(NamedTuple):
    """The lines of a table and those above all tables, the model, what to look at, and its value with and without the table."""

    table: str
    look: Callable[[Model, Recorded], Any]
    with_table: Any
    without: Any
    above: str = ""
    build: Build = small.twice


EFFECTS = {
    "custom-ops": Effect(
        f"custom-ops = {__file__!r}",
        lambda m, r: [library.path for library in r.options[-1].op_libraries],
        [Path(__file__)],
        [],
    ),
    "device": Effect('device = "cuda:1"', lambda m, r: r.devices, ["cuda:1"], ["cpu"]),
    "instances": Effect("instances = 2", lambda m, r: r.devices, ["cpu", "cpu"], ["cpu"]),
    "providers": Effect(
        'providers = ["TensorRT", "OpenVINO"]',
        lambda m, r: (r.options[-1].gpu, r.options[-1].cpu),
        ((ExecutionProvider("TensorrtExecutionProvider"),), ()),
        ((), ()),
        above=ON_GPU,
    ),
    "tf32": Effect("tf32 = false", cuda_option("use_tf32"), "0", None, above=ON_GPU),
    "fp16-tolerance": Effect(
        "fp16-tolerance = 0.5",
        of_session("fp16"),
        Fp16(0.5),
        Fp16(0.02),
        above="fp16 = true",
        build=small.mlp,
    ),
    "cuda-graphs": Effect(
        "cuda-graphs = [1, 4]",
        of_session("graphs"),
        GraphOptions((GraphSpec(1), GraphSpec(4))),
        None,
        above=ON_GPU,
    ),
    "run-timeout-seconds": Effect(
        "run-timeout-seconds = 5", lambda m, r: r.limits[-1].run_seconds, 5.0, 600.0
    ),
    "max-batch-size": Effect("max-batch-size = 4", lambda m, r: m.max_batch_size, 4, 32),
    "batch-rows": Effect('batch-rows = "max"', lambda m, r: m.batcher.settings.adaptive, False, True),
    "batching": Effect(
        'batching = "trust"',
        lambda m, r: m.batching_verdict,
        "trusted",
        "refused",
        build=small.softmax_over_rows,
    ),
    "pad-values": Effect(
        'pad-values = "ids=7,mask=0"',
        pad_value,
        7,
        0,
        above='pad-lengths = "sequence=4"\npad-values = "ids=0,mask=0"',
        build=small.masked_mean,
    ),
    "priority-weights": Effect("priority-weights = [8, 1]", of_batcher("priority_weights"), (8, 1), (1,)),
    "slo-ms": Effect("slo-ms = 60000", lambda m, r: m.slo, 60.0, float("inf")),
    "max-queue-bytes": Effect('max-queue-bytes = "1MiB"', of_batcher("max_queue_bytes"), 1 << 20, 1 << 30),
    "client-max-requests": Effect("client-max-requests = 3", CLIENTS, ClientPolicy(max_requests=3), None),
}


@pytest.mark.parametrize("flag", EFFECTS)
def test_an_option_has_an_effect_on_its_model_only(
    flag: str, load: Callable[..., Model], recorded: Recorded
) -> None:
    table, look, with_table, without, above, build = EFFECTS[flag]
    device = "" if "device" in above else 'device = "cpu"'
    text = f"{device}\n{above}\n[models.m]\n{table}"
    assert look(load("m", text, build), recorded) == with_table
    recorded.devices.clear()
    recorded.options.clear()
    assert look(load("n", text, build), recorded) == without


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
    control: str,
    warned: bool,
    make: Callable[..., App],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
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


def test_each_model_runs_on_the_device_of_its_table(
    make: Callable[..., App], tmp_path: Path, recorded: Recorded
) -> None:
    other = ModelSource("n", small.twice(tmp_path / "n.onnx"))
    sources = (ModelSource("m", tmp_path / "m.onnx"), other)
    app = make(models=sources, model_options={"n": {"device": "cuda:1"}})
    app.start()
    app.load()
    assert [model.devices for model in app.registry.models()] == [("cpu",), ("cuda:1",)]
