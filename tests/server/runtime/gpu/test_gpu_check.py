"""`make gpu-check` with the CPU as the device: it passes, and it finds faults."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

import gpu_check
import pytest
from support.models import small
from support.server.cpu_as_device import CpuDeviceMemory


@pytest.mark.parametrize("name", ["mlp in FP32", "echo of BF16", "mixing"])
def test_a_correct_device_passes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = [case for case in gpu_check.cases(tmp_path) if case.name == name]
    assert gpu_check.check(case, "cpu", CpuDeviceMemory()) == []
    assert f"gpu-check: {name}, alone, with CUDA graphs: differs by 0" in capsys.readouterr().out


def test_states_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small.totals(tmp_path / "m.onnx")
    assert gpu_check.held_states(path, "cpu", CpuDeviceMemory()) == []
    assert "with CUDA graphs: 0 of 500 answers are wrong" in capsys.readouterr().out
    assert len(gpu_check.held_states(path, "cpu", _LostStates())) == 2


class _LostStates(CpuDeviceMemory):
    """Faulty memory: nothing is copied within the device."""

    def copy_all(self, copies: Iterable[tuple[int, int, int]]) -> None:
        pass


class TruncatedLoads(CpuDeviceMemory):
    """Faulty memory: only the first 32 bytes are copied to the device."""

    def load(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, min(nbytes, 32))


def test_a_faulty_device_is_found(tmp_path: Path) -> None:
    case = gpu_check.Case("mlp", small.mlp(tmp_path / "m.onnx"), "FP32")
    assert any("without CUDA graphs: " in line for line in gpu_check.check(case, "cpu", TruncatedLoads()))
