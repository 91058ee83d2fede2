"""With several GPUs, a model has an instance on each, and its checks use the precision of its device.

The driver is a stand-in with two devices. Sessions compute on the CPU. Loading and the batcher are real.
"""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.models import small
from support.server.nvml import FakeGpu, FakeNvml
from support.server.rig import PATIENCE, Array, Load, made_apps

from tensorferry.server import app as app_module
from tensorferry.server.app import App
from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.onnx.loading import padding_check
from tensorferry.server.onnx.loading.padding_check import padding_dependence
from tensorferry.server.runtime import devices
from tensorferry.server.runtime.files import fp16
from tensorferry.server.runtime.gpu.gpu_readings import GpuReader
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session


class Devices:
    """Devices and options of the sessions that were made, and the relative error of batches of several rows."""

    def __init__(self) -> None:
        self.rounding = 0.0
        self.made: list[tuple[str, OrtOptions]] = []


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Devices:
    rig = Devices()

    class OnDevice(Session):
        def __init__(self, path: Path, device: str, settings: OrtOptions) -> None:
            super().__init__(path, "cpu")
            self.device = device
            rig.made.append((device, settings))

        def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
            outputs = super().run(inputs)
            by = 1 + (rig.rounding if len(next(iter(inputs.values()))) > 1 else 0)
            return {name: array * np.float32(by) for name, array in outputs.items()}

    monkeypatch.setattr(fp16, "Session", OnDevice)
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None, raising=False)
    monkeypatch.setattr(devices, "cuda_device_count", lambda: 2)
    return rig


@pytest.fixture
def load(scripted: Devices, load: Load) -> Load:
    """Load y = 2 x on these devices, or the model that a builder builds."""

    def on(
        device: str, config: str | None = None, build: Callable[[Path], Path] = small.twice, **options: Any
    ) -> Model:
        return load(build, config, device=device, **options)

    return on


def test_each_session_is_on_the_device_of_its_instance(load: Load, scripted: Devices) -> None:
    model = load("cuda:0,1", "instance_group { count: 2 }")
    assert [place for place, _ in scripted.made] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert model.devices == ("cuda:0", "cuda:0", "cuda:1", "cuda:1")


@pytest.mark.parametrize(("tf32", "how"), [(True, "(tested)"), (False, "depends on other rows")])
def test_the_batching_check_uses_the_precision_of_the_device(
    tf32: bool, how: str, load: Load, scripted: Devices
) -> None:
    scripted.rounding = 2e-3
    # A proved model may round more.
    assert how in load("cuda:0", build=small.squeezed, tf32=tf32).batching


@pytest.mark.parametrize(("tf32", "padded"), [(True, True), (False, False)])
def test_the_padding_check_uses_the_precision_of_the_device(
    tf32: bool, padded: bool, load: Load, scripted: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device starts to round after the batching check."""
    real = padding_dependence

    def rounding(*arguments: Any) -> str:
        scripted.rounding = 2e-3
        return real(*arguments)

    monkeypatch.setattr(padding_check, "padding_dependence", rounding)
    lengths = PadLengths("sequence", (4, 8))
    values = (("ids", "0"), ("mask", "0"))
    model = load("cuda:0", build=small.masked_mean, tf32=tf32, pad_lengths=lengths, pad_values=values)
    assert (model.padding is not None) is padded


@pytest.fixture
def serve(scripted: Devices, tmp_path: Path) -> Iterator[Callable[..., App]]:
    with made_apps(small.twice(tmp_path / "m.onnx")) as make:

        def start(**options: Any) -> App:
            app = make(metrics_port=0, **options)
            app.start()
            app.load()
            return app

        yield start


def page(app: App) -> str:
    assert app.metrics_url is not None
    with urllib.request.urlopen(app.metrics_url, timeout=PATIENCE) as answer:
        text: str = answer.read().decode()
    return text


def test_a_server_reports_the_gpus_that_serve(
    serve: Callable[..., App], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml(FakeGpu("b", "GPU-b", busy=25), FakeGpu("a", "GPU-a", busy=50))
    nvml.nvmlInit()
    monkeypatch.setattr(app_module, "open_nvml", lambda: GpuReader(nvml, "ab".__getitem__))
    app = serve(device="cuda:1")
    text = page(app)
    assert 'nv_gpu_utilization{gpu_uuid="GPU-b"} 0.25\n' in text
    assert 'tensorferry_gpu_utilization_ratio{device="cuda:1",gpu_uuid="GPU-b"} 0.25\n' in text
    assert "GPU-a" not in text
    assert app.stop()
    assert nvml.ready == 0


def test_a_server_on_the_cpu_does_not_open_nvml_and_names_options_without_effect(
    serve: Callable[..., App], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "cuda_device_count", lambda: 0)
    monkeypatch.setattr(fp16, "Session", Session)
    caplog.set_level(logging.WARNING)
    app = serve(device="auto", tf32=False, cuda_memory_bytes=1024)
    assert "gpu" not in page(app)
    warned = [record.message for record in caplog.records if "has no effect" in record.message]
    assert warned == [
        "--cuda-memory-bytes is 1KiB, which has no effect: no model runs on a GPU",
        "--tf32 is false, which has no effect: no model runs on a GPU",
    ]
    assert "nvidia-ml-py" not in caplog.text
