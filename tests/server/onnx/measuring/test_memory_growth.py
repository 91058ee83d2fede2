"""Memory is measured as growth since the start."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from support.server.nvml import FakeGpu, FakeNvml

from tensorferry.server.onnx.measuring import memory_growth
from tensorferry.server.onnx.measuring.memory_growth import GpuMemory, ResidentMemory
from tensorferry.server.runtime.gpu.gpu_readings import GpuReader

MIB = 1 << 20


def test_the_peak_counts_memory_that_is_free_again() -> None:
    memory = ResidentMemory()
    if "peak" not in memory.what:
        pytest.skip("this kernel does not reset the peak")
    memory.start()
    # Given back to the system at once, unlike memory of malloc.
    with mmap.mmap(-1, 64 * MIB) as pages:
        for at in range(0, 64 * MIB, mmap.PAGESIZE):
            pages[at] = 1
    assert memory.bytes() > 56 * MIB
    memory.start()
    assert memory.bytes() < 32 * MIB


def test_without_a_reset_of_the_peak_the_memory_in_use_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_growth, "_CLEAR_REFS", tmp_path / "absent" / "file")
    memory = ResidentMemory()
    assert memory.what.startswith("resident memory after the runs")
    memory.start()
    array = np.ones(64 * MIB, np.uint8)
    assert memory.bytes() > 56 * MIB
    assert array.size
    without_field = tmp_path / "status"
    without_field.write_text("Name:\tpython\n")
    monkeypatch.setattr(memory_growth, "_CLEAR_REFS", tmp_path / "clear")
    monkeypatch.setattr(memory_growth, "_STATUS", without_field)
    assert "peak" not in ResidentMemory().what


def test_a_gpus_memory_is_that_of_all_its_processes() -> None:
    gpu = FakeGpu("0000:3b:00.0", "GPU-1", used=5 * MIB)
    nvml = FakeNvml(gpu)
    nvml.nvmlInit()
    memory = GpuMemory(GpuReader(nvml, lambda index: gpu.bus_id), "cuda:0")
    gpu.used = 12 * MIB
    memory.start()
    assert memory.bytes() == 7 * MIB
    gpu.used = 1 * MIB
    assert memory.bytes() == 0
    assert "cuda:0" in memory.what
    assert GpuMemory(GpuReader(nvml, lambda index: None), "cuda:0").bytes() is None
