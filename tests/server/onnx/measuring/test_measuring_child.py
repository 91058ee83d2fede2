"""What the measuring process sends, here without a process: on a GPU, memory is that in use on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.models import small
from support.server.nvml import FakeGpu, FakeNvml

from tensorferry.server.models.config_pbtxt.io_mapping import IoMapping
from tensorferry.server.onnx.measuring import measuring_child
from tensorferry.server.onnx.measuring.measuring_child import MeasuredModel
from tensorferry.server.runtime.files.fp16 import ModelFile
from tensorferry.server.runtime.gpu.gpu_readings import GpuReader
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session

MIB = 1 << 20


def sent(
    path: Path, device: str, gpu: GpuReader | None, monkeypatch: pytest.MonkeyPatch
) -> list[Mapping[str, Any]]:
    """Measure on a device whose sessions are on the CPU."""
    devices: list[str] = []

    def session(file: ModelFile, device: str, settings: OrtOptions) -> Session:
        devices.append(device)
        return Session(file.path, "cpu", settings)

    monkeypatch.setattr(ModelFile, "session", session)
    monkeypatch.setattr("tensorferry.server.runtime.gpu.gpu_readings.open_nvml", lambda: gpu)
    monkeypatch.setattr("tensorferry.server.runtime.devices.preload_libraries", lambda: None)
    io_mapping = IoMapping(Session(path).signature)
    model = MeasuredModel(ModelFile(path, path), device, OrtOptions(), io_mapping, 4, (1, 2), 60.0)
    messages: list[Mapping[str, Any]] = []
    measuring_child.measure(model, messages.append)
    assert devices == [device]
    return messages


def test_on_a_gpu_the_memory_in_use_there_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu("0000:3b:00.0", "GPU-1", used=7 * MIB)
    nvml = FakeNvml(gpu)
    nvml.nvmlInit()
    reader = GpuReader(nvml, lambda index: gpu.bus_id)
    loaded, one, two, end = sent(small.twice(tmp_path / "m.onnx"), "cuda:0", reader, monkeypatch)
    assert loaded["memory"] == "memory in use on cuda:0 beyond the loaded model, by all of its processes"
    assert [(each["rows"], each["memory_bytes"]) for each in (one, two)] == [(1, 0), (2, 0)]
    assert end == {"stopped": ""}


def test_without_nvml_the_memory_of_a_gpu_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, one, *_ = sent(small.twice(tmp_path / "m.onnx"), "cuda:1", None, monkeypatch)
    assert loaded["memory"] == ""
    assert one["memory_bytes"] is None
