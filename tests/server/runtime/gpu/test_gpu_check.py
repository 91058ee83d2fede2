"""`make gpu-check` with the CPU as the device: it passes, and it finds faults."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gpu_check
import pytest
from support.models import small
from support.server.cpu_as_device import CpuDeviceMemory

from tensorferry.server.runtime.gpu.pinned_memory import MemoryBlock


@pytest.mark.parametrize("name", ["mlp in FP32", "echo of BF16", "mixing"])
def test_a_correct_device_passes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = [case for case in gpu_check.cases(tmp_path) if case.name == name]
    assert gpu_check.check(case, "cpu", CpuDeviceMemory()) == []
    assert f"gpu-check: {name}, alone, with CUDA graphs: differs by 0" in capsys.readouterr().out


class SharedHostBlocks(CpuDeviceMemory):
    """Faulty memory: every host block is the same."""

    def __init__(self) -> None:
        self.all = super().host(1 << 20)

    def host(self, nbytes: int) -> MemoryBlock:
        return MemoryBlock(self.all.address, nbytes, lambda: self.all)


class TruncatedLoads(CpuDeviceMemory):
    """Faulty memory: only the first 32 bytes are copied to the device."""

    def load(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, min(nbytes, 32))


@pytest.mark.parametrize("memory", [SharedHostBlocks, TruncatedLoads])
def test_a_faulty_device_is_found(memory: type[CpuDeviceMemory], tmp_path: Path) -> None:
    case = gpu_check.Case("mlp", small.mlp(tmp_path / "m.onnx"), "FP32")
    assert any("without CUDA graphs: " in line for line in gpu_check.check(case, "cpu", memory()))
