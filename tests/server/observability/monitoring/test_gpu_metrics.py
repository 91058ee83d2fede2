"""GPU readings with a scripted NVML: devices, units and missing readings."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
from typing import Any

import pytest
from support.server.nvml import FakeGpu, FakeNvml, reader_of

from tensorferry.server.runtime.gpu.gpu_readings import GpuStatistics, open_nvml
from tensorferry.server.system.install_command import install_command

FIRST = "0000:17:00.0"
SECOND = "0000:b3:00.0"


def test_readings_of_a_gpu() -> None:
    gpu = FakeGpu(FIRST, "GPU-a", busy=37, used=3 << 30, total=80 << 30, celsius=61, milliwatts=312_500)
    gpus = reader_of(gpu)
    gpus.statistics(["cuda:0"])
    gpu.millijoules += 2_500
    assert gpus.statistics(["cuda:0"]) == [
        GpuStatistics("cuda:0", "GPU-a", 0.37, 3 << 30, 80 << 30, 61, 312.5, 700.0, 2.5)
    ]


@pytest.mark.parametrize(
    ("places", "found"),
    [
        # For example with CUDA_VISIBLE_DEVICES=1,0.
        ((SECOND, FIRST), [("cuda:0", "GPU-b"), ("cuda:1", "GPU-a")]),
        # Partitions of one GPU.
        ((FIRST, FIRST), [("cuda:0", "GPU-a")]),
    ],
)
def test_devices_are_matched_by_bus_id(places: tuple[str, ...], found: list[tuple[str, str]]) -> None:
    gpus = reader_of(FakeGpu(FIRST, "GPU-a"), FakeGpu(SECOND, "GPU-b"), places=places)
    assert [(gpu.device, gpu.uuid) for gpu in gpus.statistics(["cuda:0", "cuda:1"])] == found


@pytest.mark.parametrize("places", [(None,), (SECOND,)])
def test_an_unknown_device_is_logged_once(
    places: tuple[str | None, ...], caplog: pytest.LogCaptureFixture
) -> None:
    gpus = reader_of(FakeGpu(FIRST, "GPU-a"), places=places)
    assert [gpus.statistics(["cuda:0"]) for _ in range(3)] == [[], [], []]
    assert caplog.text.count("NVML does not find cuda:0: it has no metrics") == 1


def test_unsupported_readings_are_none() -> None:
    fields = {
        "utilization": ("utilization",),
        "memory": ("memory_used_bytes", "memory_total_bytes"),
        "temperature": ("temperature_celsius",),
        "power": ("power_watts",),
        "limit": ("power_limit_watts",),
        "energy": ("energy_joules",),
    }
    gpus = reader_of(FakeGpu(FIRST, "GPU-a"))
    (whole,) = gpus.statistics(["cuda:0"])
    for what, missing in fields.items():
        gpus = reader_of(FakeGpu(FIRST, "GPU-a", unsupported={what}))
        without: dict[str, Any] = dict.fromkeys(missing)
        assert gpus.statistics(["cuda:0"]) == [dataclasses.replace(whole, **without)]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, f"nvidia-ml-py is not installed ({install_command('gpu')} has it)"),
        (FakeNvml(starts=False), "NVML does not start (Driver/library version mismatch)"),
    ],
)
def test_a_missing_nvml_is_logged_once(
    module: FakeNvml | None, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert open_nvml() is None
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.WARNING, f"no GPU metrics: {reason}")
    ]


def test_the_stand_in_has_the_functions_of_the_real_module() -> None:
    """If nvidia-ml-py is installed, every function exists there with as many arguments."""
    real = pytest.importorskip("pynvml")
    assert issubclass(real.NVMLError, Exception)
    assert real.NVML_TEMPERATURE_GPU == FakeNvml.NVML_TEMPERATURE_GPU
    for name in vars(FakeNvml):
        if name.startswith("nvml"):
            ours = len(inspect.signature(getattr(FakeNvml, name)).parameters) - 1
            inspect.signature(inspect.unwrap(getattr(real, name))).bind(*range(ours))
